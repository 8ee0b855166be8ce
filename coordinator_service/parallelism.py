"""How the ranks of a group share blocks: templates, stamps, and who pulls from whom.  [core]

Theory of operation. A worker knows its own layouts and nothing of its group. The leader knows how many workers there
are and how they share the model; from that and from one worker's layout it makes a template for each resource, and
stamps what the workers export with it. Whoever receives stamped metadata knows the undivided shape, so it can plan
which heads come from which rank.

Axis BLOCK is never part of a template: each group has its own number of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ayni.blocks.layouts import Axis, LayoutConfig, Tier
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode, ResourceParallelism, WorkerMetadata
from ayni.blocks.slices import block_extents
from ayni.errors import BadRequest, Unsupported

PRIMARY = 0
"""The resource that `WorkerMetadata.parallelism` speaks of."""

_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


class Strategy(Enum):
    """How two groups are joined."""

    STRICT = "strict"
    """All remote ranks are stamped: every local rank may read every remote rank."""
    LEGACY = "legacy"
    """Some are not: rank i reads rank i."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalShape:
    """Shape of a block before it is divided among ranks."""

    num_layers: int
    outer_dim: int
    page_size: int
    num_heads: int
    head_dim: int
    dtype_width_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismTemplate:
    """How a group shares one resource."""

    tp_size: int
    pp_size: int = 1
    mode: ParallelismMode = ParallelismMode.TENSOR_PARALLEL
    shard_axis: Axis = Axis.HEAD_COUNT
    global_extents: tuple[tuple[Axis, int], ...]
    """Undivided size of every axis but BLOCK, in order of axis name."""
    num_layers: int
    dtype_width_bytes: int

    @classmethod
    def from_layout(
        cls, config: LayoutConfig, num_workers: int, mode: ParallelismMode = ParallelismMode.TENSOR_PARALLEL
    ) -> "ParallelismTemplate":
        """Returns the template of a group whose workers all have layouts of this shape.

        Raises:
            BadRequest: there are no workers, or the layout does not say how many heads it has.
        """
        if num_workers < 1:
            raise BadRequest("a group without workers shares nothing; name at least one worker", field="workers")
        if not config.num_heads:
            message = "the layout does not say how many heads it has, so nobody can tell how they are divided; set it"
            raise BadRequest(message, field="num_heads")
        is_divided = mode is ParallelismMode.TENSOR_PARALLEL
        extents = block_extents(config) | {Axis.HEAD_COUNT: config.num_heads * (num_workers if is_divided else 1)}
        return cls(
            tp_size=num_workers,
            mode=mode,
            global_extents=tuple(sorted(extents.items(), key=_by_name)),
            num_layers=config.num_layers,
            dtype_width_bytes=config.dtype_width_bytes,
        )

    def extent(self, axis: Axis) -> int:
        """Returns the undivided size of an axis; 0 when it is not given."""
        return dict(self.global_extents).get(axis, 0)

    @property
    def canonical_shape(self) -> CanonicalShape:
        """Shape of a block before it is divided."""
        return CanonicalShape(
            num_layers=self.extent(Axis.LAYER),
            outer_dim=self.extent(Axis.OUTER),
            page_size=self.extent(Axis.PAGE),
            num_heads=self.extent(Axis.HEAD_COUNT),
            head_dim=self.extent(Axis.HEAD_SIZE),
            dtype_width_bytes=self.dtype_width_bytes,
        )

    def descriptor(self, rank: int) -> ParallelismDescriptor:
        """Returns the stamp of one rank."""
        return ParallelismDescriptor(
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            rank=rank,
            shard_axis=self.shard_axis,
            global_extents=self.global_extents,
            layer_stop=self.num_layers,
        )


Templates = Mapping[int, ParallelismTemplate]
"""Template of each resource, by resource id."""


