"""What a group of workers knows of itself and of a remote group that it is connected with.  [core]"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ayni.blocks.layouts import LayoutHandle, LocalLayout
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode, WorkerMetadata
from ayni.blocks.transfers import PullPlan, PullShard
from ayni.errors import UnknownLayout
from coordinator_service import gates
from coordinator_service.parallelism import (
    PRIMARY,
    Strategy,
    Templates,
    is_replicated,
    remote_rank,
    routes,
)
from coordinator_service.pull_plan import GroupPull, plan_pull

HandleMap = dict[tuple[str, int, LocalLayout], LayoutHandle]
"""Handle of each (instance id, remote rank, layout)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGroup:
    """What is known of this group."""

    num_ranks: int
    metadata: tuple[WorkerMetadata, ...] = ()
    """By rank; empty when nothing is known."""
    templates: Templates = field(default_factory=dict)
    mode: ParallelismMode = ParallelismMode.TENSOR_PARALLEL


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteGroup:
    """One connected group, as one group of workers sees it."""

    instance_id: str
    metadata: tuple[WorkerMetadata, ...]
    """In order of remote rank; each has that rank."""
    strategy: Strategy
    local: LocalGroup
    handles: HandleMap

    @property
    def epoch(self) -> int:
        """Epoch of the remote group."""
        return self.metadata[0].epoch

    @property
    def descriptors(self) -> tuple[ParallelismDescriptor, ...]:
        """Stamps in order of remote rank; none of a group that is joined rank by rank."""
        stamps = tuple(one.parallelism for one in self.metadata if one.parallelism)
        return stamps if self.strategy is Strategy.STRICT else ()

    @property
    def tp_size(self) -> int:
        """Ranks of the remote group; where there are stamps, they say the same, or it would not have been admitted."""
        return len(self.metadata)

    @property
    def mode(self) -> ParallelismMode:
        """How the remote group shares its model."""
        return self.metadata[0].mode or ParallelismMode.TENSOR_PARALLEL

    def reached_by(self, rank: int) -> tuple[WorkerMetadata, ...]:
        """Returns the remote ranks that a local rank must be connected with."""
        if self.strategy is Strategy.STRICT:
            return self.metadata
        wanted = {j for i, j in routes(self.local.num_ranks, len(self.metadata), self.local.mode) if i == rank}
        return tuple(one for one in self.metadata if one.rank in wanted)

    def counterpart(self, rank: int) -> int | None:
        """Returns the remote rank that holds the same part of each block as a local rank; None where none does."""
        if is_replicated(self.local.mode):
            return rank % self.tp_size
        return rank if self.tp_size == self.local.num_ranks else None

    def handle(self, remote_rank: int, place: LocalLayout) -> LayoutHandle:
        """Returns the handle of a remote rank's layout.

        Raises:
            UnknownLayout: the rank exported no such layout.
        """
        try:
            return self.handles[self.instance_id, remote_rank, place]
        except KeyError:
            message = f"rank {remote_rank} of group {self.instance_id} exported no {place}; configure it and reconnect"
            raise UnknownLayout(message, layout=place, instance_id=self.instance_id, rank=remote_rank) from None

    def plan(self, pull: GroupPull) -> dict[int, PullPlan]:
        """Returns what each local rank pulls, by rank; every remote handle that is needed is there.

        Raises:
            IncompatibleLayout: the groups' sizes differ and nobody said how this group shares the resource.
            UnknownLayout: a remote rank that is needed exported no such layout.
        """
        place = LocalLayout(tier=pull.remote_tier, resource_id=pull.destination.resource_id)
        plans = self._plan(pull)
        for plan in plans.values():
            for shard in plan.shards:
                self.handle(shard.remote_rank, place)
        return plans

    def _plan(self, pull: GroupPull) -> dict[int, PullPlan]:
        ranks = range(self.local.num_ranks)
        counterparts = {rank: self.counterpart(rank) for rank in ranks}
        whole = {rank: [PullShard(remote_rank=j)] for rank, j in counterparts.items() if j is not None}
        if len(whole) == len(ranks):
            return {rank: pull.plan(shards) for rank, shards in whole.items()}
        resource = pull.destination.resource_id
        stamps = self._stamps(resource)
        if resource not in self.local.templates or len(stamps) != len(self.metadata):
            self._refuse_unplanned(resource)
        return dict(plan_pull(self.local.templates[resource], stamps, pull))

    def _stamps(self, resource: int) -> tuple[ParallelismDescriptor, ...]:
        if resource == PRIMARY:
            return self.descriptors
        return tuple(r.parallelism for one in self.metadata for r in one.resources if r.resource_id == resource)

    def _refuse_unplanned(self, resource: int) -> None:
        message = (
            f"this group has {self.local.num_ranks} ranks and group {self.instance_id} has {self.tp_size}, and how "
            f"resource {resource} is divided is not known on both sides; give both leaders a template for it"
        )
        gates.refuse("no_template", message, "tp_size", self.tp_size, self.local.num_ranks)


def handle_map(instance_id: str, metadata: Sequence[WorkerMetadata]) -> HandleMap:
    """Returns the handle of each layout of a remote group's ranks."""
    return {
        (instance_id, remote_rank(one, place), layout.place): layout.handle
        for place, one in enumerate(metadata)
        for layout in one.layouts
    }
