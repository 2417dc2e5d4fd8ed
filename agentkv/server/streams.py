"""From one stream of the engine to one stream of the wire, at the reader's pace.

It owns how long a reader may stall, and that what the engine does for a stream never outlives it.
It knows nothing of what the messages say.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from agentkv.errors import SlowReader
from agentkv.server.served_engine import UpdateStream
from agentkv.server.tenant import Rpc

UpdateT = TypeVar("UpdateT")


async def relay(
    updates: UpdateStream[UpdateT],
    rpc: Rpc,
    translate: Callable[[tuple[UpdateT, ...]], Message | None],
    *,
    stall_timeout: float,
) -> None:
    """Writes one message per engine step, and closes the generation however the stream ends.

    At most one message is held here. gRPC itself lets a server run some megabytes ahead of a
    reader; once it no longer does, a write waits.

    Args:
        updates: The updates; closed when this returns or raises.
        rpc: The call to write to.
        translate: Makes a step's message; None when the step has nothing for this stream.
        stall_timeout: Seconds one write may wait for the reader.

    Raises:
        SlowReader: The reader stalled; the context is at its last committed token.
        AgentKVError: The engine refused it, or ended it by an error, after all updates before that
            were written.
    """
    has_begun = False
    async with updates:
        try:
            async for step in updates:
                message = translate(step)
                if message is None:
                    continue
                if not has_begun:
                    # By itself gRPC sends it with the first message, and once more with the status
                    # of a reader that stalls at that message: which fails, and the client hangs.
                    await rpc.send_initial_metadata(())
                    has_begun = True
                await _write(rpc, message, stall_timeout)
        finally:
            # Before anything is awaited again: a failed write is followed by a CancelledError at
            # the next await, even one in a `finally`.
            updates.close()


async def _write(rpc: Rpc, message: Message, stall_timeout: float) -> None:
    try:
        async with asyncio.timeout(stall_timeout) as scope:
            await rpc.write(message)
    except TimeoutError:
        if not scope.expired():
            raise
        raise SlowReader(
            f"The stream was not read for {stall_timeout:g} s. Every branch is at its last "
            "committed token: Get says where, and Generate goes on from there."
        ) from None
