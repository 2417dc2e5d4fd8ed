"""AgentKV through gRPC: a server process of its own, and this process as its client.

Memory is the server's; the client's is not counted.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from agentkv.client.async_client import AsyncClient
from agentkv.client.async_context_handle import AsyncContextHandle
from agentkv.client.completion import Chunk
from benchmarks.peers.protocol import (
    Job,
    Load,
    Loaded,
    Node,
    Outcome,
    peak_rss,
    reset_peak_rss,
    serve,
)

SETTINGS = (
    "agentkv serve on the loopback interface, without a tier below the pool, as the others have "
    "none; branches alike by one GenerateBranches, others by Fork, Extend and Generate, the calls "
    "of a wave at once; a tree is released by one call at the end"
)
OPTIONS: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


@dataclass(slots=True)
class Run:
    """One job while it runs."""

    handles: dict[int, AsyncContextHandle] = field(default_factory=dict)
    first_tokens: dict[int, float] = field(default_factory=dict)
    """By node, `time.perf_counter()`."""
    num_generated: dict[int, int] = field(default_factory=dict)


class ServedAgentKV:
    """One server and one client."""

    def __init__(self, load: Load) -> None:
        self._server, address = _start(load)
        self._runner = asyncio.Runner()
        self._client = self._runner.run(_connect(address))
        self._info = self._runner.run(self._client.server_info())

    def loaded(self) -> Loaded:
        """Describes the engine."""
        pool_bytes = self._info.pool.total_blocks * self._info.model.bytes_per_block
        return Loaded(self._info.server_version, SETTINGS, pool_bytes=pool_bytes)

    def run(self, job: Job) -> Outcome:
        """Runs a job; its contexts are released afterwards."""
        return self._runner.run(self._run(job))

    def close(self) -> None:
        """Stops the server."""
        self._runner.run(self._client.close())
        self._runner.close()
        self._server.terminate()
        self._server.wait()

    async def _run(self, job: Job) -> Outcome:
        run = Run()
        first_tokens: list[float] = []
        seconds: list[float] = []
        reset_peak_rss(self._server.pid)
        rows = await self._rows()
        num_waves = len(job.waves)
        for index, (is_measured, numbers) in enumerate(job.numbered()):
            begun = time.perf_counter()
            await self._wave(run, job, numbers)
            if index == num_waves - 1:
                roots = [run.handles[n] for n, node in enumerate(job.nodes) if node.parent is None]
                await asyncio.gather(*(root.release(recursive=True) for root in roots))
            if is_measured:
                seconds.append(time.perf_counter() - begun)
                first_tokens += [
                    run.first_tokens[n] - begun for n in numbers if job.nodes[n].decode
                ]
            else:
                rows = await self._rows()
        return Outcome(
            tuple(seconds),
            tuple(first_tokens),
            tuple(run.num_generated.get(number, 0) for number in range(len(job.nodes))),
            await self._rows() - rows,
            peak_rss(self._server.pid),
        )

    async def _rows(self) -> int:
        return (await self._client.server_info()).counters.computed_tokens

    async def _wave(self, run: Run, job: Job, numbers: range) -> None:
        """Runs the nodes of a wave at once: neighbours that are alike in one call."""
        alike = [list(group) for _, group in groupby(numbers, key=lambda n: job.nodes[n])]
        calls = []
        for group in alike:
            node = job.nodes[group[0]]
            if node.parent is not None and not node.given and node.decode:
                calls.append(self._branches(run, node, group))
            else:
                calls += [self._single(run, node, number) for number in group]
        await asyncio.gather(*calls)

    async def _branches(self, run: Run, node: Node, numbers: Sequence[int]) -> None:
        assert node.parent is not None
        parent = run.handles[node.parent]
        stream = parent.generate_branches(
            len(numbers), at=node.at, max_tokens=node.decode, seed=numbers[0], **OPTIONS
        )
        async with stream:
            async for update in stream:
                if isinstance(update, Chunk):
                    _count(run, numbers[update.branch], len(update.token_ids))
            contexts = stream.contexts
            for number, handle in zip(numbers, contexts, strict=True):
                run.handles[number] = handle

    async def _single(self, run: Run, node: Node, number: int) -> None:
        if node.parent is None:
            handle = await self._client.create(token_ids=node.given)
        else:
            handle = await run.handles[node.parent].fork_one(at=node.at)
            if node.given:
                await handle.extend(token_ids=node.given)
        run.handles[number] = handle
        if node.decode:
            async with handle.generate(max_tokens=node.decode, seed=number, **OPTIONS) as stream:
                async for chunk in stream:
                    _count(run, number, len(chunk.token_ids))


def _count(run: Run, number: int, num_tokens: int) -> None:
    run.first_tokens.setdefault(number, time.perf_counter())
    run.num_generated[number] = run.num_generated.get(number, 0) + num_tokens


def _start(load: Load) -> tuple[subprocess.Popen[str], str]:
    """Starts the server and waits for its READY line."""
    command = [
        *(sys.executable, "-m", "agentkv", "serve", "--model", load.gguf, "--port", "0"),
        *("--kv-memory", str(load.kv_bytes), "--host-blocks", "0"),
        *("--threads", str(load.num_threads)),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("READY"):
            return server, line.split()[1]
    raise RuntimeError(f"the server ended with {server.wait()} before it was ready")


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(address)


def main() -> None:
    """Answers the driver, then stops the server."""
    with contextlib.ExitStack() as stack:

        def load(request: Load) -> ServedAgentKV:
            engine = ServedAgentKV(request)
            stack.callback(engine.close)
            return engine

        serve(load)


if __name__ == "__main__":
    main()
