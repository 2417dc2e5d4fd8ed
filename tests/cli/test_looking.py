"""The commands that look at a running server."""

import io
import re
from dataclasses import replace

import pytest
from cli.conftest import Invoke
from client.fake_service import FakeService, Fault
from rich.console import Console

from agentkv import (
    Client,
    DiskCountersInfo,
    InvalidRequest,
    LeaseMode,
    Residency,
    Unavailable,
)
from agentkv.cli.connection import connected
from agentkv.cli.info import describe
from agentkv.cli.tree import watch
from agentkv.cli.tree_view import draw, sharing_ratio


def drawn(renderable: object) -> str:
    """Renders for a wide terminal without colours."""
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_tree_hangs_branches_below_their_parents(address: str, invoke: Invoke) -> None:
    """Catches a flat list, a wrong parent, or totals that do not add up."""
    with Client(address) as client:
        root = client.create("abcdefgh", labels={"task": "[bold]24"})
        middle = root.fork_one(at=4)
        leaf = middle.fork_one()
        middle.extend("x")
        result = invoke("tree", address)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[0] == f"{address}  alphabet float32"
    assert f"└── …{root.id[-6:]}  8 tokens  blocks 1 alone + 0 shared  task=[bold]24" in lines[1]
    assert f"    └── …{middle.id[-6:]}  5 tokens from 4  blocks 1 alone + 1 shared" in lines[2]
    assert f"        └── …{leaf.id[-6:]}  4 tokens from 4" in lines[3]
    assert lines[4].startswith("3 contexts, 17 tokens; pool of 64 blocks: 3 live, 4 cached, 57")
    assert lines[4].endswith("sharing ratio 1.67")


def test_tree_keeps_branches_of_a_released_parent_together(address: str, invoke: Invoke) -> None:
    """Catches branches that vanish from the drawing with their parent."""
    with Client(address) as client:
        root = client.create("abc")
        root.fork(2)
        root.release()
        result = invoke("tree", address)
    assert re.search(r"…\S+ released\n    ├── .*\n    └── ", result.stdout)


def test_tree_does_not_depend_on_the_order(address: str, service: FakeService) -> None:
    """Catches a branch listed before its parent that is drawn as an orphan."""
    with Client(address) as client:
        client.create("abc").fork_one()
        contexts, server = list(client.list()), client.server_info()
    text = drawn(draw(address, server, contexts[::-1]))
    assert "released" not in text
    assert text == drawn(draw(address, server, contexts))


def test_tree_shows_what_is_special(address: str) -> None:
    """Catches a context without KV, or a busy one, that looks like any other."""
    with Client(address) as client:
        client.create("abc")
        (plain,) = client.list()
        server = client.server_info()
    odd = replace(plain, busy=True, pinned=True, residency=Residency.PARTIAL, num_computed_tokens=2)
    assert "busy  pinned  KV partial, 2 computed" in drawn(draw(address, server, [odd]))
    assert "busy" not in drawn(draw(address, server, [plain]))


def test_tree_of_nothing(address: str, invoke: Invoke) -> None:
    """Catches a division by the blocks of an empty pool."""
    result = invoke("tree", address)
    assert "no contexts" in result.stdout
    with Client(address) as client:
        assert sharing_ratio([], client.server_info().pool) == 1.0


def test_a_very_deep_tree_is_drawn(address: str) -> None:
    """Catches a recursion as deep as the tree: searches go a thousand forks down."""
    with Client(address) as client:
        client.create("abc")
        (context,) = client.list()
        server = client.server_info()
    chain = [context] + [
        replace(context, id=f"deep-{depth}", parent_id=f"deep-{depth - 1}" if depth else context.id)
        for depth in range(1_500)
    ]
    text = drawn(draw(address, server, chain))
    assert text.count("tokens  blocks") == 1
    assert text.count("tokens from") == 19
    assert "… 1,481 more below" in text
    assert "1,501 contexts" in text


def test_watching_draws_until_interrupted() -> None:
    """Catches a loop that Ctrl-C ends with a traceback, or that shows the first state for ever."""
    states = iter(["one", "two", "three"])
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True)
    watch(lambda: next(states), console, 0.5, sleep)
    assert naps == [0.5, 0.5, 0.5]
    assert list(states) == []


