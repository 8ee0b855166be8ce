"""Whether two groups can exchange blocks, by their stamps: gates in a fixed order, the first that refuses wins.  [core]

Theory of operation. A gate is a function that returns nothing or raises IncompatibleLayout whose metadata name the
gate by one word, the field, and both values: `source` is the remote group's (blocks are pulled from it), `destination`
is this group's. The order never depends on the data, so that the same two groups are always refused for the same
reason.
"""

from collections.abc import Collection, Sequence
from typing import NoReturn

from ayni.blocks.layouts import Axis, Tier
from ayni.blocks.metadata import ParallelismDescriptor, WorkerMetadata
from ayni.blocks.slices import block_extents
from ayni.errors import IncompatibleLayout
from coordinator_service.parallelism import PRIMARY, ParallelismTemplate, is_replicated

Stamps = Sequence[ParallelismDescriptor]

_AGREED = ("tp_size", "shard_axis", "global_extents", "layer_start", "layer_stop")


def check_compatibility(
    template: ParallelismTemplate,
    stamps: Stamps,
    tiers: Sequence[Collection[Tier]],
    required: Tier | None = Tier.HOST,
) -> None:
    """Passes a remote group through all gates.

    Args:
        template: how this group shares the resource.
        stamps: of the remote ranks.
        tiers: of which each of them exports layouts, in the same order.
        required: tier that every remote rank must have; None: any.

    Raises:
        IncompatibleLayout: a gate refuses.
    """
    check_described(stamps, tiers)
    check_sizes(template, stamps)
    check_agreement(stamps)
    check_coverage(stamps)
    check_divisible(template, stamps[0])
    check_shard_axis(template, stamps[0])
    check_extents(template, stamps[0])
    check_tiers(stamps, tiers, required)


def check_remote(stamps: Stamps) -> None:
    """Passes a remote group through the gates that ask nothing of this group: 1 to 5."""
    check_described(stamps, [()] * len(stamps))
    check_sizes(None, stamps)
    check_agreement(stamps)
    check_coverage(stamps)


def refuse(gate: str, message: str, field: str, source: object, destination: object, **more: object) -> NoReturn:
    """Raises the refusal of a gate."""
    raise IncompatibleLayout(
        f"the {gate} gate refuses: {message}",
        gate=gate,
        field=field,
        source=text_of(source),
        destination=text_of(destination),
        **more,
    )


def text_of(value: object) -> str:
    """Returns a value as people write it."""
    if isinstance(value, tuple):
        return ", ".join(f"{text_of(axis)} {size}" for axis, size in value)
    return str(getattr(value, "value", value))


def check_described(stamps: Stamps, tiers: Sequence[Collection[Tier]]) -> None:
    """Gate 1, `description`: the remote group has ranks, and each has a stamp and a list of tiers."""
    if not stamps or len(stamps) != len(tiers):
        message = (
            f"the remote group came with {len(stamps)} stamps and {len(tiers)} lists of tiers; export the metadata of "
            "all its ranks again"
        )
        refuse("description", message, "ranks", len(stamps), len(tiers))


def check_sizes(template: ParallelismTemplate | None, stamps: Stamps) -> None:
    """Gates 2 and 3, `zero_size` and `pipeline_parallel`: ranks on both sides, and one pipeline stage. Local first."""
    sides = [("this group", "local", template.tp_size, template.pp_size)] if template else []
    sides += [(f"remote rank {one.rank}", "remote", one.tp_size, one.pp_size) for one in stamps]
    for who, side, *sizes in sides:
        for field, size in zip(("tp_size", "pp_size"), sizes, strict=True):
            if size < 1:
                message = f"{who} says {field} {size}; it must be at least 1"
                refuse("zero_size", message, field, *_on_side(side, size), side=side)
    for who, side, _, stages in sides:
        if stages != 1:
            message = f"{who} has {stages} pipeline stages; blocks are exchanged between groups of one stage only"
            refuse("pipeline_parallel", message, "pp_size", *_on_side(side, stages), side=side)


def check_agreement(stamps: Stamps) -> None:
    """Gate 4, `inconsistent_remote`: all remote ranks say the same of their group."""
    first = stamps[0]
    for one in stamps[1:]:
        for field in _AGREED:
            if getattr(one, field) != getattr(first, field):
                ours, theirs = text_of(getattr(first, field)), text_of(getattr(one, field))
                message = (
                    f"remote rank {one.rank} says {field} {theirs}, but remote rank {first.rank} says {ours}; export "
                    "all ranks of the remote group at one time"
                )
                refuse("inconsistent_remote", message, field, theirs, ours, rank=one.rank)


def check_coverage(stamps: Stamps) -> None:
    """Gate 5, `incomplete_ranks`: each rank of the remote group is there once."""
    expected, ranks = stamps[0].tp_size * stamps[0].pp_size, [one.rank for one in stamps]
    advice = "connect with the metadata of every rank, each once"
    if len(ranks) != expected:
        message = f"the remote group has {expected} ranks, but {len(ranks)} came; {advice}"
        refuse("incomplete_ranks", message, "ranks", len(ranks), expected, detail="count")
    for place, rank in enumerate(ranks):
        if not 0 <= rank < expected:
            message = f"remote rank {rank} is outside its group of {expected}; {advice}"
            refuse("incomplete_ranks", message, "ranks", rank, expected, detail="out_of_range", rank=rank)
        if rank in ranks[:place]:
            message = f"remote rank {rank} came twice; {advice}"
            refuse("incomplete_ranks", message, "ranks", rank, expected, detail="duplicate", rank=rank)


