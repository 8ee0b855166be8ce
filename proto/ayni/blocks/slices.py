"""Parts of blocks on two sides of a pull.  [core]"""

from collections.abc import Mapping

from ayni.blocks.layouts import Axis, LayoutConfig
from ayni.blocks.transfers import AxisSlice, PullShard
from ayni.errors import IncompatibleLayout

Extents = Mapping[Axis, int]
"""Size of each axis of the blocks of one rank."""


def block_extents(config: LayoutConfig) -> dict[Axis, int]:
    """Returns the size of every axis but BLOCK; without a number of heads, those two axes are left out."""
    extents = {Axis.LAYER: config.num_layers, Axis.OUTER: config.outer_dim, Axis.PAGE: config.page_size}
    heads = {Axis.HEAD_COUNT: config.num_heads, Axis.HEAD_SIZE: config.head_dim} if config.num_heads else {}
    return extents | heads


def translate(shard: PullShard, source: Extents, destination: Extents) -> tuple[AxisSlice, AxisSlice] | None:
    """Returns the part to read of each remote block and the part to write of each local one; None: all of both.

    Where the shard names one of them only, the other is all of its blocks along the same axis.

    Raises:
        IncompatibleLayout: the parts have other lengths or other axes, reach beyond the blocks, or are of an axis that
            a side's layout does not have.
    """
    named = shard.source_slice or shard.destination_slice
    if named is None:
        return None
    parts = [
        _part(side, shard, part, named.axis, extents)
        for side, part, extents in (
            ("remote", shard.source_slice, source),
            ("local", shard.destination_slice, destination),
        )
    ]
    if parts[0].length != parts[1].length or parts[0].axis is not parts[1].axis:
        raise _refusal(f"its parts differ: {_text(parts[0])} there, {_text(parts[1])} here", shard, *parts)
    return parts[0], parts[1]


def _part(side: str, shard: PullShard, part: AxisSlice | None, axis: Axis, extents: Extents) -> AxisSlice:
    axis = part.axis if part else axis
    if axis not in extents:
        raise _refusal(f"the {side} layout does not say how large {axis.value} is", shard, axis.value, "missing")
    part = part or AxisSlice(axis=axis, start=0, stop=extents[axis])
    if not 0 <= part.start < part.stop <= extents[axis]:
        text = f"{_text(part)} is not within the {side} blocks, whose {axis.value} is {extents[axis]}"
        raise _refusal(text, shard, part, extents[axis])
    return part


def _refusal(text: str, shard: PullShard, source: object, destination: object) -> IncompatibleLayout:
    values = [_text(one) if isinstance(one, AxisSlice) else str(one) for one in (source, destination)]
    return IncompatibleLayout(
        f"the part to pull from remote rank {shard.remote_rank} does not fit: {text}",
        field="shards",
        source=values[0],
        destination=values[1],
        rank=shard.remote_rank,
    )


def _text(part: AxisSlice) -> str:
    return f"{part.axis.value} {part.start} to {part.stop}"
