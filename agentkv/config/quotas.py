"""What single tenants may hold and use, and the file that says so."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from agentkv.config.requirement import require
from agentkv.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """What one tenant may hold and use; None sets no limit beyond the server's own."""

    blocks: int | None = None
    """Device blocks its contexts hold at once, pinned ones too; a shared block counts once."""
    block_seconds: float | None = None
    """Device block-seconds its contexts use in any `window`."""
    window: float = 3600.0
    """Seconds over which block-seconds count."""
    contexts: int | None = None
    """Contexts it may hold."""
    depth: int | None = None
    """Forks between a context and the root it descends from."""
    fan_out: int | None = None
    """Living children of one context."""

    def __post_init__(self) -> None:
        for name in ("blocks", "block_seconds", "window", "contexts", "depth", "fan_out"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                value is None or (is_number and 0 <= value < math.inf),
                f"the quota {name} must be a number, not negative, got {value!r}.",
            )
            require(
                value is None or isinstance(value, int) or name in ("block_seconds", "window"),
                f"the quota {name} must be a whole number, got {value!r}.",
            )
        require(self.window > 0, f"the window of a quota must be above 0, got {self.window}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotasConfig:
    """The quotas of all tenants."""

    default: QuotaConfig = field(default_factory=QuotaConfig)
    """Of a tenant that has none of its own."""
    tenants: Mapping[str, QuotaConfig] = field(default_factory=dict)

    def of(self, tenant: str) -> QuotaConfig:
        """Finds a tenant's quota."""
        return self.tenants.get(tenant, self.default)

    @classmethod
    def read(cls, text: str) -> "QuotasConfig":
        """Reads quotas from TOML: a table `default`, and `tenants.NAME` with what differs from it.

        Raises:
            InvalidRequest: It is no TOML, or holds a key or a value that no quota has.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidRequest(f"The quotas are no TOML: {error}.") from None
        unknown = tables.keys() - {"default", "tenants"}
        require(not unknown, f"Quotas know no table {', '.join(sorted(unknown))}.")
        default = _quota("default", tables.get("default", {}), QuotaConfig())
        tenants = tables.get("tenants", {})
        require(isinstance(tenants, dict), "tenants must be a table of tables.")
        named = {name: _quota(name, table, default) for name, table in tenants.items()}
        return cls(default=default, tenants=named)


def _quota(name: str, table: object, base: QuotaConfig) -> QuotaConfig:
    if not isinstance(table, dict):
        raise InvalidRequest(f"The quotas of {name} must be a table.")
    unknown = table.keys() - {item.name for item in fields(QuotaConfig)}
    require(not unknown, f"The quotas of {name} know no {', '.join(sorted(unknown))}.")
    try:
        return replace(base, **table)
    except InvalidRequest as error:
        raise InvalidRequest(f"The quotas of {name}: {error.message}") from None
