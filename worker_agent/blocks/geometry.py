"""Where the bytes of a block lie: regions, and strides of any part of a block.  [core]

Theory of operation. A geometry is a layout without memory: shape, kind and axis order. It answers with allocations
(by number) and offsets (in bytes); whoever has the memory adds an address. Every part of a block, in every kind and
order, is a few `Strided` values with the same six axes, so that two layouts are copied between by giving both the same
indices, whatever their orders.

Where the number of heads is not known, a token's elements count as one head. Whole regions are then still right;
whatever would have to look inside a region is refused by `check_part`.

Legend: B blocks, L layers, O outer parts, T tokens of a page, H heads, S bytes of one head, R bytes of a region.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import BadRequest, IncompatibleLayout, UnknownBlock

AXES = (Axis.BLOCK, Axis.LAYER, Axis.OUTER, Axis.PAGE, Axis.HEAD_COUNT, Axis.HEAD_SIZE)
"""Axes of every `Strided`, in this order."""

_REGION_FIRST = (Axis.LAYER, Axis.OUTER)
NESTING: dict[AxisOrder, tuple[Axis, ...]] = {
    AxisOrder.UNKNOWN: (*_REGION_FIRST, Axis.PAGE, Axis.HEAD_COUNT, Axis.HEAD_SIZE),
    AxisOrder.NHD: (*_REGION_FIRST, Axis.PAGE, Axis.HEAD_COUNT, Axis.HEAD_SIZE),
    AxisOrder.HND: (*_REGION_FIRST, Axis.HEAD_COUNT, Axis.PAGE, Axis.HEAD_SIZE),
    AxisOrder.UNIVERSAL: (Axis.HEAD_COUNT, *_REGION_FIRST, Axis.PAGE, Axis.HEAD_SIZE),
}
"""Axes inside a block, outermost first. An unknown order is only ever looked at as whole regions."""

_NEEDS_HEADS = {
    AxisOrder.NHD: {Axis.HEAD_COUNT, Axis.HEAD_SIZE},
    AxisOrder.HND: {Axis.PAGE, Axis.HEAD_COUNT, Axis.HEAD_SIZE},
    AxisOrder.UNIVERSAL: set(AXES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A run of bytes in one allocation."""

    allocation: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Strided:
    """A part of all blocks in one allocation. Byte (i, ...) is at `offset` + sum of i * stride; the axes are AXES.

    The last axis counts bytes: its stride is 1. The first layer index stands for layer `first_layer` of the layout.
    """

    allocation: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first_layer: int

    @property
    def layers(self) -> tuple[int, int]:
        """First layer and one past the last."""
        return self.first_layer, self.first_layer + self.shape[1]

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.strides[0]

    def nested(self, order: AxisOrder) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns shape and strides inside one block with the axes nested as in `order`, outermost first."""
        places = [AXES.index(axis) for axis in NESTING[order]]
        return tuple(self.shape[i] for i in places), tuple(self.strides[i] for i in places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Shape, kind and axis order of a layout.

    Raises:
        IncompatibleLayout: layer-separate allocations can't have heads outermost.
    """

    config: LayoutConfig
    kind: LayoutKind = LayoutKind.FULLY_CONTIGUOUS
    axis_order: AxisOrder = AxisOrder.UNKNOWN

    def __post_init__(self) -> None:
        """Checks that kind and order go together."""
        self._check_order(self.axis_order)

    @property
    def is_fully_contiguous(self) -> bool:
        """Whether each block is one run of bytes."""
        return self.kind is LayoutKind.FULLY_CONTIGUOUS

    @property
    def allocation_bytes(self) -> tuple[int, ...]:
        """Bytes of each allocation: one, or one for each layer."""
        return (self.bytes_of_each,) * self.num_allocations

    @property
    def num_allocations(self) -> int:
        """How many allocations there are."""
        return 1 if self.is_fully_contiguous else self.config.num_layers

    @property
    def bytes_of_each(self) -> int:
        """Bytes of one allocation; all have the same."""
        return self.config.total_bytes // self.num_allocations

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next; the same in every allocation."""
        if self.is_fully_contiguous:
            return self.config.block_bytes
        parts = self.config.outer_dim if self.kind is LayoutKind.LAYER_SEPARATE_BLOCK_FIRST else 1
        return parts * self.config.region_bytes

    def region(self, block: int, layer: int, outer: int) -> Region:
        """Returns where one (block, layer, outer part) lies.

        Raises:
            UnknownBlock: there is no such block.
            BadRequest: there is no such layer or outer part.
            IncompatibleLayout: with heads outermost a layer's bytes are not together.
        """
        self.check_blocks((block,))
        _check_index("layer", layer, self.config.num_layers)
        _check_index("outer", outer, self.config.outer_dim)
        if self.axis_order is AxisOrder.UNIVERSAL:
            raise _incompatible("the layout is universal: no layer of a block is one run of bytes", "axis_order", self)
        view = self.strided((layer, layer + 1), None, None)[0]
        offset = view.offset + block * view.strides[0] + outer * view.strides[2]
        return Region(allocation=view.allocation, offset=offset, length=self.config.region_bytes)

    def check_blocks(self, blocks: Sequence[int], side: str = "") -> None:
        """Refuses ids outside the layout.

        Raises:
            UnknownBlock: names the first such id, the side and the largest id there is.
        """
        count = self.config.num_blocks
        for block in blocks:
            if not 0 <= block < count:
                where = f"{side} block" if side else "block"
                message = f"{where} {block} is outside its layout, whose ids end at {count - 1}"
                raise UnknownBlock(message, block=block, num_blocks=count)

    def check_part(self, layers: tuple[int, int] | None, slice: AxisSlice | None, axis_order: AxisOrder | None) -> None:
        """Refuses a part that blocks of this layout do not have.

        Raises:
            BadRequest: a range is empty, reversed or beyond the axis.
            IncompatibleLayout: bytes would have to be told apart that this layout can't tell apart.
        """
        order = axis_order or self.axis_order
        self._check_order(order)
        if layers is not None:
            _check_range("layers", layers, self.config.num_layers)
            self._check_axis(Axis.LAYER, order, is_whole=layers == (0, self.config.num_layers))
        if slice is not None:
            self._check_slice(slice, layers, order)

    def extent(self, axis: Axis) -> int:
        """Returns how many indices an axis has: elements for HEAD_SIZE; 0 where heads are not known."""
        config = self.config
        extents = (config.num_blocks, config.num_layers, config.outer_dim, config.page_size)
        return (*extents, config.num_heads, config.head_dim)[AXES.index(axis)]

    def part_bytes(self, layers: tuple[int, int] | None, slice: AxisSlice | None, axis_order: AxisOrder | None) -> int:
        """Returns the bytes of a part of one block; raises as `check_part`."""
        self.check_part(layers, slice, axis_order)
        start, stop = self._layer_range(layers, slice)
        layer_bytes = self.config.outer_dim * self.config.region_bytes
        if slice is None or slice.axis is Axis.LAYER:
            return (stop - start) * layer_bytes
        return (stop - start) * (layer_bytes // self.extent(slice.axis)) * slice.length

    def strided(
        self, layers: tuple[int, int] | None, slice: AxisSlice | None, axis_order: AxisOrder | None
    ) -> tuple[Strided, ...]:
        """Returns where a part of the blocks lies, one value for each allocation that has some of it, by layer.

        Raises as `check_part`.
        """
        self.check_part(layers, slice, axis_order)
        start, stop = self._layer_range(layers, slice)
        order = axis_order or self.axis_order
        if self.is_fully_contiguous:
            return (self._view(0, (start, stop), slice, order),)
        return tuple(self._view(layer, (layer, layer + 1), slice, order) for layer in range(start, stop))

    def _view(self, allocation: int, layers: tuple[int, int], slice: AxisSlice | None, order: AxisOrder) -> Strided:
        config = self.config
        heads = config.num_heads or 1
        head_bytes = config.inner_dim * config.dtype_width_bytes // heads
        strides = self._strides(order, heads, head_bytes)
        shape = [config.num_blocks, layers[1] - layers[0], config.outer_dim, config.page_size, heads, head_bytes]
        offset = layers[0] * strides[1]
        if slice is not None and slice.axis is not Axis.LAYER:
            place = AXES.index(slice.axis)
            unit = config.dtype_width_bytes if slice.axis is Axis.HEAD_SIZE else 1
            shape[place] = slice.length * unit
            offset += slice.start * unit * strides[place]
        return Strided(allocation=allocation, offset=offset, shape=tuple(shape), strides=strides, first_layer=layers[0])

    def _strides(self, order: AxisOrder, heads: int, head_bytes: int) -> tuple[int, ...]:
        config, region = self.config, self.config.region_bytes
        if order is AxisOrder.UNIVERSAL:
            outer = config.page_size * head_bytes
            layer = config.outer_dim * outer
            return self.block_stride, layer, outer, head_bytes, config.num_layers * layer, 1
        page, head = heads * head_bytes, head_bytes
        if order is AxisOrder.HND:
            page, head = head_bytes, config.page_size * head_bytes
        layer = config.outer_dim * region if self.is_fully_contiguous else 0
        is_apart = self.kind is LayoutKind.LAYER_SEPARATE_BLOCK_SECOND
        outer = config.num_blocks * region if is_apart else region
        return self.block_stride, layer, outer, page, head, 1

    def _layer_range(self, layers: tuple[int, int] | None, slice: AxisSlice | None) -> tuple[int, int]:
        if slice is not None and slice.axis is Axis.LAYER:
            return slice.start, slice.stop
        return layers or (0, self.config.num_layers)

    def _check_order(self, order: AxisOrder) -> None:
        if order is AxisOrder.UNIVERSAL and not self.is_fully_contiguous:
            message = f"a {self.kind.value} layout can't be universal: its layers are apart, heads can't be outermost"
            raise IncompatibleLayout(message, field="axis_order", source=self.kind.value, destination=order.value)

    def _check_slice(self, slice: AxisSlice, layers: tuple[int, int] | None, order: AxisOrder) -> None:
        if slice.axis is Axis.BLOCK:
            raise BadRequest("blocks are named by their ids, not by a slice", field="slice")
        if slice.axis is Axis.LAYER and layers is not None:
            raise BadRequest("layers are given twice: as a range and as a slice", field="slice")
        self._check_axis(slice.axis, order, is_whole=False)
        _check_range(f"{slice.axis.value} slice", (slice.start, slice.stop), self.extent(slice.axis))

    def _check_axis(self, axis: Axis, order: AxisOrder, *, is_whole: bool) -> None:
        if order is AxisOrder.UNKNOWN and axis is not Axis.LAYER:
            raise _incompatible(f"a layout of unknown axis order has no {axis.value} slices", "axis_order", self)
        if axis in _NEEDS_HEADS.get(order, ()) and not self.config.num_heads and not is_whole:
            raise _incompatible(
                f"a part along {axis.value} of a layout in {order.value} order needs num_heads, which is not given",
                "num_heads",
                self,
            )


def with_heads_alike(one: Geometry, other: Geometry) -> tuple[Geometry, Geometry]:
    """Returns two layouts such that both know their heads, or neither does: only then do the same indices meet."""
    if bool(one.config.num_heads) == bool(other.config.num_heads):
        return one, other
    return _without_heads(one), _without_heads(other)


def _without_heads(geometry: Geometry) -> Geometry:
    return replace(geometry, config=replace(geometry.config, num_heads=0))


def _check_index(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise BadRequest(f"{name} {index} does not exist: the layout has {count}", field=name)


def _check_range(name: str, bounds: tuple[int, int], count: int) -> None:
    if not 0 <= bounds[0] < bounds[1] <= count:
        raise BadRequest(f"{name} {bounds[0]} to {bounds[1]} is not within 0 to {count}", field=name.split()[-1])


def _incompatible(message: str, field: str, geometry: Geometry) -> IncompatibleLayout:
    value = geometry.axis_order.value if field == "axis_order" else str(geometry.config.num_heads)
    return IncompatibleLayout(message, field=field, source=value, destination=value)
