"""Whether two groups' layouts can exchange blocks: exactly alike, or alike once undivided.  [core]

Theory of operation. These gates come before those of `gates`, since they look at layouts and need no stamp. In
OPERATIONAL mode blocks are copied byte for byte, so each pair of ranks that will meet must have equal layouts. In
UNIVERSAL mode bytes are sliced and put in another order on the way, so only the undivided shape must agree, and every
order must be known. The number of blocks, their alignment and the arrangement of regions may always differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum

from ayni.blocks.layouts import Axis, AxisOrder, LayoutDescriptor, LocalLayout
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode, WorkerMetadata
from coordinator_service.gates import refuse
from coordinator_service.parallelism import (
    PRIMARY,
    CanonicalShape,
    Templates,
    is_replicated,
    remote_rank,
    routes,
)

_EXACT = ("num_layers", "outer_dim", "page_size", "inner_dim", "num_heads", "dtype_width_bytes")
_TO_SERVE = "or connect in universal mode, which needs known orders and heads on all layouts of both groups"


class BlockLayoutMode(Enum):
    """How alike the layouts of two groups must be."""

    OPERATIONAL = "operational"
    """Ranks that meet have layouts of equal shape and order."""
    UNIVERSAL = "universal"
    """The undivided shapes agree and every order is known."""


def choose_mode(local: Sequence[WorkerMetadata], remote: Sequence[WorkerMetadata]) -> BlockLayoutMode:
    """Returns UNIVERSAL when every layout on both sides can be sliced and reordered, else OPERATIONAL."""
    layouts = [layout for one in (*local, *remote) for layout in one.layouts]
    return BlockLayoutMode.UNIVERSAL if layouts and all(map(_is_labelled, layouts)) else BlockLayoutMode.OPERATIONAL


def check_layouts(
    mode: BlockLayoutMode,
    local: Sequence[WorkerMetadata],
    remote: Sequence[WorkerMetadata],
    templates: Templates,
    sharing: ParallelismMode | None = None,
) -> None:
    """Passes a remote group's layouts through the gate of a mode.

    Args:
        mode: which gate.
        local: this group's ranks; empty when nothing is known of them.
        remote: the remote group's ranks.
        templates: of this group, used in place of absent local layouts.
        sharing: how this group shares the model.

    Raises:
        IncompatibleLayout: the gate refuses.
    """
    if mode is BlockLayoutMode.OPERATIONAL:
        check_operational(local, remote, sharing)
    else:
        check_universal(local, remote, templates, sharing)


def check_operational(
    local: Sequence[WorkerMetadata], remote: Sequence[WorkerMetadata], sharing: ParallelismMode | None = None
) -> None:
    """Gate `layout_shape`: ranks that meet have equal layouts in each tier and resource that both have."""
    by_rank = {remote_rank(one, place): one for place, one in enumerate(remote)}
    for i, j in routes(len(local), len(remote), sharing):
        ours = {layout.place: layout for layout in local[i].layouts}
        for theirs in by_rank[j].layouts if j in by_rank else ():
            if theirs.place in ours:
                _check_pair(i, j, ours[theirs.place], theirs)


def check_universal(
    local: Sequence[WorkerMetadata],
    remote: Sequence[WorkerMetadata],
    templates: Templates,
    sharing: ParallelismMode | None = None,
) -> None:
    """Gates `no_layouts`, `axis_order`, `head_count` and `canonical_shape`, in this order, rank after rank."""
    for side, group in (("remote", remote), ("local", local)):
        for place, one in enumerate(group):
            _check_labelled(side, remote_rank(one, place) if side == "remote" else place, one)
    expected = {resource: template.canonical_shape for resource, template in templates.items()}
    expected |= {place.resource_id: shape for _, place, shape in _shapes(local, sharing, templates)}
    for rank, at, shape in _shapes(remote, remote[0].mode if remote else None, {}):
        ours = expected.get(at.resource_id, shape)
        if shape != ours:
            _refuse_shape(rank, at, shape, ours)


def _check_pair(i: int, j: int, ours: LayoutDescriptor, theirs: LayoutDescriptor) -> None:
    where = f"the {theirs.place} of local rank {i} and of remote rank {j}"
    for field in _EXACT:
        source, destination = getattr(theirs.config, field), getattr(ours.config, field)
        if source != destination:
            message = f"{where} differ in {field}: remote {source}, local {destination}; make them equal, {_TO_SERVE}"
            refuse("layout_shape", message, field, source, destination, rank=j, local_rank=i)
    if theirs.axis_order is not ours.axis_order:
        source, destination = theirs.axis_order.value, ours.axis_order.value
        message = f"{where} differ in axis order: remote {source}, local {destination}; make them equal, {_TO_SERVE}"
        refuse("layout_shape", message, "axis_order", source, destination, rank=j, local_rank=i)


def _check_labelled(side: str, rank: int, one: WorkerMetadata) -> None:
    if not one.layouts:
        message = f"{side} rank {rank} exports no layouts; configure them before connecting"
        refuse("no_layouts", message, "layouts", 0, "at least 1", rank=rank, side=side)
    for layout in one.layouts:
        if layout.axis_order is AxisOrder.UNKNOWN:
            message = f"the {layout.place} of {side} rank {rank} has an unknown axis order; name it when registering"
            refuse("axis_order", message, "axis_order", AxisOrder.UNKNOWN, "a known order", rank=rank, side=side)
        if not layout.config.num_heads:
            message = f"the {layout.place} of {side} rank {rank} does not say how many heads it has; set num_heads"
            refuse("head_count", message, "num_heads", 0, "at least 1", rank=rank, side=side)


def _shapes(
    group: Sequence[WorkerMetadata], sharing: ParallelismMode | None, templates: Templates
) -> Iterable[tuple[int, LocalLayout, CanonicalShape]]:
    """Returns rank, place and undivided shape of every layout."""
    for position, one in enumerate(group):
        stamps = _stamps(one)
        for layout in one.layouts:
            resource = layout.resource_id
            heads = layout.config.num_heads * (1 if is_replicated(sharing) else len(group))
            if resource in templates:
                heads = templates[resource].extent(Axis.HEAD_COUNT)
            elif resource in stamps:
                heads = dict(stamps[resource].global_extents).get(Axis.HEAD_COUNT, heads)
            yield remote_rank(one, position), layout.place, _canonical(layout, heads)


def _stamps(one: WorkerMetadata) -> Mapping[int, ParallelismDescriptor]:
    stamps = {resource.resource_id: resource.parallelism for resource in one.resources}
    return {PRIMARY: one.parallelism, **stamps} if one.parallelism else stamps


def _canonical(layout: LayoutDescriptor, heads: int) -> CanonicalShape:
    config = layout.config
    return CanonicalShape(
        num_layers=config.num_layers,
        outer_dim=config.outer_dim,
        page_size=config.page_size,
        num_heads=heads,
        head_dim=config.head_dim,
        dtype_width_bytes=config.dtype_width_bytes,
    )


def _refuse_shape(rank: int, place: LocalLayout, theirs: CanonicalShape, ours: CanonicalShape) -> None:
    for field in fields(CanonicalShape):
        source, destination = getattr(theirs, field.name), getattr(ours, field.name)
        if source != destination:
            message = (
                f"undivided, the {place} of remote rank {rank} has {field.name} {source} and this group's "
                f"{destination}; both groups must hold the same model in blocks of the same size"
            )
            refuse("canonical_shape", message, field.name, source, destination, rank=rank)


def _is_labelled(layout: LayoutDescriptor) -> bool:
    return layout.axis_order is not AxisOrder.UNKNOWN and layout.config.num_heads > 0
