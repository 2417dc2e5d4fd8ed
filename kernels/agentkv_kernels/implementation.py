"""Which implementation runs: the one asked for, else the best for the device.

Triton is imported where it is used: without a GPU nobody needs it, it is slow to import, and not
every system has it.
"""

from typing import Literal, get_args

from torch import Tensor

from agentkv_kernels import checks

Implementation = Literal["reference", "cpu", "torch", "triton"]


def choose(implementation: Implementation | None, tensor: Tensor) -> Implementation:
    """Returns the implementation asked for, or the one for a tensor's device.

    Raises:
        ValueError: There is no such implementation.
    """
    if implementation is None:
        by_device: dict[str, Implementation] = {"cpu": "cpu", "cuda": "triton"}
        return by_device.get(tensor.device.type, "reference")
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation must be one of {get_args(Implementation)}, not {implementation!r}"
        )
    return implementation


def check_triton(query: Tensor, k_cache: Tensor, v_cache: Tensor, name: str = "query") -> None:
    """Refuses tensors that the Triton kernels cannot take.

    Args:
        query: Or keys.
        k_cache: One layer's.
        v_cache: One layer's.
        name: Of the first argument.

    Raises:
        ValueError: A device is not a GPU's, or a tensor's last dimension is not dense.
        TypeError: The kernels do not know the dtype.
    """
    from agentkv_kernels._triton import compat  # heavy: see above

    compat.check_device(name, query)
    if query.dtype not in checks.TRITON_DTYPES:
        raise TypeError(f"{name} must be one of {checks.TRITON_DTYPES}, not {query.dtype}")
    checks.check_unit_stride({name: query, "k_cache": k_cache, "v_cache": v_cache})