def check_divisible(template: ParallelismTemplate, stamp: ParallelismDescriptor) -> None:
    """Gate 6, `indivisible_extent`: on each side the ranks divide the axis evenly. Neither must divide the other."""
    if is_replicated(template.mode):
        return
    theirs = dict(stamp.global_extents).get(stamp.shard_axis, 0)
    for side, axis, extent, size in (
        ("this group", template.shard_axis, template.extent(template.shard_axis), template.tp_size),
        ("the remote group", stamp.shard_axis, theirs, stamp.tp_size),
    ):
        if extent % size:
            refuse_indivisible(side, axis, extent, size, (stamp.tp_size, template.tp_size))


def refuse_indivisible(side: str, axis: Axis, extent: int, size: int, sizes: tuple[int, int]) -> NoReturn:
    """Raises the refusal of gate 6; `sizes` are those of the remote and of this group."""
    cause = "fewer than ranks, and a part held by several ranks is not served" if extent < size else "not divisible"
    message = (
        f"{axis.value} has {extent} indices in all, and {side} has {size} ranks: {cause} (remote group {sizes[0]} "
        f"ranks, this group {sizes[1]}); choose sizes that divide {extent}"
    )
    refuse("indivisible_extent", message, "tp_size", sizes[0], sizes[1], axis=axis.value, extent=extent)


def check_shard_axis(template: ParallelismTemplate, stamp: ParallelismDescriptor) -> None:
    """Gate 7, `shard_axis`: both sides divide the same axis."""
    if template.shard_axis is not stamp.shard_axis:
        theirs, ours = stamp.shard_axis.value, template.shard_axis.value
        message = f"the remote group divides {theirs} among its ranks, this group {ours}; both must divide the same"
        refuse("shard_axis", message, "shard_axis", theirs, ours)


def check_extents(template: ParallelismTemplate, stamp: ParallelismDescriptor) -> None:
    """Gate 8, `missing_extent` and `extent`: both sides give the same undivided size of every axis."""
    ours, theirs = dict(template.global_extents), dict(stamp.global_extents)
    for axis in sorted(ours.keys() | theirs.keys(), key=lambda axis: axis.name):
        for side, extents in (("remote", theirs), ("local", ours)):
            if axis not in extents:
                who = "the remote group" if side == "remote" else "this group"
                message = f"{who} does not say how large {axis.value} is; stamp it with a template that has every axis"
                values = theirs.get(axis, "missing"), ours.get(axis, "missing")
                refuse("missing_extent", message, axis.value, *values, side=side)
        if ours[axis] != theirs[axis]:
            message = (
                f"{axis.value} is {theirs[axis]} in the remote group and {ours[axis]} in this group; both must hold "
                "the same model with the same page size"
            )
            refuse("extent", message, axis.value, theirs[axis], ours[axis])


def check_tiers(stamps: Stamps, tiers: Sequence[Collection[Tier]], required: Tier | None) -> None:
    """Gate 9, `missing_tier`: every remote rank exports the required tier."""
    for stamp, there in zip(stamps, tiers, strict=True):
        if required is not None and required not in there:
            names = ", ".join(tier.value for tier in Tier if tier in there) or "none"
            message = (
                f"remote rank {stamp.rank} exports no {required.value} layout (it exports: {names}); configure one "
                "there, or require another tier here"
            )
            refuse("missing_tier", message, "tier", names, required.value, rank=stamp.rank)


def check_stamps_fit(metadata: Sequence[WorkerMetadata]) -> None:
    """Gate `stamp`: what a remote rank's layouts are agrees with what its stamp says."""
    for one in metadata:
        stamps = {resource.resource_id: resource.parallelism for resource in one.resources}
        if one.parallelism:
            stamps[PRIMARY] = one.parallelism
        for layout in one.layouts:
            if stamp := stamps.get(layout.resource_id):
                whole = layout.resource_id != PRIMARY or is_replicated(one.mode)
                _check_stamp(stamp, block_extents(layout.config), str(layout.place), whole)


def _check_stamp(stamp: ParallelismDescriptor, sizes: dict[Axis, int], place: str, may_be_whole: bool) -> None:
    for axis, extent in stamp.global_extents:
        allowed = {extent} if axis is not stamp.shard_axis or may_be_whole else set()
        if axis is stamp.shard_axis and extent % stamp.tp_size == 0:
            allowed.add(extent // stamp.tp_size)
        if axis in sizes and sizes[axis] not in allowed:
            message = (
                f"the {place} of remote rank {stamp.rank} has {axis.value} {sizes[axis]}, but its stamp says {extent} "
                f"in all over {stamp.tp_size} ranks; stamp the group with the template of its layouts"
            )
            refuse("stamp", message, axis.value, sizes[axis], extent, rank=stamp.rank)


def _on_side(side: str, value: int) -> tuple[object, object]:
    """Returns remote and local value where only one of them is at fault."""
    return (value, "") if side == "remote" else ("", value)
