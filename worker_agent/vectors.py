"""Torch tensors and numpy arrays to float32 vectors and back.  [shell]

The rule: one dimension; float32 as it is; float16, bfloat16 and float64 are rounded to float32; everything else is
refused. Results are float32, of the kind that was given: torch on the same device, or numpy. Torch is not imported
here; whoever has a tensor has done so.
"""

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from worker_agent.session import Vector

_FLOATS = tuple(map(np.dtype, (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)))

Restore = Callable[[Vector], Any]
"""Turns a float32 vector into the kind that was given."""


def to_vector(name: str, values: Any) -> tuple[Vector, Restore]:
    """Returns values as a contiguous float32 vector on the host, and the way back.

    Args:
        name: what it is, for errors.
        values: torch tensor or numpy array, shape [N]. May share memory with the result.

    Raises:
        TypeError: neither a tensor nor an array.
        ValueError: not one dimension, no elements, or no floats.
    """
    if isinstance(values, np.ndarray):
        return _checked(name, values), lambda vector: vector
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor or a numpy array, not {type(values).__name__}")
    device = values.device
    if not values.is_floating_point():
        raise ValueError(f"{name} has element type {values.dtype}; gradients are floats")
    host = values.detach().to("cpu", torch.float32).numpy()
    return _checked(name, host), lambda vector: torch.from_numpy(vector).to(device)


def _checked(name: str, array: "np.ndarray[Any, Any]") -> Vector:
    if array.dtype not in _FLOATS:
        raise ValueError(f"{name} has element type {array.dtype}; gradients are floats")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}; give one flat vector, shape [N]")
    if not array.size:
        raise ValueError(f"{name} has no elements")
    return np.ascontiguousarray(array, np.float32)
