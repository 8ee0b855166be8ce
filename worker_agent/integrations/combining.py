"""Reduces tensors of several ranks, and says which element types it can't.  [shell]

What can be reduced is what torch can on the CPU, which grows with its versions: so a type is tried, on one element.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ayni.errors import Unsupported

_NARROW = (torch.float16, torch.bfloat16)
_USUAL = (
    *(torch.float32, torch.float64, *_NARROW),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
)
"""Element types that an error names, where they can be reduced."""

_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}


def check_reducible(dtype: torch.dtype, op: Any) -> None:
    """Refuses what can't be reduced, before anything is sent.

    Raises:
        Unsupported: names the element type, and those that this reduction has.
    """
    name = _name(op)
    if _can(name, dtype):
        return
    usual = ", ".join(_short(other) for other in _USUAL if _can(name, other))
    known = f"it takes {usual}" if usual else f"it has {', '.join(_PAIRWISE)}"
    advice = "; convert the tensor first (tensor.float())" if usual and dtype.itemsize == 1 else ""
    raise Unsupported(f"backend ayni can't reduce {_short(dtype)} by {name}: {known}{advice}", field="op", detail=name)


def combined(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Reduces the ranks' tensors, in the order of ranks. Raises Unsupported as `check_reducible`."""
    dtype = parts[0].dtype
    check_reducible(dtype, op)
    name = _name(op)
    pairwise = _PAIRWISE[name]
    wide = torch.float32 if dtype in _NARROW else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        pairwise(total, part.to(wide))
    if name == "AVG":
        total.div_(len(parts))
    return total.to(dtype)


def _name(op: Any) -> str:
    return next((known for known in _PAIRWISE if op == getattr(ReduceOp, known)), str(op))


@functools.cache
def _can(name: str, dtype: torch.dtype) -> bool:
    if name not in _PAIRWISE or (name == "AVG" and not dtype.is_floating_point):
        return False
    try:
        one = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        _PAIRWISE[name](one.to(torch.float32 if dtype in _NARROW else dtype, copy=True), one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
