"""Which part of its blocks each rank pulls from which remote rank.  [core]

Theory of operation. Let G be the undivided size of the shard axis, L the ranks here and R the ranks there. Local rank i
holds [i*G/L, (i+1)*G/L) and remote rank j holds [j*G/R, (j+1)*G/R). Rank i pulls from every j whose interval meets its
own; the part, seen from i and from j, gives the two slices. Neither L nor R must divide the other, but both must divide
G. The slices of one rank tile its blocks exactly once, so its bytes are always those of whole blocks.

Groups whose ranks hold everything need no slices: rank i pulls whole blocks from rank i mod R.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import Axis, LocalLayout, Tier
from ayni.blocks.metadata import ParallelismDescriptor
from ayni.blocks.transfers import AxisSlice, PullPlan, PullShard
from coordinator_service import gates
from coordinator_service.parallelism import ParallelismTemplate, is_replicated, routes


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPull:
    """Blocks that a group pulls from a connected group; the ids mean the same on every rank of a side."""

    instance_id: str
    remote_tier: Tier
    source_blocks: Ids
    destination: LocalLayout
    destination_blocks: Ids

    def plan(self, shards: Sequence[PullShard]) -> PullPlan:
        """Returns what one rank pulls."""
        return PullPlan(
            instance_id=self.instance_id,
            remote_tier=self.remote_tier,
            source_blocks=self.source_blocks,
            destination=self.destination,
            destination_blocks=self.destination_blocks,
            shards=tuple(shards),
        )


def plan_pull(
    template: ParallelismTemplate, remote: Sequence[ParallelismDescriptor], pull: GroupPull
) -> tuple[tuple[int, PullPlan], ...]:
    """Returns what each rank of this group pulls, in order of rank; nothing when there are no blocks.

    Args:
        template: how this group shares the resource.
        remote: stamps of the remote ranks.
        pull: which blocks.

    Raises:
        IncompatibleLayout: the sizes do not fit, with the gate's word.
    """
    _check_sides(template, remote)
    if not len(pull.destination_blocks):
        return ()
    if is_replicated(template.mode):
        pairs = routes(template.tp_size, remote[0].tp_size, template.mode)
        return tuple((i, pull.plan([PullShard(remote_rank=j)])) for i, j in pairs)
    extent = _checked_extent(template, remote[0])
    return tuple(
        (rank, pull.plan(list(_shards(template, remote[0].tp_size, extent, rank)))) for rank in range(template.tp_size)
    )


def _check_sides(template: ParallelismTemplate, remote: Sequence[ParallelismDescriptor]) -> None:
    gates.check_described(remote, [()] * len(remote))
    gates.check_sizes(template, remote)
    gates.check_agreement(remote)


def _checked_extent(template: ParallelismTemplate, stamp: ParallelismDescriptor) -> int:
    gates.check_shard_axis(template, stamp)
    extent = template.extent(template.shard_axis)
    if not extent:
        axis = template.shard_axis.value
        message = f"this group divides {axis} among its ranks, but its template does not say how large {axis} is"
        gates.refuse("missing_extent", message, axis, "missing", "missing", side="local")
    for side, size in (("this group", template.tp_size), ("the remote group", stamp.tp_size)):
        if extent % size:
            gates.refuse_indivisible(side, template.shard_axis, extent, size, (stamp.tp_size, template.tp_size))
    return extent


def _shards(template: ParallelismTemplate, remote_size: int, extent: int, rank: int) -> Iterator[PullShard]:
    local, remote = extent // template.tp_size, extent // remote_size
    for j in range(rank * local // remote, -(-(rank + 1) * local // remote)):
        start, stop = max(rank * local, j * remote), min((rank + 1) * local, (j + 1) * remote)
        yield PullShard(
            remote_rank=j,
            source_slice=_slice(template.shard_axis, start - j * remote, stop - j * remote, remote),
            destination_slice=_slice(template.shard_axis, start - rank * local, stop - rank * local, local),
        )


def _slice(axis: Axis, start: int, stop: int, extent: int) -> AxisSlice | None:
    """Returns a part of an axis; None when it is all of it."""
    return None if (start, stop) == (0, extent) else AxisSlice(axis=axis, start=start, stop=stop)
