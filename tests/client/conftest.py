"""A fake server for every test of the SDK, and a client that does not wait between attempts."""

from collections.abc import Iterator

import pytest
from client.fake_service import FakeService, serving

from agentkv import Client, RetryPolicy

HASTY = RetryPolicy(first_backoff=0.0, max_backoff=0.5)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def address(service: FakeService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=10, retry=HASTY) as client:
        yield client
