"""What a server with a disk tier tells of it, from a file's bytes to the client's counters."""

from pathlib import Path

from server.harness import run
from server.real_engine import MAX_LENGTH, really_serving, tiny_engine
from slow_twin import PlainModel
from tiny_engines import TEXT_VOCAB_SIZE
from tiny_models import build_tiny_model

from agentkv.client.async_client import AsyncClient
from agentkv.client.server_info import DiskCountersInfo, ServerInfo
from agentkv.client.values import Residency
from agentkv.engine.cost_meter import CostMeter

PROMPTS = [[(13 * number + 7 * seed) % 250 + 3 for number in range(40)] for seed in range(3)]


async def told(client: AsyncClient, num_written: int) -> ServerInfo:
    """Waits until the server's thread has written so many blocks; returns what it says then."""
    while True:
        info = await client.server_info()
        assert info.counters.disk is not None
        if info.counters.disk.num_written >= num_written:
            return info


def break_files(folder: Path) -> None:
    """Inverts the last byte of every block's file, as a failing disk may."""
    for file in folder.rglob("*.kv"):
        *kept, last = file.read_bytes()
        file.write_bytes(bytes([*kept, last ^ 0xFF]))


def test_what_the_disk_did_reaches_the_client(tmp_path: Path) -> None:
    """Catches counters that stop on their way, and broken files that nobody hears of."""
    plain = PlainModel(
        build_tiny_model("llama", vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=MAX_LENGTH)
    )

    async def scenario() -> None:
        core = tiny_engine(num_blocks=16, host_blocks=3, disk_dir=str(tmp_path), disk_bytes=1 << 20)
        core._loop._costs = CostMeter(lambda: 0.0)  # moving pays, however fast this machine is
        async with really_serving(core) as served, AsyncClient(served.server.address) as client:
            assert (await client.server_info()).counters.disk == DiskCountersInfo()
            contexts = [await client.create(token_ids=prompt) for prompt in PROMPTS]
            for context in contexts:  # three blocks each, as many as the host tier has
                await context.park()
            info = await told(client, 6)
            assert (info.pool.disk_live_blocks, info.pool.host_live_blocks) == (6, 3)
            assert info.model.host_bytes_per_block == info.model.bytes_per_block
            for number in range(2):
                assert (await contexts[number].refresh()).residency is Residency.DISK
                done = await contexts[number].complete(max_tokens=5, logprobs=True)
                plain.check_greedy(PROMPTS[number], done.token_ids, done.logprobs)
                if number == 0:
                    break_files(tmp_path)
            counters = (await client.server_info()).counters
            assert counters.disk == DiskCountersInfo(num_written=6, num_read=3, num_bad_reads=3)
            assert (counters.num_moved_out, counters.num_lost) == (9, 3)

    run(scenario())
    assert not list(tmp_path.iterdir())


def test_a_server_without_a_disk_tier_has_no_counts_of_one() -> None:
    """Catches zeros where there is nothing to count."""

    async def scenario() -> None:
        async with really_serving() as served, AsyncClient(served.server.address) as client:
            info = await client.server_info()
            assert (info.counters.disk, info.pool.disk_total_blocks) == (None, 0)

    run(scenario())