def derive_templates(metadata: Sequence[WorkerMetadata], mode: ParallelismMode) -> dict[int, ParallelismTemplate]:
    """Returns a template for each resource whose layouts say enough: heads known, and all ranks of equal shape."""
    resources = sorted({layout.resource_id for one in metadata for layout in one.layouts})
    shapes = {resource: [_shape(one, resource) for one in metadata] for resource in resources}
    return {
        resource: ParallelismTemplate.from_layout(configs[0], len(metadata), mode)
        for resource, configs in shapes.items()
        if configs[0] is not None and configs[0].num_heads and len(set(configs)) == 1
    }


def stamp(templates: Templates, metadata: Sequence[WorkerMetadata]) -> tuple[WorkerMetadata, ...]:
    """Returns metadata with each worker's rank and part written in; what was stamped before is replaced.

    Other resources than the primary one are stamped only when all of them can be.

    Args:
        templates: at least that of the primary resource.
        metadata: of all workers, in rank order.

    Raises:
        BadRequest: there are more or fewer workers than the template has ranks.
        Unsupported: the template has more than one pipeline stage.
    """
    primary = templates[PRIMARY]
    if primary.pp_size != 1:
        message = f"the template has pp_size {primary.pp_size}; groups with one pipeline stage only can be stamped"
        raise Unsupported(message, field="pp_size", detail=primary.pp_size)
    if len(metadata) != primary.tp_size:
        message = f"{len(metadata)} workers were to be stamped with a template of tp_size {primary.tp_size}"
        raise BadRequest(message, field="metadata")
    resources = {layout.resource_id for one in metadata for layout in one.layouts} | {PRIMARY}
    is_gapless = resources == set(range(len(resources)))
    stamped = sorted(resources) if len(resources) > 1 and is_gapless and resources <= set(templates) else []
    return tuple(
        replace(
            one,
            rank=rank,
            parallelism=primary.descriptor(rank),
            resources=tuple(
                ResourceParallelism(resource_id=r, parallelism=templates[r].descriptor(rank)) for r in stamped
            ),
            mode=primary.mode,
        )
        for rank, one in enumerate(metadata)
    )


def strategy_of(metadata: Sequence[WorkerMetadata]) -> Strategy:
    """Returns STRICT when there are remote ranks and all of them are stamped."""
    is_stamped = bool(metadata) and all(one.parallelism is not None for one in metadata)
    return Strategy.STRICT if is_stamped else Strategy.LEGACY


def remote_rank(one: WorkerMetadata, position: int) -> int:
    """Returns the rank of a remote worker: what its stamp says, else its place in the list."""
    return one.parallelism.rank if one.parallelism else position


def is_replicated(mode: ParallelismMode | None) -> bool:
    """Says whether every rank holds every block whole; what is not said means tensor parallel."""
    return mode is ParallelismMode.REPLICATED_DATA


def routes(local_size: int, remote_size: int, mode: ParallelismMode | None) -> tuple[tuple[int, int], ...]:
    """Returns which local rank reads which remote rank, as pairs in order of local rank.

    Ranks that hold everything read one counterpart; others read every rank whose share of the whole meets theirs.
    """
    if is_replicated(mode):
        return tuple((i, i % remote_size) for i in range(local_size)) if remote_size else ()
    return tuple(
        (i, j)
        for i in range(local_size)
        for j in range(remote_size)
        if i * remote_size < (j + 1) * local_size and j * local_size < (i + 1) * remote_size
    )


def pick_source_tier(tiers: Sequence[Tier]) -> Tier | None:
    """Returns the tier to pull from: host before disk before device; None where there is none."""
    return next((tier for tier in (Tier.HOST, Tier.DISK, Tier.DEVICE) if tier in tiers), None)


def _shape(one: WorkerMetadata, resource: int) -> LayoutConfig | None:
    """Returns the shape of a worker's blocks, as its uppermost tier has it, without what differs between pools."""
    layouts = [layout for layout in one.layouts if layout.resource_id == resource]
    layouts.sort(key=lambda layout: _TIERS.index(layout.tier))
    return replace(layouts[0].config, num_blocks=1, alignment_bytes=1) if layouts else None


def _by_name(extent: tuple[Axis, int]) -> str:
    return extent[0].name
