"""AgentKV: contexts that fork. The SDK's public names.

Every part of AgentKV imports this module, so it stays light: a name is loaded when it is first
used, and importing `agentkv` loads no gRPC, let alone torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.client.async_client import AsyncClient
    from agentkv.client.async_context_handle import AsyncContextHandle
    from agentkv.client.async_streams import AsyncBranchStream, AsyncGenerateStream
    from agentkv.client.client import Client
    from agentkv.client.completion import (
        BranchFinish,
        Chunk,
        Completion,
        FinishReason,
        GeneratedBranch,
        ToolCall,
        TopLogprobs,
    )
    from agentkv.client.context_group import AsyncContextGroup, ContextGroup
    from agentkv.client.context_handle import ContextHandle
    from agentkv.client.retry import RetryPolicy
    from agentkv.client.sampling_options import SamplingOptions
    from agentkv.client.server_info import CountersInfo, LimitsInfo, ModelInfo, ServerInfo
    from agentkv.client.snapshot_info import RestoredContexts, SnapshotInfo
    from agentkv.client.streams import BranchStream, GenerateStream
    from agentkv.client.usage_info import Bill, QuotaInfo, Tier, TierUsage, UsageInfo
    from agentkv.client.values import (
        Choice,
        ContextInfo,
        ContinuationScore,
        Extension,
        LeaseInfo,
        LeaseMode,
        LeaseOptions,
        LeaseReduction,
        PoolInfo,
        PressureLevel,
        Released,
        Residency,
        Usage,
    )
    from agentkv.client.watch_events import (
        ChangeKind,
        ContextChange,
        PressureChange,
        WatchSnapshot,
    )
    from agentkv.client.watch_stream import AsyncWatchStream, WatchStream
    from agentkv.constraint import Choices, Continued, JsonSchema, Lark, Regex, Tool, Tools
    from agentkv.errors import (
        AgentKVError,
        Cancelled,
        ContextBusy,
        ContextLost,
        ContextMoved,
        DeadlineExceeded,
        InternalError,
        InvalidRequest,
        NotFound,
        PoolExhausted,
        Reason,
        SlowReader,
        Unauthenticated,
        Unavailable,
        UnsupportedModelError,
    )
    from agentkv.sampling_params import SamplingParams

_HOMES = {
    "agentkv.client.async_client": ("AsyncClient",),
    "agentkv.client.async_context_handle": ("AsyncContextHandle",),
    "agentkv.client.async_streams": ("AsyncBranchStream", "AsyncGenerateStream"),
    "agentkv.client.client": ("Client",),
    "agentkv.client.completion": (
        "BranchFinish",
        "Chunk",
        "Completion",
        "FinishReason",
        "GeneratedBranch",
        "ToolCall",
        "TopLogprobs",
    ),
    "agentkv.client.context_group": ("AsyncContextGroup", "ContextGroup"),
    "agentkv.client.context_handle": ("ContextHandle",),
    "agentkv.client.retry": ("RetryPolicy",),
    "agentkv.client.sampling_options": ("SamplingOptions",),
    "agentkv.client.server_info": ("CountersInfo", "LimitsInfo", "ModelInfo", "ServerInfo"),
    "agentkv.client.snapshot_info": ("RestoredContexts", "SnapshotInfo"),
    "agentkv.client.streams": ("BranchStream", "GenerateStream"),
    "agentkv.client.usage_info": ("Bill", "QuotaInfo", "Tier", "TierUsage", "UsageInfo"),
    "agentkv.client.values": (
        "Choice",
        "ContextInfo",
        "ContinuationScore",
        "Extension",
        "LeaseInfo",
        "LeaseMode",
        "LeaseOptions",
        "LeaseReduction",
        "PoolInfo",
        "PressureLevel",
        "Released",
        "Residency",
        "Usage",
    ),
    "agentkv.constraint": (
        "Choices",
        "Continued",
        "JsonSchema",
        "Lark",
        "Regex",
        "Tool",
        "Tools",
    ),
    "agentkv.client.watch_events": (
        "ChangeKind",
        "ContextChange",
        "PressureChange",
        "WatchSnapshot",
    ),
    "agentkv.client.watch_stream": ("AsyncWatchStream", "WatchStream"),
    "agentkv.errors": (
        "AgentKVError",
        "Cancelled",
        "ContextBusy",
        "ContextLost",
        "ContextMoved",
        "DeadlineExceeded",
        "InternalError",
        "InvalidRequest",
        "NotFound",
        "PoolExhausted",
        "Reason",
        "SlowReader",
        "Unauthenticated",
        "Unavailable",
        "UnsupportedModelError",
    ),
    "agentkv.sampling_params": ("SamplingParams",),
}
"""Where each public name lives. mypy compares `__all__` with the imports, a test with this."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AgentKVError",
    "AsyncBranchStream",
    "AsyncClient",
    "AsyncContextGroup",
    "AsyncContextHandle",
    "AsyncGenerateStream",
    "AsyncWatchStream",
    "Bill",
    "BranchFinish",
    "BranchStream",
    "Cancelled",
    "ChangeKind",
    "Choice",
    "Choices",
    "Chunk",
    "Client",
    "Completion",
    "ContextBusy",
    "ContextChange",
    "ContextGroup",
    "ContextHandle",
    "ContextInfo",
    "ContextLost",
    "ContextMoved",
    "ContinuationScore",
    "Continued",
    "CountersInfo",
    "DeadlineExceeded",
    "Extension",
    "FinishReason",
    "GenerateStream",
    "GeneratedBranch",
    "InternalError",
    "InvalidRequest",
    "JsonSchema",
    "Lark",
    "LeaseInfo",
    "LeaseMode",
    "LeaseOptions",
    "LeaseReduction",
    "LimitsInfo",
    "ModelInfo",
    "NotFound",
    "PoolExhausted",
    "PoolInfo",
    "PressureChange",
    "PressureLevel",
    "QuotaInfo",
    "Reason",
    "Regex",
    "Released",
    "Residency",
    "RestoredContexts",
    "RetryPolicy",
    "SamplingOptions",
    "SamplingParams",
    "ServerInfo",
    "SlowReader",
    "SnapshotInfo",
    "Tier",
    "TierUsage",
    "Tool",
    "ToolCall",
    "Tools",
    "TopLogprobs",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedModelError",
    "Usage",
    "UsageInfo",
    "WatchSnapshot",
    "WatchStream",
]


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted({*globals(), *_MODULES})
