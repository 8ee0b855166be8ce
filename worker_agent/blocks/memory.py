"""What the bytes behind a layout can do, wherever they lie.  [core]

A *part* names what of each block is meant: its layers, and a slice along one axis. The bytes of a part are one string:
the axes in the layout's order (layer, outer, page, head, size for NHD and so on; head first for UNIVERSAL), gaps left
out. Two layouts with equal shape and order give equal strings for equal content, whatever their kind.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import AxisOrder, StorageKind
from ayni.blocks.transfers import AxisSlice
from worker_agent.blocks.geometry import Geometry

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What of each block is meant."""

    layers: tuple[int, int] | None = None
    """First layer and one past the last; None: all."""
    slice: AxisSlice | None = None
    """None: all of it."""
    axis_order: AxisOrder | None = None
    """Order to read or write the blocks as if they had it; None: the layout's own."""


WHOLE = Part()


class Memory(Protocol):
    """The bytes behind one layout. Methods may be called from any thread; who calls keeps writers of a block apart."""

    geometry: Geometry
    storage: StorageKind

    def rows(self, part: Part) -> Bytes | None:
        """Returns a view, shape [B, part bytes], where each block's part is one run of bytes in host memory."""

    def views(self, block: int, part: Part) -> list[memoryview] | None:
        """Returns a block's part as runs of bytes, in order, without a copy; None outside host memory."""

    def read(self, blocks: Ids, part: Part, out: Bytes) -> None:
        """Copies parts of blocks out.

        Args:
            blocks: shape [N].
            part: what of each block.
            out: shape [N, part bytes], contiguous.

        Raises:
            StorageFailed: the bytes can't be read.
        """

    def write(self, blocks: Ids, part: Part, data: Bytes) -> None:
        """Copies parts of blocks in; otherwise as `read`. Raises StorageFailed as well."""

    def close(self) -> None:
        """Gives the memory back; nothing uses it any more."""
