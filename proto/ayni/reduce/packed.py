"""Values that stay as they travel until they are added.  [core]

Legend: C elements in a chunk.

What lies in a worker's memory, or came in a frame, waits there for its other half, also where it is rounded for the
wire. Whether it is finite is seen without decoding it, and it becomes float32 once, in the addition.
"""

from dataclasses import dataclass

import numpy as np

from ayni import tensors
from ayni.reduce import sums
from ayni.tensors import Bytes, Floats


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A chunk of a contribution as it travels.

    Attributes:
        data: its bytes.
        dtype: element type of a wire type other than float32.
        size: C.
    """

    data: Bytes
    dtype: str
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.data.nbytes


Values = Floats | Packed


def packed(data: Bytes, dtype: str) -> Values:
    """Returns what bytes of a contribution stand for; a view of float32, which need no decoding.

    Raises:
        BadChunk: the bytes are no whole elements.
    """
    count = tensors.count_elements(data.size, dtype)
    return data.view(np.float32) if dtype == "float32" else Packed(data, dtype, count)


def floats(values_C: Values) -> Floats:
    """Returns values as float32, shape [C]; in memory of their own where they were packed."""
    return tensors.decode(values_C.data, values_C.dtype) if isinstance(values_C, Packed) else values_C


def add(left_C: Values, right_C: Values) -> Floats:
    """Returns left + right; see `sums.add`."""
    return sums.add(floats(left_C), floats(right_C))


def out_for(left_C: Values, right_C: Values | None) -> Floats:
    """Returns memory for a sum of values, shape [C]; see `sums.out_for`."""
    if isinstance(left_C, Packed) or isinstance(right_C, Packed):
        return sums.aligned(left_C.size)
    return sums.out_for(left_C, right_C)


def elements_of(values_C: Values, elements: slice) -> Floats:
    """Returns some of the values as float32; with int8 they begin at a block with a scale of its own."""
    if isinstance(values_C, Packed):
        return tensors.decode_part(values_C.data, values_C.dtype, elements)
    return values_C[elements]


def is_finite(values_C: Values) -> bool:
    """Returns whether there is neither NaN nor infinity."""
    if isinstance(values_C, Packed):
        return tensors.is_finite(values_C.data, values_C.dtype)
    return sums.is_finite(values_C)
