"""What besides the plan decides how work is cut for a GPU: sizes, window, policy.

Owns the options and the two tile classes' heights. It knows neither plans nor devices.
"""

from typing import Literal, NamedTuple

SMALL_TILE = 16
"""Query rows x heads of one program of the small class: the least a tensor core multiplies."""
LARGE_TILE = 64
"""The same of the large class: the least that uses Hopper's wgmma."""
TILE_TOKENS = 64
"""Pieces of runs are cut at multiples of this many tokens, a multiple of every tile's width."""
INVARIANT_SPLIT = 512
"""Tokens of a piece in batch-invariant mode, unless `split_tokens` says otherwise."""

Sharing = Literal["cost", "all", "none"]


class WorkOptions(NamedTuple):
    """Everything a work list depends on besides the plan; equal options, equal cuts."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_item_bytes: int
    """Bytes of one number in the KV cache."""
    window: int | None = None
    """Positions a row sees at most, itself included; None: all."""
    num_programs: int = 264
    """Programs the device runs at once: multiprocessors x programs on each."""
    reserve: int = 128
    """Tokens a growing run may gain before a new work list is needed."""
    sharing: Sharing = "cost"
    """Per run with several readers: share where bytes say so, always, or never (the flat plan)."""
    split_tokens: int | None = None
    """Tokens of a piece, a multiple of TILE_TOKENS; None: from the amount of work."""
    batch_invariant: bool = False
    """Cut so that a row's result does not depend on other rows, to the bit."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def heads_per_tile(self) -> int:
        """Query heads of one KV head that one program serves."""
        return min(self.group, LARGE_TILE)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.kv_item_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes that one more partial result of one row costs: written once, read once."""
        return self.num_q_heads * (self.v_head_dim + 1) * 4 * 2

    def check(self) -> None:
        """Checks what a caller chooses.

        Raises:
            ValueError: Names the option.
        """
        split = self.split_tokens
        if split is not None and (split < TILE_TOKENS or split % TILE_TOKENS):
            raise ValueError(f"split_tokens must be a multiple of {TILE_TOKENS}, not {split}")
        if self.reserve < 0:
            raise ValueError(f"reserve must not be negative, got {self.reserve}")
        if self.sharing not in ("cost", "all", "none"):
            raise ValueError(f"sharing must be 'cost', 'all' or 'none', not {self.sharing!r}")
        if self.num_programs < 1:
            raise ValueError(f"num_programs must be positive, not {self.num_programs}")
