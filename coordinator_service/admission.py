"""Whether a remote group may be connected.  [core]

Theory of operation. `admit` passes a remote group's metadata through every check, in a fixed order, and returns what is
known of the group, or raises; it changes nothing. The shell then connects the workers, and publishes the group only
when all of them succeeded. Checks come in this order: the list itself, the layouts, how the model is shared, resources,
and then either the stamps (when all ranks have one) or the number of ranks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ayni.blocks.layouts import Tier
from ayni.blocks.metadata import ParallelismDescriptor, ParallelismMode, WorkerMetadata
from ayni.errors import BadRequest
from coordinator_service import gates
from coordinator_service.layout_gates import BlockLayoutMode, check_layouts, choose_mode
from coordinator_service.parallelism import PRIMARY, Strategy, is_replicated, remote_rank, strategy_of
from coordinator_service.remote_groups import LocalGroup, RemoteGroup, handle_map


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectRules:
    """What a remote group must have."""

    layout_mode: BlockLayoutMode | None = None
    """None: UNIVERSAL where every layout on both sides can be sliced and reordered, else OPERATIONAL."""
    required_tier: Tier | None = Tier.HOST
    """Tier that every stamped remote rank must export; None: any."""


def admit(instance_id: str, metadata: Sequence[WorkerMetadata], local: LocalGroup, rules: ConnectRules) -> RemoteGroup:
    """Returns what is known of a remote group once it is connected.

    Args:
        instance_id: the remote group.
        metadata: what its ranks exported.
        local: this group.
        rules: what is asked of the other.

    Raises:
        BadRequest: the list is empty.
        IncompatibleLayout: a gate refuses; nothing was changed.
    """
    if not metadata:
        message = f"no metadata was given for group {instance_id}; connect with what export_metadata returned there"
        raise BadRequest(message, field="metadata")
    _check_identity(instance_id, metadata)
    mode = rules.layout_mode or choose_mode(local.metadata, metadata)
    check_layouts(mode, local.metadata, metadata, local.templates, local.mode)
    _check_sharing(metadata, local)
    _check_resources(metadata)
    strategy = strategy_of(metadata)
    if strategy is Strategy.STRICT:
        _check_stamps(metadata, local, rules)
    else:
        _check_counts(metadata, local)
    ranked = sorted((replace(one, rank=remote_rank(one, i)) for i, one in enumerate(metadata)), key=lambda m: m.rank)
    return RemoteGroup(
        instance_id=instance_id,
        metadata=tuple(ranked),
        strategy=strategy,
        local=local,
        handles=handle_map(instance_id, ranked),
    )


def _check_identity(instance_id: str, metadata: Sequence[WorkerMetadata]) -> None:
    for place, one in enumerate(metadata):
        if one.instance_id != instance_id:
            message = (
                f"entry {place} belongs to group {one.instance_id or 'none'}, not to {instance_id}; configure the "
                "remote group as one and export it again"
            )
            gates.refuse("identity", message, "instance_id", one.instance_id, instance_id)
        if one.epoch != metadata[0].epoch:
            message = (
                f"entry {place} of group {instance_id} is of epoch {one.epoch}, the first of epoch "
                f"{metadata[0].epoch}; export all ranks of the remote group at one time"
            )
            gates.refuse("identity", message, "epoch", one.epoch, metadata[0].epoch)
        places = [layout.place for layout in one.layouts]
        if len(set(places)) != len(places):
            message = f"entry {place} of group {instance_id} has two layouts of one tier and resource"
            gates.refuse("identity", message, "layouts", len(places), len(set(places)))


def _check_sharing(metadata: Sequence[WorkerMetadata], local: LocalGroup) -> None:
    """Gate `mode`: all remote ranks share the model in one way, and in the way of this group."""
    modes = [one.mode or ParallelismMode.TENSOR_PARALLEL for one in metadata]
    for place, mode in enumerate(modes):
        if mode is not modes[0]:
            rank, first = remote_rank(metadata[place], place), remote_rank(metadata[0], 0)
            message = (
                f"remote rank {rank} says that its group is {mode.value}, but remote rank {first} says "
                f"{modes[0].value}; configure the remote group as one"
            )
            gates.refuse("mode", message, "mode", mode, modes[0], rank=rank)
    if local.num_ranks and modes[0] is not local.mode:
        message = (
            f"the remote group is {modes[0].value} and this group {local.mode.value}; both must share the model in the "
            "same way"
        )
        gates.refuse("mode", message, "mode", modes[0], local.mode)


def _check_resources(metadata: Sequence[WorkerMetadata]) -> None:
    """Gate `resources`: ids upwards from 0 without gaps, ranks those of their worker, the first one the primary."""
    for place, one in enumerate(metadata):
        rank, ids = remote_rank(one, place), [resource.resource_id for resource in one.resources]
        if ids != list(range(len(ids))):
            message = f"remote rank {rank} has stamps of resources {ids}; they must count upwards from 0, each once"
            gates.refuse("resources", message, "resources", ids, list(range(len(ids))), rank=rank)
        for resource in one.resources:
            if resource.parallelism.rank != rank:
                message = (
                    f"resource {resource.resource_id} of remote rank {rank} is stamped with rank "
                    f"{resource.parallelism.rank}; every resource of a worker has the worker's rank"
                )
                gates.refuse("resources", message, "rank", resource.parallelism.rank, rank, rank=rank)
        if one.resources and one.resources[0].parallelism != one.parallelism:
            message = f"remote rank {rank} has two different stamps of its primary resource; stamp it again"
            gates.refuse("resources", message, "parallelism", "resource 0", "primary", rank=rank)


def _check_stamps(metadata: Sequence[WorkerMetadata], local: LocalGroup, rules: ConnectRules) -> None:
    """Passes every resource's stamps through the compatibility gates, as far as this group knows its own share."""
    primary = [one.parallelism for one in metadata if one.parallelism]
    tiers = [{layout.tier for layout in one.layouts if layout.resource_id == PRIMARY} for one in metadata]
    _check_resource(PRIMARY, primary, tiers, local, rules.required_tier)
    if PRIMARY not in local.templates:
        _check_sizes_without_template(primary[0], local)
    for resource in range(1, max(len(one.resources) for one in metadata)):
        stamps = [r.parallelism for one in metadata for r in one.resources if r.resource_id == resource]
        _check_resource(resource, stamps, [()] * len(stamps), local, None)
    gates.check_stamps_fit(metadata)


