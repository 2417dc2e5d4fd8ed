"""Launches every kernel up to the device: arguments bound, variants chosen and compiled, no start.

A script, for a process of its own: it tells Triton that there is an H200. The interpreter checks
what kernels compute; this checks how launchers call them. Prints the kernels' names as JSON.
"""

import json
import sys
from typing import Any

import torch
from kernel_trees import decode_tree, make_inputs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from agentkv_kernels import (
    KVScales,
    allocate_kv,
    copy_blocks,
    quantise,
    store_kv,
    tree_attention,
)
from agentkv_kernels._triton import compat


class PretendedDriver:
    """What Triton asks of a driver before it starts a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    names: list[str] = []
    run = jit.JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *arguments, **{**options, "warmup": True})

    driver.set_active(PretendedDriver())
    jit.JITFunction.run = compile_only
    compat.INTERPRETED = True  # lets tensors of the CPU through; nothing is computed

    tree = decode_tree(20, 300, 20)
    inputs = make_inputs(tree, group=4, head_dim=64, dtype=torch.float16)
    how: Any = {"implementation": "triton", "scale": 1.0}
    tensors = (inputs.query, inputs.k_cache, inputs.v_cache)
    tree_attention(*tensors, tree.plan(), **how)
    sinks = torch.zeros(8, dtype=torch.float16)
    tree_attention(*tensors, tree.plan(), window=50, softcap=3.0, sinks=sinks, **how)
    kv = allocate_kv(2, 8, 16, 2, 64, dtype=torch.float16, device="cpu")
    new, slots = inputs.query[:, :2], torch.arange(20)
    store_kv(new, new, kv[0, 0], kv[0, 1], slots, implementation="triton")
    copy_blocks(kv, [0], [1], [3], implementation="triton")
    for dtype in quantise.LARGEST:
        small = torch.zeros(inputs.k_cache.shape, dtype=dtype)
        scales = KVScales(*torch.zeros(2, *small.shape[:3]))
        store_kv(new, new, small, small, slots, scales=scales, implementation="triton")
        tree_attention(inputs.query, small, small, tree.plan(), scales=scales, **how)
    sys.stdout.write(json.dumps(names))


if __name__ == "__main__":
    main()
