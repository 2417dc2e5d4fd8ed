"""The commands that save and restore contexts."""

from cli.conftest import Invoke
from client.fake_service import FakeService

from agentkv import Client


def test_a_tree_is_saved_restored_listed_and_deleted(
    address: str, service: FakeService, invoke: Invoke
) -> None:
    """Catches an option that is not sent, and contexts released as soon as they are restored."""
    with Client(address) as client:
        root = client.create("abc")
        saved = invoke("save", root.id, "mine", address, "--tokens-only", "--overwrite")
        assert saved.exit_code == 0, saved.output
        assert "mine: 2 contexts, 3 distinct tokens, 2 with KV, 4 KiB, alphabet" in saved.stdout
        (request,) = service.requests("Save")
        assert request.recursive and request.tokens_only and request.overwrite
        restored = invoke("restore", "mine", address)
        assert restored.exit_code == 0, restored.output
        assert f"{root.id} is now r1.context-2" in restored.stdout
        assert "computed again: no room" in restored.stdout
        assert "r1.context-3" in service.contexts
        assert "2023-11-14" in invoke("snapshots", address).stdout
        assert invoke("snapshots", address, "--delete", "mine").exit_code == 0
        assert invoke("snapshots", address).stdout.strip() == ""
    assert invoke("restore", "mine", address).exit_code == 1
