"""Attention over a tree of shared KV, and what moves KV: integers and tensors, nothing of agentkv.

`AttentionPlan` says which query rows read which runs of KV blocks; the functions of `ops` execute
it. Layouts and conventions stand in the README beside this package.
"""

from agentkv_kernels.ops import allocate_kv, copy_blocks, store_kv, tree_attention
from agentkv_kernels.plan import AttentionPlan, KVRun, RunGrowth

__all__ = [
    "AttentionPlan",
    "KVRun",
    "RunGrowth",
    "allocate_kv",
    "copy_blocks",
    "store_kv",
    "tree_attention",
]
