"""Hypothesis strategies for the values of the block half, and a form in which they compare."""

import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ayni.blocks import layouts, metadata, objects, transfers
from ayni.blocks.calls import Connect, Get, Has, LocalTransfer, Offload, Onboard, Pull, Put
from ayni.blocks.ids import as_ids
from ayni.errors import BY_REASON

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=12)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
UUIDS = st.uuids().map(str)
EPOCHS = st.integers(0, 2**63 - 1)
SECONDS = st.integers(0, 10**15).map(lambda microseconds: microseconds / 10**6)
MICROSECONDS = st.integers(1, 10**6).map(lambda microseconds: microseconds / 10**6)
IDS = st.lists(st.integers(0, 2**63 - 2), max_size=8).map(as_ids) | st.integers(0, 9).map(
    lambda start: as_ids(range(start, start + 5))
)
KEYS = st.lists(st.binary(min_size=24, max_size=24), max_size=4).map(tuple)
LAYOUT_TIERS = st.sampled_from([tier for tier in layouts.Tier if tier is not layouts.Tier.OBJECT])
ORDERS = st.sampled_from(layouts.AxisOrder)
TIMEOUT_S = 20.0
"""Of the options below; a message has none, so who reads it gives it."""


def plain(value: Any) -> Any:
    """Returns a value that compares: arrays become tuples, inside of frozen values too."""
    if isinstance(value, np.ndarray):
        return ("ids", str(value.dtype), *value.tolist())
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(plain(getattr(value, field.name)) for field in fields(value)))
    return value


HANDLES = st.builds(layouts.LayoutHandle, owner_id=U64, number=U64)
PLACES = st.builds(layouts.LocalLayout, tier=LAYOUT_TIERS, resource_id=U32)
POWERS = st.integers(0, 12).map(lambda exponent: 2**exponent)


