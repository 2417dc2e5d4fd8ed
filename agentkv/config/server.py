"""Where the server listens, and what it grants one connection or call."""

import ipaddress
from dataclasses import dataclass

from agentkv.config.requirement import require


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and what it grants one connection or call."""

    host: str = "127.0.0.1"
    """Address to listen on, a name or a number."""
    port: int = 50051
    """Port to listen on, in [0, 65536); 0 takes a free one, which the server reports."""
    insecure: bool = False
    """Whether an address beyond this host may be served without credentials."""
    max_message_bytes: int = 16 << 20
    """Bytes of one request; more is refused before it is read."""
    max_concurrent_rpcs: int = 1024
    """Calls that may be open at once: an outer fuse, admission is the engine's."""
    stall_timeout: float = 30.0
    """Seconds a stream may go unread before it ends with SLOW_READER."""
    stream_interval: float | None = None
    """Least seconds between two messages of a stream, at least 0; tokens wait and share one. None:
    0 for up to 8 streams, then 4 ms for each there is, at most 0.2 s."""
    default_deadline: float = 600.0
    """Seconds granted to a call that names no deadline."""
    max_deadline: float = 3600.0
    """Seconds granted to any call, whatever deadline it names."""
    grace: float = 10.0
    """Seconds that open calls may run on when the server is told to stop."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must be in [0, 65536), got {self.port}.")
        require(
            1 <= self.max_message_bytes < 2**31,
            f"max_message_bytes must be in [1, 2**31), got {self.max_message_bytes}.",
        )
        require(self.max_concurrent_rpcs >= 1, "max_concurrent_rpcs must be at least 1.")
        for name in ("stall_timeout", "default_deadline", "max_deadline"):
            require(getattr(self, name) > 0, f"{name} must be above 0.")
        require(
            self.stream_interval is None or self.stream_interval >= 0,
            f"stream_interval must not be negative, got {self.stream_interval}.",
        )
        require(self.grace >= 0, f"grace must not be negative, got {self.grace}.")
        require(
            self.default_deadline <= self.max_deadline,
            "default_deadline must not be above max_deadline.",
        )
        require(
            self.is_loopback or self.insecure,
            f"{self.host} is reachable from other hosts, and calls carry no credentials; "
            "set insecure to serve it nevertheless.",
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean anything but for this one
            return self.host == "localhost"
