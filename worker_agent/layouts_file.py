"""The file that says which layouts an agent has: the argument of `python -m worker_agent serve --layouts`.  [core]"""

from dataclasses import dataclass
from typing import Literal

from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind, LocalLayout, Tier
from ayni.errors import AyniError
from worker_agent.blocks.geometry import Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEntry:
    """One layout."""

    num_blocks: int
    """Blocks."""
    num_layers: int
    """Layers of a block."""
    inner_dim: int
    """Elements of one token in one layer and outer part: heads times head size."""
    tier: Literal["device", "host", "disk"] = "device"
    """Where it lies."""
    resource_id: int = 0
    """Which resource it holds; 0 is the primary one."""
    outer_dim: int = 2
    """2 where keys and values are apart, else 1."""
    page_size: int = 16
    """Tokens of a block; a power of two."""
    num_heads: int = 0
    """Heads. 0: not known; blocks can't be sliced or reordered then."""
    dtype_width_bytes: int = 2
    """Bytes of one element: 1, 2, 4 or 8."""
    alignment_bytes: int = 64
    """Alignment of each allocation; a power of two."""
    kind: Literal["fully_contiguous", "layer_separate_block_first", "layer_separate_block_second"] = "fully_contiguous"
    """How regions are arranged."""
    axis_order: Literal["nhd", "hnd", "universal", "unknown"] = "nhd"
    """Order of the axes inside a block."""

    def __post_init__(self) -> None:
        """Checks that the layout is possible."""
        try:
            self.geometry()
        except AyniError as error:
            raise ValueError(error.message) from None

    @property
    def place(self) -> LocalLayout:
        """What its owner calls it."""
        return LocalLayout(tier=Tier(self.tier), resource_id=self.resource_id)

    def geometry(self) -> Geometry:
        """Returns shape, kind and order."""
        config = LayoutConfig(
            num_blocks=self.num_blocks,
            num_layers=self.num_layers,
            outer_dim=self.outer_dim,
            page_size=self.page_size,
            inner_dim=self.inner_dim,
            num_heads=self.num_heads,
            dtype_width_bytes=self.dtype_width_bytes,
            alignment_bytes=self.alignment_bytes,
        )
        return Geometry(config=config, kind=LayoutKind(self.kind), axis_order=AxisOrder(self.axis_order))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutsFile:
    """All layouts of an agent."""

    layouts: tuple[LayoutEntry, ...]
    """Each tier of a resource at most once."""
    model: str = ""
    """Name of the model whose blocks these are; part of every object's key."""

    def __post_init__(self) -> None:
        """Checks that no layout is there twice."""
        places = [entry.place for entry in self.layouts]
        if not places:
            raise ValueError("layouts is empty: name at least one")
        if twice := sorted({str(place) for place in places if places.count(place) > 1}):
            raise ValueError(f"layouts has more than one {', '.join(twice)}")
