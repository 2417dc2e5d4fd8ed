"""The two drivers of operations: one blocks, one awaits. They know steps and nothing else."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentkv.client.operation import Call, Operation, Read, ResultT, Step, Wait
from agentkv.client.transport import AsyncTransport, Transport


class Driver:
    """Runs operations on a blocking transport.

    Args:
        transport: Where calls go.
        sleep: Pauses for a number of seconds.
    """

    def __init__(self, transport: Transport, sleep: Callable[[float], None] = time.sleep) -> None:
        self.transport = transport
        self._sleep = sleep

    def run(self, operation: Operation[ResultT]) -> ResultT:
        """Runs an operation to its end and returns its result."""
        try:
            step = next(operation)
            while True:
                try:
                    outcome = self._do(step)
                except BaseException as error:  # an interrupt too: the operation cleans up
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    def _do(self, step: Step) -> Any:
        match step:
            case Call():
                return self.transport.unary(step)
            case Read():
                return step.stream.read()
            case Wait():
                return self._sleep(step.seconds)


class AsyncDriver:
    """Runs operations on an asyncio transport.

    Args:
        transport: Where calls go.
        sleep: Pauses for a number of seconds.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.transport = transport
        self._sleep = sleep

    async def run(self, operation: Operation[ResultT]) -> ResultT:
        """Runs an operation to its end and returns its result."""
        try:
            step = next(operation)
            while True:
                try:
                    outcome = await self._do(step)
                except BaseException as error:  # a cancellation too: the operation cleans up
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    async def _do(self, step: Step) -> Any:
        match step:
            case Call():
                return await self.transport.unary(step)
            case Read():
                return await step.stream.read()
            case Wait():
                return await self._sleep(step.seconds)
