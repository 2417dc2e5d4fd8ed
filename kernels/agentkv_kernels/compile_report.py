"""Compiles the kernels for an H200 on any machine, and says what became of them.

    python -m agentkv_kernels.compile_report [--json report.json] [--only TEXT] [--check]

Triton's wheel carries the assembler and the disassembler, so neither a GPU nor a CUDA toolkit is
needed: registers, spills, shared memory and instructions are facts before the first run. This file
owns the list of configurations; the tiles come from `_triton.tile_config`.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agentkv_kernels._triton.copy_blocks import NUMBERS_AT_ONCE, copy_blocks_kernel
from agentkv_kernels._triton.merge import PARTS_AT_ONCE, merge_kernel
from agentkv_kernels._triton.store_kv import store_kv_kernel
from agentkv_kernels._triton.tile_config import TileConfig, padded, tile_config
from agentkv_kernels._triton.tree_attention import tree_attention_kernel
from agentkv_kernels.quantise import LARGEST

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_PER_SM = 228 * 1024
SHARED_PER_PROGRAM = 1024
"""What the system takes of it for each program."""
REGISTERS_PER_SM = 64 * 1024
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Configuration(NamedTuple):
    """One kernel with everything that compilation depends on."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Triton types of the arguments that are not constants."""
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler made of a configuration."""

    name: str
    num_warps: int
    num_stages: int
    registers: int
    """For each thread."""
    spilled_bytes: int
    """Of the stack, for each thread; 0: nothing is spilled."""
    shared_bytes: int
    """For each program."""
    programs_by_shared: int
    """Programs on one multiprocessor that shared memory allows."""
    programs_by_registers: int
    """The same, by registers."""
    hgmma: int
    """Hopper's wgmma instructions."""
    hmma: int
    """Tensor core instructions of older devices."""
    ldgsts: int
    """Asynchronous loads into shared memory."""