def _check_resource(
    resource: int,
    stamps: Sequence[ParallelismDescriptor],
    tiers: Sequence[Collection[Tier]],
    local: LocalGroup,
    required: Tier | None,
) -> None:
    if local.num_ranks and resource in local.templates:
        gates.check_compatibility(local.templates[resource], stamps, tiers, required)
    else:
        gates.check_remote(stamps)


def _check_sizes_without_template(stamp: ParallelismDescriptor, local: LocalGroup) -> None:
    """Gate `no_template`: groups of different sizes need to know how this one divides its blocks."""
    if local.num_ranks not in (0, stamp.tp_size) and not is_replicated(local.mode):
        message = (
            f"the remote group has {stamp.tp_size} ranks and this group {local.num_ranks}, and how this group divides "
            "its blocks is not known; give its leader a template, or set num_heads in its layouts"
        )
        gates.refuse("no_template", message, "tp_size", stamp.tp_size, local.num_ranks)


def _check_counts(metadata: Sequence[WorkerMetadata], local: LocalGroup) -> None:
    """Gate `not_stamped`: groups that are joined rank by rank have as many ranks, unless each rank holds everything."""
    if len(metadata) == local.num_ranks or (local.num_ranks and is_replicated(local.mode)):
        return
    unstamped = next(i for i, one in enumerate(metadata) if one.parallelism is None)
    message = (
        f"remote rank {unstamped} is not stamped, so ranks are joined one by one, but the remote group has "
        f"{len(metadata)} and this group {local.num_ranks}; for groups of different sizes both leaders need a template"
    )
    gates.refuse("not_stamped", message, "ranks", len(metadata), local.num_ranks, rank=unstamped)