@st.composite
def configs(draw: st.DrawFn) -> layouts.LayoutConfig:
    heads, width = draw(st.integers(0, 64)), draw(st.sampled_from([1, 2, 4, 8]))
    num_layers, outer_dim, page_size = draw(st.integers(1, 2**12)), draw(st.sampled_from([1, 2])), draw(POWERS)
    least = num_layers * outer_dim * page_size * max(heads, 1) * width
    head_dim = draw(st.integers(1, layouts.MAX_BLOCK_BYTES // least))
    return layouts.LayoutConfig(
        num_blocks=draw(st.integers(1, layouts.MAX_TOTAL_BYTES // (least * head_dim))),
        num_layers=num_layers,
        outer_dim=outer_dim,
        page_size=page_size,
        inner_dim=head_dim * max(heads, 1),
        num_heads=heads,
        dtype_width_bytes=width,
        alignment_bytes=draw(POWERS),
    )


def descriptors(owner_id: int = 7) -> st.SearchStrategy[layouts.LayoutDescriptor]:
    return st.builds(
        layouts.LayoutDescriptor,
        handle=st.builds(layouts.LayoutHandle, owner_id=st.just(owner_id), number=U64),
        tier=LAYOUT_TIERS,
        resource_id=U32,
        config=configs(),
        kind=st.sampled_from(layouts.LayoutKind),
        axis_order=ORDERS,
        storage=st.sampled_from(layouts.StorageKind),
        device_ordinal=U32,
        fingerprint=WORDS,
    )


@st.composite
def parallelisms(draw: st.DrawFn, rank: int = 0) -> metadata.ParallelismDescriptor:
    start = draw(st.integers(0, 100))
    axes = sorted(
        draw(st.sets(st.sampled_from([axis for axis in layouts.Axis if axis is not layouts.Axis.BLOCK]))),
        key=lambda axis: axis.name,
    )
    return metadata.ParallelismDescriptor(
        tp_size=draw(st.integers(rank + 1, 2**16)),
        pp_size=draw(st.integers(1, 4)),
        rank=rank,
        shard_axis=draw(st.sampled_from(layouts.Axis)),
        global_extents=tuple((axis, draw(st.integers(1, 2**63))) for axis in axes),
        layer_start=start,
        layer_stop=draw(st.integers(start + 1, 200)),
    )


def export(name: str, data: bytes, version: int = 1) -> metadata.EngineExport:
    return metadata.EngineExport(name=name, version=version, data=data, crc32=zlib.crc32(data))


@st.composite
def workers(
    draw: st.DrawFn, instance_id: str | None = None, epoch: int | None = None, rank: int | None = None
) -> metadata.WorkerMetadata:
    rank = draw(st.integers(0, 9)) if rank is None else rank
    tiers = list(layouts.Tier)
    found = draw(st.lists(descriptors(), max_size=2, unique_by=(lambda one: one.place, lambda one: one.handle)))
    own = draw(st.none() | parallelisms(rank))
    parts = [own, *draw(st.lists(parallelisms(rank), max_size=2))] if own and draw(st.booleans()) else []
    return metadata.WorkerMetadata(
        instance_id=instance_id or draw(UUIDS),
        epoch=draw(EPOCHS) if epoch is None else epoch,
        rank=rank,
        owner_id=7,
        incarnation=draw(U64),
        address=draw(st.sampled_from(["", "127.0.0.1:50051", "[::1]:1", "worker-3.local:65535"])),
        layouts=tuple(sorted(found, key=lambda one: (one.resource_id, tiers.index(one.tier)))),
        engines=tuple(
            export(name, draw(st.binary(max_size=40)), draw(U32)) for name in draw(st.sets(WORDS, max_size=2))
        ),
        parallelism=own,
        resources=tuple(
            metadata.ResourceParallelism(resource_id=place, parallelism=part) for place, part in enumerate(parts)
        ),
        mode=draw(st.none() | st.sampled_from(metadata.ParallelismMode)),
    )


STORES = st.builds(
    objects.ObjectStoreConfig,
    kind=st.sampled_from(["file", "s3", "gcs", "azure"]),
    bucket=WORDS,
    prefix=WORDS,
    endpoint=st.sampled_from(["", "http://127.0.0.1:9000"]),
    region=WORDS,
    path_style=st.booleans(),
    max_requests=st.integers(1, 1000),
    request_timeout_s=MICROSECONDS,
)
LAYOUT_REQUESTS = st.builds(
    metadata.LayoutRequest,
    tier=st.sampled_from([layouts.Tier.HOST, layouts.Tier.DISK]),
    num_blocks=st.integers(1, 2**63),
    resource_id=U32,
    kind=st.sampled_from(layouts.LayoutKind),
    axis_order=st.none() | ORDERS,
)
GROUP_CONFIGS = st.builds(
    metadata.GroupConfig,
    epoch=EPOCHS,
    instance_id=UUIDS,
    rank=st.integers(0, 7),
    world_size=st.integers(8, 2**32 - 1),
    mode=st.sampled_from(metadata.ParallelismMode),
    layouts=st.lists(LAYOUT_REQUESTS, max_size=3, unique_by=lambda one: (one.tier, one.resource_id)).map(tuple),
    disk_folder=st.sampled_from(["", "slabs", "a/b..c"]),
    object_store=st.none() | STORES,
)


@st.composite
def connects(draw: st.DrawFn) -> Connect:
    instance_id, epoch = draw(UUIDS), draw(EPOCHS)
    ranks = draw(st.sampled_from([(4,), (0, 1)]))
    return Connect(
        instance_id=instance_id,
        metadata=tuple(draw(workers(instance_id, epoch, rank)) for rank in ranks),
        engines=tuple(draw(st.lists(WORDS, max_size=2))),
    )


REMOTE_LAYOUTS = st.builds(
    metadata.RemoteLayout,
    remote_rank=U32,
    resource_id=U32,
    tier=LAYOUT_TIERS,
    layout=HANDLES,
    engine=WORDS,
)
REMOTE_STATES = st.builds(
    metadata.RemoteState,
    connected=st.booleans(),
    remote_epoch=EPOCHS,
    layouts=st.lists(REMOTE_LAYOUTS, max_size=3).map(tuple),
)
RANGES = st.tuples(st.integers(0, 50), st.integers(51, 99))
SLICES = st.tuples(st.sampled_from(layouts.Axis), RANGES).map(
    lambda drawn: transfers.AxisSlice(axis=drawn[0], start=drawn[1][0], stop=drawn[1][1])
)
OPTIONS = st.builds(
    transfers.TransferOptions,
    layers=st.none() | RANGES,
    bounce=st.none() | st.builds(transfers.Bounce, layout=HANDLES, blocks=IDS.filter(len)),
    source_axis_order=st.none() | ORDERS,
    destination_axis_order=st.none() | ORDERS,
    write_notification=st.none() | U64,
    engine=st.just("") | WORDS,
    checksum=st.booleans(),
    route=st.just("") | WORDS,
    timeout_s=st.just(TIMEOUT_S),
    drain_s=MICROSECONDS,
)
REMOTES = st.builds(transfers.RemoteBlocks, layout=HANDLES, blocks=IDS) | st.builds(transfers.ObjectKeys, keys=KEYS)
LOCAL_TRANSFERS = st.builds(
    LocalTransfer, source=PLACES, destination=PLACES, source_blocks=IDS, destination_blocks=IDS, options=OPTIONS
)
ONBOARDS = st.builds(Onboard, source=REMOTES, destination=PLACES, destination_blocks=IDS, options=OPTIONS)
OFFLOADS = st.builds(Offload, source=PLACES, source_blocks=IDS, destination=REMOTES, options=OPTIONS)
SHARDS = st.builds(
    transfers.PullShard,
    remote_rank=U32,
    source_slice=st.none() | SLICES,
    destination_slice=st.none() | SLICES,
)
PULLS = st.builds(
    Pull,
    plan=st.builds(
        transfers.PullPlan,
        instance_id=UUIDS,
        remote_tier=LAYOUT_TIERS,
        source_blocks=IDS,
        destination=PLACES,
        destination_blocks=IDS,
        shards=st.lists(SHARDS, max_size=3).map(tuple),
    ),
    options=OPTIONS,
)
FAILURES = st.builds(
    transfers.Failure,
    reason=st.sampled_from(sorted(BY_REASON)),
    message=TEXTS,
    metadata=st.dictionaries(TEXTS, TEXTS, max_size=2).map(lambda pairs: tuple(sorted(pairs.items()))),
)


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[transfers.TransferOutcome, int]:
    """Returns an outcome and the number of blocks that it tells of."""
    total = draw(st.integers(0, 50))
    places = draw(st.sets(st.integers(0, total - 1), max_size=4)) if total else ()
    outcome = transfers.TransferOutcome(
        rank=draw(U32),
        num_done=total - len(places),
        failures=tuple(
            transfers.BlockFailure(index=place, block=draw(U64), failure=draw(FAILURES)) for place in sorted(places)
        ),
        transferred_bytes=draw(U64),
        elapsed_s=draw(MICROSECONDS),
        engines=tuple(draw(st.lists(WORDS, max_size=2))),
        quiesced=draw(st.booleans()),
    )
    return outcome, total


HAS = st.builds(Has, layout=PLACES, keys=KEYS)
PUTS = st.builds(Put, source=PLACES, source_blocks=IDS, keys=KEYS, lock_validity_s=st.none() | MICROSECONDS)
GETS = st.builds(Get, keys=KEYS, destination=PLACES, destination_blocks=IDS)
PRESENCES = st.builds(
    objects.Presence,
    state=st.sampled_from(objects.PresenceState),
    size_bytes=U64,
    failure=st.none() | FAILURES,
)
KEY_OUTCOMES = st.builds(
    objects.KeyOutcome,
    state=st.sampled_from(objects.OutcomeState),
    size_bytes=U64,
    failure=st.none() | FAILURES,
)
PRESENCE_REPORTS = st.lists(PRESENCES, max_size=4).map(
    lambda each: objects.PresenceReport(presences=tuple(each), by_rank=(tuple(each),))
)
KEY_REPORTS = st.lists(KEY_OUTCOMES, max_size=4).map(
    lambda each: objects.KeyReport(outcomes=tuple(each), by_rank=(tuple(each),))
)