def attention(
    *,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    large: bool = False,
    group: int = 4,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    tile: TileConfig | None = None,
) -> Configuration:
    """Describes one variant of the attention kernel; `tile` replaces the table's choice."""
    cache = kv_dtype or dtype
    tile = tile or tile_config(head_dim, dtype.itemsize, cache.itemsize, large=large)
    extras = [name for name, on in (("window", window), ("softcap", softcap), ("sinks", sinks))
              if on]  # fmt: skip
    name = f"attention d{head_dim} {NAMES[dtype]}"
    name += f" kv-{NAMES[cache]}" if kv_dtype else ""
    name += f" {'large' if large else 'small'} g{group}"
    name += f" {tile.block_m}x{tile.block_n}x{tile.num_stages}w{tile.num_warps}"
    types = dict.fromkeys(("items", "num_items", "q_rows", "blocks", "kv_lens"), "*i32")
    types |= dict.fromkeys(("out", "query", "sinks"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("k_cache", "v_cache"), f"*{NAMES[cache]}")
    types |= dict.fromkeys(("part_out", "part_lse", "k_scale", "v_scale"), "*fp32")
    types |= {"scale": "fp32", "softcap": "fp32", "window": "i32"}
    constants = {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "HEADS": group,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(head_dim),
        "BLOCK_V": padded(head_dim),
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "HAS_SINKS": sinks,
        "IS_QUANTISED": kv_dtype is not None,
        "UPCAST": False,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    whole = " ".join([name, *extras])
    return Configuration(
        whole, tree_attention_kernel, types, constants, tile.num_warps, tile.num_stages
    )


def configurations() -> Iterator[Configuration]:
    """Lists what a server may compile: every size, dtype and option at least once."""
    for large in (False, True):
        for head_dim in (64, 80, 96, 128, 256):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                yield attention(head_dim=head_dim, dtype=dtype, large=large)
            for kv_dtype in LARGEST:
                yield attention(head_dim=head_dim, kv_dtype=kv_dtype, large=large)
        for group in (1, 3, 7, 8, 16):
            yield attention(group=group, large=large)
        yield attention(window=True, large=large)
        yield attention(head_dim=256, window=True, softcap=True, large=large)
        yield attention(head_dim=64, group=8, window=True, sinks=True, large=large)
    yield from _others()


def _others() -> Iterator[Configuration]:
    """The kernels that move and merge."""
    for head_dim in (64, 128, 256):
        sizes = {"V_HEAD_DIM": head_dim, "BLOCK_V": padded(head_dim)}
        types = dict.fromkeys(("num_merged", "merge_rows", "merge_begins"), "*i32")
        types |= {"merge_parts": "*i32", "part_out": "*fp32", "part_lse": "*fp32"}
        types |= {"out": "*bf16", "sinks": "*bf16"}
        merging = {**sizes, "NUM_Q_HEADS": 32, "BLOCK_P": PARTS_AT_ONCE, "HAS_SINKS": True}
        yield Configuration(f"merge d{head_dim}", merge_kernel, types, merging, 4, 1)
        for dtype in (torch.bfloat16, *LARGEST):
            types = {"key": "*bf16", "value": "*bf16", "slots": "*i64"}
            types |= dict.fromkeys(("k_cache", "v_cache"), f"*{NAMES[dtype]}")
            types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32")
            storing: dict[str, Any] = {**sizes, "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim)}
            storing |= {"BLOCK_SIZE": 16, "FULL": LARGEST.get(dtype, 0.0)}
            name = f"store d{head_dim} {NAMES[dtype]}"
            yield Configuration(name, store_kv_kernel, types, storing, 1, 1)
    types = {"kv": "*bf16", "pairs": "*i32", "num_pairs": "*i32"}
    sizes = {"HEADS": 8, "HEAD_DIM": 128, "BLOCK": NUMBERS_AT_ONCE}
    yield Configuration("copy", copy_blocks_kernel, types, sizes, 4, 1)


def compile_configuration(configuration: Configuration) -> Compiled:
    """Compiles one configuration for sm_90 and reads the machine code.

    Raises:
        subprocess.CalledProcessError: Triton's copy of the disassembler refuses the code.
    """
    kernel, constants = configuration.kernel, configuration.constants
    place = {name: index for index, name in enumerate(kernel.arg_names)}
    # Numbers without a type of their own are strides: 32 bits, multiples of 16 as in real pools.
    types = {name: configuration.types.get(name, "i32") for name in place if name not in constants}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name.endswith("_stride")]
    aligned = [name for name in aligned if name != "num_items"]  # points into the middle of counts
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(place[name],): value for name, value in constants.items()},
        attrs={(place[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {
        "num_warps": configuration.num_warps,
        "num_stages": configuration.num_stages,
        "enable_fp_fusion": True,
    }
    built = triton.compile(source, target=HOPPER, options=options)
    usage, code = _disassemble(built.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, spilled = map(int, found.groups())
    shared = int(built.metadata.shared)
    threads = 32 * configuration.num_warps
    return Compiled(
        name=configuration.name,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        programs_by_shared=SHARED_PER_SM // (shared + SHARED_PER_PROGRAM),
        programs_by_registers=REGISTERS_PER_SM // (-(-registers // 8) * 8 * threads),
        hgmma=len(re.findall(r"\bHGMMA", code)),
        hmma=len(re.findall(r"\bHMMA", code)),
        ldgsts=len(re.findall(r"\bLDGSTS", code)),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Returns the resources that machine code uses, and its text."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = [str(tools / "cuobjdump"), "--dump-resource-usage", str(path)]
        code = [str(tools / "nvdisasm"), str(path)]
        outputs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for command in (usage, code)
        ]
    return outputs[0], outputs[1]


def main() -> None:
    """Compiles, prints a line for each configuration, and writes them all as JSON."""
    parser = argparse.ArgumentParser(description="Compile the kernels for sm_90, without a device.")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--only", default="", help="configurations whose name contains this text")
    parser.add_argument("--check", action="store_true", help="fail where something is wrong")
    arguments = parser.parse_args()
    compiled = []
    for configuration in configurations():
        if arguments.only in configuration.name:
            result = compile_configuration(configuration)
            compiled.append(result)
            print(_line(result), flush=True)
    if arguments.json is not None:
        report = {
            "triton": triton.__version__,
            "target": "sm_90a",
            "configurations": [asdict(result) for result in compiled],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    faults = [fault for result in compiled for fault in faults_of(result)]
    for fault in faults:
        print(fault)
    if arguments.check and faults:
        raise SystemExit(1)


def faults_of(result: Compiled) -> Iterator[str]:
    """Says what is wrong with a configuration: a spill, a lone program, the wrong instructions."""
    if result.spilled_bytes:
        yield f"{result.name}: {result.spilled_bytes} bytes are spilled"
    if result.programs_by_shared < 2:
        yield f"{result.name}: one program on a multiprocessor, {result.shared_bytes} bytes shared"
    if " large " in result.name and " fp32 " not in result.name and not result.hgmma:
        yield f"{result.name}: a large tile without wgmma"


def _line(result: Compiled) -> str:
    return (
        f"{result.name:52} {result.registers:4} registers {result.spilled_bytes:4} spilled "
        f"{result.shared_bytes / 1024:6.1f} KB shared  {result.programs_by_shared}/"
        f"{result.programs_by_registers} programs  {result.hgmma:3} HGMMA {result.hmma:4} HMMA "
        f"{result.ldgsts:3} LDGSTS"
    )


if __name__ == "__main__":
    main()
