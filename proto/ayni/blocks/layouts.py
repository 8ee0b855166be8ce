"""Layouts: what they are called, what shape they have, where they lie.  [core]

Legend: B blocks, L layers, O outer parts of a layer, T tokens of a page, H heads, D elements of a head, R bytes of one
region, that is, of one (block, layer, outer part): R = page_size * inner_dim * dtype_width_bytes.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum

from ayni.errors import BadRequest

MAX_LAYOUTS = 65535
"""Layouts that a worker can register; their numbers, 0 to 65534, are never reused."""

MAX_LAYERS = 1 << 16
"""Layers of a layout. Where they are apart, each is an allocation that is kept track of."""
MAX_BLOCK_BYTES = 16 << 30
"""Bytes of one block."""
MAX_TOTAL_BYTES = (1 << 63) - 1
"""Bytes of a layout: offsets are signed 64-bit numbers."""
MAX_ALIGNMENT_BYTES = 1 << 30
"""Alignment of an allocation: the largest page there is."""


class Tier(Enum):
    """Where blocks are kept: G1 device, G2 host, G3 disk, G4 object. The last one has keys and no layouts."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"


class StorageKind(Enum):
    """What a layout's bytes lie in."""

    SYSTEM = "system"
    PINNED = "pinned"
    DEVICE = "device"
    DISK = "disk"


class LayoutKind(Enum):
    """How the regions of a layout are arranged: one allocation, or one for each layer, blocks or outer parts first."""

    FULLY_CONTIGUOUS = "fully_contiguous"
    LAYER_SEPARATE_BLOCK_FIRST = "layer_separate_block_first"
    LAYER_SEPARATE_BLOCK_SECOND = "layer_separate_block_second"


class AxisOrder(Enum):
    """Order of the axes inside a block, outermost first; head size is always innermost."""

    UNKNOWN = "unknown"
    """Can be copied as it is, never sliced or reordered."""
    NHD = "nhd"
    """Layer, outer, page, head count, head size."""
    HND = "hnd"
    """Layer, outer, head count, page, head size."""
    UNIVERSAL = "universal"
    """Head count, layer, outer, page, head size. Fully contiguous layouts only."""


class Axis(Enum):
    """One axis of a layout."""

    BLOCK = "block"
    LAYER = "layer"
    OUTER = "outer"
    PAGE = "page"
    HEAD_COUNT = "head_count"
    HEAD_SIZE = "head_size"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class LayoutHandle:
    """Names one layout of one worker in 128 bits: the worker's id below, the layout's number above."""

    owner_id: int
    """Unsigned, 64 bits."""
    number: int
    """Unsigned, 64 bits; the lower 16 number the layout, the others are zero and are kept when received."""

    @classmethod
    def from_int(cls, value: int) -> "LayoutHandle":
        """Returns the handle with this 128-bit value; keeps all bits."""
        return cls(owner_id=value & (1 << 64) - 1, number=value >> 64)

    def __int__(self) -> int:
        """Returns the 128-bit value."""
        return self.number << 64 | self.owner_id

    def __str__(self) -> str:
        return f"{self.owner_id:016x}/{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """Shape of a layout.

    Raises:
        BadRequest: a field breaks its rule; the message names every one that does.
    """

    num_blocks: int
    num_layers: int
    """At most MAX_LAYERS; MAX_BLOCK_BYTES and MAX_TOTAL_BYTES bound the sizes that follow from the shape."""
    outer_dim: int
    """1 when keys and values are fused or there is only one, 2 when they are apart."""
    page_size: int
    """Tokens of a block; a power of two."""
    inner_dim: int
    """Elements of one token in one region on this worker: heads on this worker times head size."""
    num_heads: int = 0
    """Heads on this worker; divides inner_dim. 0: not known; blocks can't be sliced or reordered then."""
    dtype_width_bytes: int = 2
    """1, 2, 4 or 8."""
    alignment_bytes: int = 1
    """Alignment of every allocation; a power of two, at most MAX_ALIGNMENT_BYTES."""

    def __post_init__(self) -> None:
        """Checks every rule."""
        problems = [
            *(f"{name} must be at least 1" for name in ("num_blocks", "num_layers", "inner_dim") if self._of(name) < 1),
            *([] if self.outer_dim in (1, 2) else ["outer_dim must be 1 or 2"]),
            *(
                f"{name} must be a power of two"
                for name in ("page_size", "alignment_bytes")
                if not _is_power_of_two(self._of(name))
            ),
            *([] if self.dtype_width_bytes in (1, 2, 4, 8) else ["dtype_width_bytes must be 1, 2, 4 or 8"]),
            *self._too_large(),
            *([] if self._heads_fit() else [f"num_heads ({self.num_heads}) must divide inner_dim ({self.inner_dim})"]),
        ]
        if problems:
            raise BadRequest(f"the layout {self} is not possible: {'; '.join(problems)}", field="config")

    @property
    def region_bytes(self) -> int:
        """R: bytes of one (block, layer, outer part)."""
        return self.page_size * self.inner_dim * self.dtype_width_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: L * O * R."""
        return self.num_layers * self.outer_dim * self.region_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def head_dim(self) -> int:
        """D: elements of one head; 0 when the number of heads is not known."""
        return self.inner_dim // self.num_heads if self.num_heads else 0

    def _of(self, name: str) -> int:
        return int(getattr(self, name))

    def _too_large(self) -> list[str]:
        limits = {
            "num_layers": MAX_LAYERS,
            "alignment_bytes": MAX_ALIGNMENT_BYTES,
            "block_bytes": MAX_BLOCK_BYTES,
            "total_bytes": MAX_TOTAL_BYTES,
        }
        return [f"{name} must be at most {limit}" for name, limit in limits.items() if self._of(name) > limit]

    def _heads_fit(self) -> bool:
        return self.num_heads == 0 or (self.num_heads > 0 and self.inner_dim % self.num_heads == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalLayout:
    """Names one of a worker's own layouts."""

    tier: Tier
    resource_id: int = 0
    """Which of the worker's resources; 0 is the primary one."""

    def __str__(self) -> str:
        return f"{self.tier.value} layout" + (f" of resource {self.resource_id}" if self.resource_id else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutDescriptor:
    """Describes one layout to another worker; holds no addresses."""

    handle: LayoutHandle
    tier: Tier
    resource_id: int = 0
    config: LayoutConfig
    kind: LayoutKind
    axis_order: AxisOrder
    storage: StorageKind
    device_ordinal: int = 0
    fingerprint: str
    """See `fingerprint`."""

    @property
    def place(self) -> LocalLayout:
        """What its owner calls it."""
        return LocalLayout(tier=self.tier, resource_id=self.resource_id)


def fingerprint(config: LayoutConfig, axis_order: AxisOrder, model: str) -> str:
    """Returns the SHA-256 in hex of what one block's bytes mean: shape, axis order, element width and model name.

    Blocks of two layouts with equal fingerprints have the same bytes for the same content, however many blocks there
    are and however their regions are arranged.
    """
    shape = (config.num_layers, config.outer_dim, config.page_size, config.inner_dim, config.num_heads)
    text = f"ayni block 1|{shape}|{config.dtype_width_bytes}|{axis_order.value}|{model}"
    return hashlib.sha256(text.encode()).hexdigest()


def needs_transform(one: AxisOrder, other: AxisOrder) -> bool:
    """Says whether bytes must change places between two orders; one known and one unknown order count as unlike."""
    return one is not other


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
