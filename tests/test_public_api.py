"""What `agentkv` exports: exactly this, all of it documented."""

import inspect
from enum import Enum

import pytest

import agentkv
from agentkv.errors import AgentKVError

PUBLIC = {
    *("Client", "ContextHandle", "ContextGroup", "GenerateStream", "BranchStream"),
    *("AsyncClient", "AsyncContextHandle", "AsyncContextGroup"),
    *("AsyncGenerateStream", "AsyncBranchStream"),
    *("RetryPolicy", "SamplingOptions", "SamplingParams"),
    *("BranchFinish", "Chunk", "Completion", "FinishReason", "GeneratedBranch"),
    *("TopLogprobs", "Choice", "RestoredContexts", "SnapshotInfo"),
    *("ContextInfo", "ContinuationScore", "Extension", "PoolInfo", "Released", "Residency"),
    *("Usage", "ServerInfo", "ModelInfo", "LimitsInfo", "CountersInfo", "DiskCountersInfo"),
    *("JsonSchema", "Regex", "Lark", "Choices", "Tools", "Tool", "ToolCall", "Continued"),
    *("LeaseInfo", "LeaseMode", "LeaseOptions", "LeaseReduction", "PressureLevel"),
    *("WatchStream", "AsyncWatchStream", "WatchSnapshot", "ContextChange", "PressureChange"),
    *("ChangeKind", "AgentKVError", "Reason"),
    *("Bill", "QuotaInfo", "Tier", "TierUsage", "UsageInfo"),
    *(class_.__name__ for class_ in AgentKVError.__subclasses__()),
}


def test_exported_names_are_these() -> None:
    """Catches a name added, lost or renamed without anyone deciding so."""
    assert set(agentkv.__all__) == PUBLIC
    assert agentkv.__all__ == sorted(agentkv._MODULES)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_names_lead_to_documented_things(name: str) -> None:
    """Catches a lazy name that leads nowhere, and a method users have to guess at."""
    thing = getattr(agentkv, name)
    assert thing.__name__ == name
    assert name in dir(agentkv)
    members = [
        member
        for label, member in inspect.getmembers(thing)
        if label[0] != "_" and (inspect.isfunction(member) or isinstance(member, property))
        if not issubclass(thing, Enum)
    ]
    assert all(inspect.getdoc(member) for member in [thing, *members])


def test_other_names_fail_as_usual() -> None:
    """Catches a lazy import that answers for every name."""
    misspelt = "Clinet"
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        getattr(agentkv, misspelt)
