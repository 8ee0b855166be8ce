"""Whether a transfer is possible: every check runs in every build, before the first byte moves.  [core]

Theory of operation. A transfer has a source and a destination, and perhaps blocks that it may bounce through; each is
a `Side`. Checks go from the lists alone (lengths, duplicates, overlap, range) to what the blocks hold (parts, shapes,
orders); the first that fails is raised. Where ids are at fault the error lists them, up to a limit.

Source blocks may be named twice. Empty lists pass: nothing is asked for.

Legend: N ids.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle, needs_transform
from ayni.errors import BadRequest, IncompatibleLayout
from worker_agent.blocks.geometry import AXES, Geometry, with_heads_alike
from worker_agent.blocks.memory import WHOLE, Part

_HEADS = (Axis.HEAD_COUNT, Axis.HEAD_SIZE)
_FIELDS = {
    Axis.LAYER: "num_layers",
    Axis.OUTER: "outer_dim",
    Axis.PAGE: "page_size",
    Axis.HEAD_COUNT: "num_heads",
    Axis.HEAD_SIZE: "head_dim",
}

MAX_LISTED = 16
"""Ids that one message lists; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Blocks on one side of a transfer, and what of them."""

    geometry: Geometry
    blocks: Ids
    part: Part = WHOLE
    layout: LayoutHandle | None = None
    """Sides with the same handle lie in the same memory; None lies in no other side's."""


def check_transfer(source: Side, destination: Side, bounce: Side | None = None) -> None:
    """Refuses a transfer that is not possible.

    Raises:
        BadRequest: lengths differ, a destination or bounce block is named twice, one block is on two sides, a part
            is not one, there are no bounce blocks.
        UnknownBlock: an id is outside its layout.
        IncompatibleLayout: the two parts differ in size, shape, or in an order that can't be changed.
    """
    check_ids(source, destination)
    if bounce is not None:
        _check_bounce(bounce, source, destination)
    check_parts(source, destination)


def check_ids(source: Side, destination: Side) -> None:
    """Refuses block lists; raises as `check_transfer`."""
    if len(source.blocks) != len(destination.blocks):
        message = f"{len(source.blocks)} source blocks and {len(destination.blocks)} destination blocks"
        raise BadRequest(f"{message}: name as many of the one as of the other", field="destination_blocks")
    check_range(source.geometry, source.blocks, "source")
    check_range(destination.geometry, destination.blocks, "destination")
    check_unique(destination.blocks, "destination")
    _check_disjoint(source, destination, "source", "destination")


def check_range(geometry: Geometry, blocks: Ids, side: str) -> None:
    """Refuses ids outside a layout.

    Raises:
        UnknownBlock: names the first such id, its side and the largest id there is.
    """
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= geometry.config.num_blocks):
        outside = (blocks < 0) | (blocks >= geometry.config.num_blocks)
        geometry.check_blocks(blocks[outside][:1].tolist(), side)


def check_unique(blocks: Ids, side: str) -> None:
    """Refuses ids that are named twice.

    Raises:
        BadRequest: lists them.
    """
    ordered = np.sort(blocks)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(repeated):
        raise BadRequest(f"{side} blocks are named more than once: {_listed(repeated)}", field=f"{side}_blocks")


def check_parts(source: Side, destination: Side) -> None:
    """Refuses two parts that do not have the same bytes; raises as `check_transfer`."""
    _check_alike(source.geometry, source.part, destination.geometry, destination.part)


@lru_cache(maxsize=256)
def _check_alike(source: Geometry, source_part: Part, destination: Geometry, destination_part: Part) -> None:
    """As `check_parts`. Kept: what passed once passes again, and asking costs more than a small copy."""
    sizes = _part_bytes(source, source_part), _part_bytes(destination, destination_part)
    extents = _extents(source, source_part), _extents(destination, destination_part)
    for name, extent in extents[0].items():
        if extent and extents[1][name] and extent != extents[1][name]:
            raise _unlike(name, extent, extents[1][name])
    if sizes[0] != sizes[1]:
        raise _unlike("part_bytes", sizes[0], sizes[1])
    orders = source_part.axis_order or source.axis_order, destination_part.axis_order or destination.axis_order
    if needs_transform(*orders):
        _check_transform(orders, (source.config.num_heads, destination.config.num_heads))
    _check_without_heads((source, source_part), (destination, destination_part))


def _extents(geometry: Geometry, part: Part) -> dict[str, int]:
    """Returns what must be equal on both sides, by name of the configuration's field; 0: not known."""
    config, cut = geometry.config, part.slice
    extents = {axis: geometry.extent(axis) for axis in AXES}
    inner_dim = config.inner_dim
    if part.layers is not None:
        extents[Axis.LAYER] = part.layers[1] - part.layers[0]
    if cut is not None:
        inner_dim = inner_dim // extents[cut.axis] * cut.length if cut.axis in _HEADS else inner_dim
        extents[cut.axis] = cut.length
    names = {name: extents[axis] for axis, name in _FIELDS.items()}
    return {"dtype_width_bytes": config.dtype_width_bytes, **names, "inner_dim": inner_dim}


def _check_transform(orders: tuple[AxisOrder, AxisOrder], num_heads: tuple[int, int]) -> None:
    one, other = orders
    if AxisOrder.UNKNOWN in orders:
        raise _unlike("axis_order", one.value, other.value, why="an unknown order can't be changed")
    if not all(num_heads):
        raise _unlike("num_heads", *num_heads, why=f"{one.value} to {other.value} needs them on both sides")


def _check_without_heads(*sides: tuple[Geometry, Part]) -> None:
    """Refuses parts that look into regions, where one side alone knows its heads."""
    (source, _), (destination, _) = sides
    for geometry, (_, part) in zip(with_heads_alike(source, destination), sides, strict=True):
        try:
            geometry.check_part(part.layers, part.slice, part.axis_order)
        except IncompatibleLayout as error:
            heads = source.config.num_heads, destination.config.num_heads
            raise _unlike("num_heads", *heads, why="this part needs them on both sides") from error


def _check_bounce(bounce: Side, source: Side, destination: Side) -> None:
    if not len(bounce.blocks):
        raise BadRequest("there are no bounce blocks: name at least one, or give none at all", field="options.bounce")
    check_range(bounce.geometry, bounce.blocks, "bounce")
    check_unique(bounce.blocks, "bounce")
    _check_disjoint(source, bounce, "source", "bounce")
    _check_disjoint(destination, bounce, "destination", "bounce")
    needed, held = _part_bytes(source.geometry, source.part), bounce.geometry.config.block_bytes
    if held < needed:
        raise _unlike("bounce", needed, held, why="a bounce block must hold a source block's part")


def _check_disjoint(one: Side, other: Side, one_name: str, other_name: str) -> None:
    if one.layout is None or one.layout != other.layout:
        return
    shared = np.unique(one.blocks[np.isin(one.blocks, other.blocks)])
    if len(shared):
        message = f"blocks are {one_name} and {other_name} at once: {_listed(shared)}"
        raise BadRequest(message, field=f"{other_name}_blocks")


def _part_bytes(geometry: Geometry, part: Part) -> int:
    return geometry.part_bytes(part.layers, part.slice, part.axis_order)


def _unlike(field: str, source: object, destination: object, why: str = "") -> IncompatibleLayout:
    message = f"blocks can't be copied: {field} is {source} in the source and {destination} in the destination"
    full = f"{message}; {why}" if why else message
    return IncompatibleLayout(full, field=field, source=source, destination=destination)


def _listed(ids: Ids) -> str:
    more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
    return ", ".join(map(str, ids[:MAX_LISTED].tolist())) + more