def test_info_shows_the_server(address: str, invoke: Invoke) -> None:
    """Catches a command that omits what operators look for first."""
    result = invoke("info", address)
    assert result.exit_code == 0, result.output
    for part in ("9.8.7", "alphabet", "float32", "64 blocks of 4 tokens, 2 KiB each", "3 forks"):
        assert part in result.stdout


def test_info_shows_what_moved_where_there_are_tiers(address: str) -> None:
    """Catches a failing disk that no operator sees, or lines about tiers that are not there."""
    with Client(address) as client:
        server = client.server_info()
    bare = replace(server, pool=replace(server.pool, host_total_blocks=0))
    assert not {"Moved", "Disk"} & set(describe(address, bare))
    disk = DiskCountersInfo(
        num_written=1500, num_read=2, num_failed_writes=1, num_bad_reads=3, last_failure="full"
    )
    facts = describe(
        address,
        replace(
            server,
            model=replace(server.model, host_bytes_per_block=1024),
            counters=replace(server.counters, num_moved_out=1600, num_lost=3, disk=disk),
        ),
    )
    assert facts["Moved"] == "1,600 blocks out to host memory, 0 brought back, 3 lost"
    assert facts["Disk"] == (
        "1,500 blocks written (1.46 MiB), 2 read back (2 KiB); 0 refused, 1 failed writes (full), "
        "3 bad reads, 0 timeouts"
    )


@pytest.mark.parametrize("command", ["tree", "info"])
def test_a_server_that_is_not_there_is_one_line(command: str, invoke: Invoke) -> None:
    """Catches a traceback, or a wait, where a hint is wanted."""
    result = invoke(command, "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: No server answers at 127.0.0.1:1. Start one")
    assert result.stderr.count("\n") == 1


def test_an_answer_of_the_server_is_shown_as_it_is(
    address: str, service: FakeService, invoke: Invoke
) -> None:
    """Catches every failure blamed on the connection, or one spread over lines."""
    service.faults["GetServerInfo"].append(Fault(InvalidRequest("Not [this]\nway.")))
    result = invoke("info", address)
    assert result.exit_code == 1
    assert result.stderr == "error: Not [this] way.\n"


def test_a_draining_server_says_so(address: str, service: FakeService) -> None:
    """Catches a server that drains reported as one that is not there."""
    service.faults["GetServerInfo"].append(Fault(Unavailable("Draining.")))
    with pytest.raises(Unavailable, match="Draining"), connected(address) as client:
        client.server_info()


def test_watch_shows_a_line_for_each_event(address: str, invoke: Invoke) -> None:
    """Catches an event that is not shown, or a command that never ends when told a count."""
    with Client(address) as client:
        root = client.create("abc")
        result = invoke("watch", address, "--count", "3")
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    assert first.split("  ")[-2:] == ["ok", "59 of 64 blocks free, 4 reclaimable, 0 pinned"]
    assert f"…{root.id[-6:]}  expiring  3 tokens" in second
    assert "pressure  ok" in third


def test_tree_shows_leases(address: str) -> None:
    """Catches a context that is about to lose its KV and looks like any other."""
    with Client(address) as client:
        client.create("abc")
        (plain,) = client.list()
        server = client.server_info()
    for lease, mark in (
        (replace(plain.lease, mode=LeaseMode.PARK), "parked"),
        (replace(plain.lease, mode=LeaseMode.DROPPABLE), "droppable"),
        (replace(plain.lease, expire_time=None), "lease expired"),
    ):
        assert mark in drawn(draw(address, server, [replace(plain, lease=lease)]))


def test_usage_shows_the_bill_and_the_quotas(address: str, invoke: Invoke) -> None:
    """Catches a number in the wrong place, or a limit that is none and looks like 0."""
    with Client(address) as client:
        client.create("abc")
        result = invoke("usage", address)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "Contexts 1 now",
        "Tokens 11 computed, of them 4 again; 22 reused, 33 generated",
        "Block-seconds 6.5 on the device, 7.5 on the host, 8.5 on disk; sharing saved 9.5",
        "Block copies 5",
        "Quota of blocks 3 of 40",
        "Quota of block-seconds no limit",
        "Quota of contexts 2 of 8",
        "Quota of depth 5",
        "Quota of fan-out no limit",
        "All tenants, device 10.0 block-seconds: 6.5 held, 3.5 cached",
    ]
