"""Whose call it is. It owns that one question; it knows nothing of contexts."""

from typing import Any, Final, TypeAlias

import grpc.aio

Rpc: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""One call as gRPC hands it to a handler; `context` stays our own word."""

DEFAULT_TENANT: Final = "default"
"""The one tenant of a server that asks for no credentials."""


def tenant_of(rpc: Rpc) -> str:
    """Names the tenant that a call acts for.

    Without authentication every caller is the same tenant; a name that the caller chose freely
    would protect nobody's contexts.
    """
    del rpc
    return DEFAULT_TENANT
