"""What workers say about themselves: order, bytes of older releases, and everything that a reader refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from ayni.blocks import group_messages, layout_messages, metadata_messages
from ayni.blocks.layouts import (
    Axis,
    AxisOrder,
    LayoutConfig,
    LayoutDescriptor,
    LayoutHandle,
    LayoutKind,
    StorageKind,
    Tier,
)
from ayni.blocks.messages import sent_by
from ayni.blocks.metadata import (
    Configured,
    Imported,
    ParallelismDescriptor,
    ResourceParallelism,
    WorkerMetadata,
)
from ayni.errors import AyniError, BadRequest, Checksum, Incompatible
from ayni.v1 import worker_pb2 as pb
from tests.support import block_values as values

GROUP = "6f1d7a52-0b7e-4a6c-9c3d-2f4e5a6b7c8d"
OWNER = 0x0123456789ABCDEF


def layout(tier: Tier, number: int, resource_id: int = 0) -> LayoutDescriptor:
    return LayoutDescriptor(
        handle=LayoutHandle(owner_id=OWNER, number=number),
        tier=tier,
        resource_id=resource_id,
        config=LayoutConfig(num_blocks=8, num_layers=2, outer_dim=2, page_size=16, inner_dim=128, num_heads=8),
        kind=LayoutKind.LAYER_SEPARATE_BLOCK_SECOND,
        axis_order=AxisOrder.HND,
        storage=StorageKind.DEVICE,
        device_ordinal=0,
        fingerprint="ab" * 32,
    )


def part(rank: int = 1) -> ParallelismDescriptor:
    return ParallelismDescriptor(
        tp_size=2,
        rank=rank,
        global_extents=((Axis.HEAD_COUNT, 16), (Axis.LAYER, 2)),
        layer_stop=2,
    )


WORKER = WorkerMetadata(
    instance_id=GROUP,
    epoch=3,
    rank=1,
    owner_id=OWNER,
    incarnation=2**64 - 1,
    address="127.0.0.1:50051",
    layouts=(layout(Tier.DEVICE, 0), layout(Tier.HOST, 1), layout(Tier.DISK, 2)),
    engines=(values.export("nixl", bytes(range(256))), values.export("grpc", b"")),
    parallelism=part(),
)

OLD_BYTES = "0801122436663164376135322d306237652d346136632d396333642d3266346535613662376338642001"
"""Version, instance id and rank."""


def sent(worker: WorkerMetadata) -> WorkerMetadata:
    wire = metadata_messages.metadata_message(worker).SerializeToString()
    return metadata_messages.metadata_of(pb.WorkerMetadata.FromString(wire))


@pytest.mark.fact("T61", "T67", "T69", "T77")
def test_a_worker_keeps_address_engines_handles_and_tiers_in_order() -> None:
    told = sent(WORKER)
    assert told == WORKER
    assert [one.tier for one in told.layouts] == [Tier.DEVICE, Tier.HOST, Tier.DISK]
    assert [one.handle.number for one in told.layouts] == [0, 1, 2]
    assert [(one.name, one.data) for one in told.engines] == [("nixl", bytes(range(256))), ("grpc", b"")]


@pytest.mark.fact("T62")
def test_what_is_absent_stays_absent() -> None:
    bare = replace(WORKER, layouts=(), engines=(), parallelism=None, resources=(), mode=None, address="")
    assert sent(bare) == bare


@pytest.mark.fact("T63")
def test_bytes_without_later_fields_read_with_all_of_them_empty() -> None:
    told = metadata_messages.metadata_of(pb.WorkerMetadata.FromString(bytes.fromhex(OLD_BYTES)))
    assert (told.instance_id, told.rank) == (GROUP, 1)
    assert (told.epoch, told.address, told.layouts, told.engines) == (0, "", (), ())
    assert (told.parallelism, told.resources, told.mode) == (None, (), None)


@pytest.mark.fact("T64")
def test_bytes_with_parallelism_but_no_placement_keep_the_one_and_leave_the_other_empty() -> None:
    old = OLD_BYTES + "521608021001180120052a04080510102a04080210023802"
    told = metadata_messages.metadata_of(pb.WorkerMetadata.FromString(bytes.fromhex(old)))
    assert told.parallelism == part()
    assert (told.resources, told.mode) == ((), None)


@pytest.mark.fact("T65")
def test_two_resources_leave_the_primary_one_as_it_is() -> None:
    other = replace(part(), global_extents=((Axis.LAYER, 9),), layer_stop=9)
    both = replace(
        WORKER,
        layouts=(layout(Tier.DEVICE, 0), layout(Tier.HOST, 1), layout(Tier.DEVICE, 2, resource_id=1)),
        resources=(
            ResourceParallelism(resource_id=0, parallelism=part()),
            ResourceParallelism(resource_id=1, parallelism=other),
        ),
    )
    told = sent(both)
    assert told == both
    assert told.parallelism == part()


def resource(resource_id: int, rank: int = 1) -> ResourceParallelism:
    return ResourceParallelism(resource_id=resource_id, parallelism=part(rank))


WRONG_WORKERS: dict[str, tuple[WorkerMetadata, str]] = {
    "duplicate resources": (replace(WORKER, resources=(resource(0), resource(0))), "resources"),
    "a gap between resources": (replace(WORKER, resources=(resource(0), resource(2))), "resources"),
    "another primary part": (replace(WORKER, parallelism=None, resources=(resource(0),)), "resources"),
    "the part of another rank": (replace(WORKER, rank=0), "parallelism.rank"),
    "tiers out of order": (replace(WORKER, layouts=(layout(Tier.HOST, 0), layout(Tier.DEVICE, 1))), "layouts"),
    "a place twice": (replace(WORKER, layouts=(layout(Tier.HOST, 0), layout(Tier.HOST, 1))), "layouts"),
    "a handle twice": (replace(WORKER, layouts=(layout(Tier.DEVICE, 0), layout(Tier.HOST, 0))), "layouts"),
    "another's handle": (replace(WORKER, owner_id=1), "layouts[0].handle"),
    "a layout of objects": (replace(WORKER, layouts=(layout(Tier.OBJECT, 0),)), "layouts[0].tier"),
    "an engine twice": (replace(WORKER, engines=WORKER.engines[:1] * 2), "engines"),
    "no UUID": (replace(WORKER, instance_id=GROUP.upper()), "instance_id"),
    "a negative epoch": (replace(WORKER, epoch=-1), "epoch"),
    "no address": (replace(WORKER, address="somewhere"), "address"),
}


@pytest.mark.fact("T65")
@pytest.mark.parametrize("name", WRONG_WORKERS)
def test_a_worker_that_contradicts_itself_is_refused(name: str) -> None:
    worker, path = WRONG_WORKERS[name]
    with pytest.raises(BadRequest) as caught, sent_by("rank 1"):
        sent(worker)
    assert caught.value.metadata["field"] == path
    assert caught.value.message.startswith(f"{path}, as rank 1 sent it, can't be taken")


def changed(change: Callable[[pb.WorkerMetadata], Any]) -> pb.WorkerMetadata:
    message = metadata_messages.metadata_message(WORKER)
    change(message)
    return message


WRONG_MESSAGES: dict[str, pb.WorkerMetadata] = {
    "layouts[1].kind": changed(lambda m: m.layouts[1].ClearField("kind")),
    "layouts[1].axis_order": changed(lambda m: m.layouts[1].ClearField("axis_order")),
    "layouts[2].storage": changed(lambda m: m.layouts[2].ClearField("storage")),
    "layouts[0].config": changed(lambda m: setattr(m.layouts[0].config, "page_size", 3)),
    "layouts[0].handle": changed(lambda m: m.layouts[0].ClearField("handle")),
    "layouts[0].fingerprint": changed(lambda m: m.layouts[0].ClearField("fingerprint")),
    "parallelism.tp_size": changed(lambda m: m.parallelism.ClearField("tp_size")),
    "parallelism.rank": changed(lambda m: setattr(m.parallelism, "rank", 2)),
    "parallelism.shard_axis": changed(lambda m: m.parallelism.ClearField("shard_axis")),
    "parallelism.layer_stop": changed(lambda m: m.parallelism.ClearField("layer_stop")),
    "parallelism.global_extents[0].axis": changed(
        lambda m: setattr(m.parallelism.global_extents[0], "axis", pb.AXIS_BLOCK)
    ),
    "parallelism.global_extents[1].size": changed(lambda m: m.parallelism.global_extents[1].ClearField("size")),
    "parallelism.global_extents": changed(
        lambda m: m.parallelism.global_extents.add().CopyFrom(m.parallelism.global_extents[0])
    ),
    "engines[1].name": changed(lambda m: m.engines[1].ClearField("name")),
    "mode": changed(lambda m: setattr(m, "mode", 9)),
}


@pytest.mark.parametrize("path", WRONG_MESSAGES)
def test_a_wrong_field_of_a_worker_is_named_by_its_path(path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        metadata_messages.metadata_of(WRONG_MESSAGES[path])
    assert caught.value.metadata["field"] == path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("version", changed(lambda m: setattr(m, "version", 2))),
        ("version", changed(lambda m: m.ClearField("version"))),
        ("layouts[1].version", changed(lambda m: setattr(m.layouts[1], "version", 2))),
    ],
)
def test_another_version_is_incompatible(path: str, message: pb.WorkerMetadata) -> None:
    with pytest.raises(Incompatible) as caught:
        metadata_messages.metadata_of(message)
    assert caught.value.metadata["field"] == path


def test_a_damaged_export_is_noticed_before_an_engine_reads_it() -> None:
    damaged = changed(lambda m: setattr(m.engines[0], "data", b"other bytes"))
    with pytest.raises(Checksum) as caught:
        metadata_messages.metadata_of(damaged)
    assert caught.value.metadata["name"] == "nixl"
    assert caught.value.metadata["field"] == "engines[0].data"


def test_an_alignment_of_0_means_1() -> None:
    message = layout_messages.config_message(WORKER.layouts[0].config)
    message.ClearField("alignment_bytes")
    assert layout_messages.config_of(message) == WORKER.layouts[0].config


@given(values.workers())
def test_answers_of_one_worker_are_the_same_after_the_wire(worker: WorkerMetadata) -> None:
    configured = Configured(metadata=(worker,), disk_recovered=True)
    assert group_messages.configured_of(group_messages.configured_message(configured)) == configured
    imported = Imported(layouts=tuple(one.handle for one in worker.layouts), engine="shm")
    assert group_messages.imported_of(group_messages.imported_message(imported)) == imported


def configuration(**changes: Any) -> pb.ConfigureLayoutsRequest:
    message = pb.ConfigureLayoutsRequest(
        instance_id=GROUP,
        world_size=2,
        mode=pb.PARALLELISM_MODE_REPLICATED_DATA,
        layouts=[pb.LayoutRequest(tier=pb.TIER_HOST, num_blocks=4)],
        object_store=pb.ObjectStore(kind="file", bucket="objects"),
    )
    message.MergeFrom(pb.ConfigureLayoutsRequest(**changes))
    return message


def test_what_a_configuration_leaves_out_has_its_default() -> None:
    config = group_messages.config_of(configuration())
    assert config.layouts[0].kind is LayoutKind.FULLY_CONTIGUOUS
    assert config.layouts[0].axis_order is None
    assert config.object_store
    assert (config.object_store.max_requests, config.object_store.request_timeout_s) == (16, 30.0)
    without = configuration()
    without.ClearField("object_store")
    assert group_messages.config_of(without).object_store is None


WRONG_CONFIGURATIONS: dict[str, pb.ConfigureLayoutsRequest] = {
    "rank": configuration(rank=2),
    "instance_id": configuration(instance_id="x"),
    "mode": configuration(mode=7),
    "layouts": configuration(layouts=[pb.LayoutRequest(tier=pb.TIER_HOST, num_blocks=5)]),
    "layouts[1].tier": configuration(layouts=[pb.LayoutRequest(tier=pb.TIER_DEVICE, num_blocks=5)]),
    "layouts[1].num_blocks": configuration(layouts=[pb.LayoutRequest(tier=pb.TIER_DISK)]),
    "disk_folder": configuration(disk_folder="a/../../b"),
    "object_store.kind": configuration(object_store=pb.ObjectStore(kind="ftp")),
    "object_store.bucket": configuration(object_store=pb.ObjectStore(bucket="/etc")),
}


@pytest.mark.parametrize("path", WRONG_CONFIGURATIONS)
def test_a_wrong_configuration_is_named_by_its_path(path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        group_messages.config_of(WRONG_CONFIGURATIONS[path])
    assert caught.value.metadata["field"] == path


def connection(*workers: WorkerMetadata, **changes: Any) -> pb.ConnectRemoteRequest:
    fields: dict[str, Any] = {
        "instance_id": GROUP,
        "remote_epoch": 3,
        "ranks": map(metadata_messages.metadata_message, workers),
    }
    return pb.ConnectRemoteRequest(**(fields | changes))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ranks", connection()),
        ("ranks", connection(WORKER, WORKER)),
        ("ranks[0]", connection(WORKER, remote_epoch=4)),
        ("ranks[0]", connection(WORKER, instance_id=GROUP.replace("6f", "7f"))),
        ("engines[0].name", connection(WORKER, engines=[""])),
    ],
)
def test_a_wrong_connection_is_refused(path: str, message: pb.ConnectRemoteRequest) -> None:
    with pytest.raises(AyniError) as caught:
        group_messages.connect_of(message)
    assert caught.value.metadata["field"] == path
