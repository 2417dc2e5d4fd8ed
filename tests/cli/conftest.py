"""A fake server for the commands that look at one, and a terminal wide enough for its lines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client.fake_service import FakeService, serving
from typer.testing import CliRunner

from agentkv.cli.app import app

Invoke = Callable[..., Any]
"""Runs the command with some arguments; gives typer's result."""


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def address(service: FakeService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
