"""Attention over a tree of shared KV, and what moves KV: integers and tensors, nothing of agentkv.

`AttentionPlan` says which query rows read which runs of KV blocks; the functions of `ops` and
`kv_ops` execute it. Layouts and conventions stand in the README beside this package.
"""

from agentkv_kernels.kv_ops import allocate_kv, copy_blocks, store_kv
from agentkv_kernels.ops import (
    store_and_attend,
    tree_attention,
    work_list_attention,
    work_options,
)
from agentkv_kernels.plan import AttentionPlan, KVRun, RunGrowth
from agentkv_kernels.quantise import KVScales
from agentkv_kernels.work_buffers import Capacity, WorkBuffers
from agentkv_kernels.work_options import WorkOptions

__all__ = [
    "AttentionPlan",
    "Capacity",
    "KVRun",
    "KVScales",
    "RunGrowth",
    "WorkBuffers",
    "WorkOptions",
    "allocate_kv",
    "copy_blocks",
    "store_and_attend",
    "store_kv",
    "tree_attention",
    "work_list_attention",
    "work_options",
]
