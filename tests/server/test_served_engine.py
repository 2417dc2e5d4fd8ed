"""The engine that serves is one the service can call, and so is the fake that stands for it."""

import inspect

import pytest
from server.fake_engine import FakeEngine

from agentkv.engine.async_engine import AsyncEngine
from agentkv.server.served_engine import ServedEngine

VERBS = [name for name in vars(ServedEngine) if not name.startswith("_")]


def as_served(engine: AsyncEngine) -> ServedEngine:
    """Type checkers compare every method here."""
    return engine


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("engine", [AsyncEngine, FakeEngine], ids=lambda engine: engine.__name__)
def test_every_verb_takes_what_the_service_passes(engine: type, name: str) -> None:
    """Catches an option that the service passes, its fake takes, and the engine has not."""
    wanted = getattr(ServedEngine, name)
    if isinstance(wanted, property):
        return  # a name to read, which type checkers compare
    taken = inspect.signature(getattr(engine, name)).parameters
    for parameter in inspect.signature(wanted).parameters.values():
        assert taken[parameter.name].kind is parameter.kind
