"""A worker behind gRPC: what is sent, what an answer and a refusal become, and what is not sent at all."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ayni.blocks.calls import call_id
from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutHandle, LocalLayout, Tier
from ayni.blocks.metadata import GroupConfig
from ayni.blocks.transfers import (
    Bounce,
    ObjectKeys,
    PullPlan,
    RemoteBlocks,
    TransferOptions,
)
from ayni.blocks.worker import Notification
from ayni.errors import AyniError, StaleEpoch, TokenRefused, Unsupported
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import SHAPE, TOKEN, served
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.block_groups import keys, soon
from tests.support.stub_calls import DEVICE, GROUP, WIDE, copy, pair, refused, run


def test_every_option_arrives() -> None:
    options = TransferOptions(
        layers=(0, 1),
        bounce=Bounce(layout=LayoutHandle(owner_id=1, number=2), blocks=as_ids([3])),
        source_axis_order=AxisOrder.HND,
        destination_axis_order=AxisOrder.NHD,
        write_notification=0,
        engine="array",
        checksum=True,
        route="a route",
        timeout_s=5.0,
        drain_s=0.75,
    )

    async def test() -> None:
        async with pair() as (worker, stub):
            await soon(copy(stub, options), "a copy")
            assert worker.options
            assert worker.options.bounce
            assert worker.options.bounce.blocks.tolist() == [3]
            assert 4.0 < worker.options.timeout_s < 5.01
            assert replace(worker.options, bounce=None, timeout_s=5.0) == replace(options, bounce=None)

    run(test())


def test_every_transfer_has_its_own_call() -> None:
    async def test() -> None:
        async with pair() as (worker, stub):
            await soon(copy(stub), "a copy")
            stored = ObjectKeys(keys=tuple(keys(1, 2)))
            offloaded = await soon(stub.execute_remote_offload(DEVICE, [1, 2], stored), "an offload")
            assert offloaded.outcomes[0].rank == 3
            await soon(stub.execute_remote_onboard(stored, DEVICE, [3, 4]), "an onboard")
            await refused(stub.execute_remote_onboard_for_instance(GROUP, Tier.HOST, [0], DEVICE, [0]), "UNKNOWN_PEER")
            plan = PullPlan(
                instance_id=GROUP,
                remote_tier=Tier.HOST,
                source_blocks=as_ids([0]),
                destination=DEVICE,
                destination_blocks=as_ids([0]),
                shards=(),
            )
            await refused(stub.execute_remote_pull(plan), "UNKNOWN_PEER")
            assert worker.calls == [
                "execute_local_transfer",
                "execute_remote_offload",
                "execute_remote_onboard",
                "execute_remote_pull",
                "execute_remote_pull",
            ]

    run(test())


def test_a_group_call_is_named_in_the_worker_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with pair() as (_, stub):
            name = call_id.set("call-7")
            notification = copy(stub)
            call_id.reset(name)
            await soon(notification, "a copy")
            await soon(copy(stub), "a copy outside of a group call")

    with caplog.at_level(logging.DEBUG, "worker_agent.service"):
        run(test())
    lines = [record.getMessage() for record in caplog.records if "group call" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("ExecuteLocalTransfer from 127.0.0.1:")
    assert lines[0].endswith(" belongs to group call call-7")


def test_calls_carry_the_epoch_of_the_configuration() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        async with served(worker) as address:
            stub, other = (GrpcBlockWorker.dial(address, TOKEN, rank) for rank in (3, 3))
            config = GroupConfig(epoch=2, instance_id=GROUP, rank=3, world_size=4)
            await soon(other.configure_layouts(config), "a configuration")
            await soon(other.export_metadata(), "an export")
            await soon(stub.configure_layouts(replace(config, epoch=3)), "a newer configuration")
            with pytest.raises(StaleEpoch) as caught:
                await soon(other.export_metadata(), "an export of an older epoch")
            assert caught.value.metadata == {"epoch": "2", "current_epoch": "3"}
            await refused(copy(other), "STALE_EPOCH")
            with pytest.raises(StaleEpoch):
                await soon(other.has_blocks(DEVICE, keys(1)), "a question of an older epoch")
            await soon(copy(stub), "a copy of the newest epoch")
            await soon(copy(GrpcBlockWorker.dial(address, TOKEN)), "a copy of a caller that numbers no epochs")
            for one in (stub, other):
                await one.close()

    run(test())


def test_a_wrong_token_is_a_refusal() -> None:
    async def test() -> None:
        async with served(ArrayWorker(World(), SHAPE)) as address:
            stub = GrpcBlockWorker.dial(address, "wrong", 3)
            with pytest.raises(TokenRefused):
                await soon(stub.export_metadata(), "an export")
            await refused(copy(stub), "TOKEN_REFUSED")
            await stub.close()

    run(test())


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (lambda stub: stub.execute_local_transfer(DEVICE, DEVICE, [-1], [0]), "BAD_REQUEST"),
        (lambda stub: stub.execute_local_transfer(DEVICE, DEVICE, [0], [0.5]), "BAD_REQUEST"),
        (lambda stub: stub.execute_local_transfer(LocalLayout(tier=Tier.HOST, resource_id=-1), DEVICE, [0], [1]), None),
        (lambda stub: stub.execute_remote_onboard(ObjectKeys(keys=(b"short",)), DEVICE, [0]), "BAD_REQUEST"),
        (lambda stub: stub.execute_remote_offload(DEVICE, [0], RemoteBlocks(layout=WIDE, blocks=as_ids([1]))), None),
    ],
)
def test_what_can_not_be_sent_is_refused_here(start: Callable[[Any], Notification], reason: str | None) -> None:
    async def test() -> None:
        async with pair() as (worker, stub):
            await refused(start(stub), reason or "BAD_REQUEST")
            assert worker.calls == []

    run(test())


def test_a_request_that_the_transport_would_not_carry_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator_service.worker_calls.MAX_REQUEST_BYTES", 1000)

    async def test() -> None:
        async with pair() as (worker, stub):
            ids = range(0, 1000, 2)
            outcome = await refused(stub.execute_local_transfer(DEVICE, DEVICE, ids, ids), "TOO_LARGE")
            assert [f.block for f in outcome.failures] == list(ids)
            assert worker.calls == []

    run(test())


def test_a_key_that_can_not_be_sent_is_refused_here() -> None:
    async def test() -> None:
        async with pair() as (worker, stub):
            with pytest.raises(AyniError, match="key 1 has 23 bytes"):
                await stub.has_blocks(DEVICE, [bytes(24), bytes(23)])
            with pytest.raises(AyniError, match="imports one worker at a time"):
                await stub.import_metadata([])
            assert worker.calls == []

    run(test())


def test_a_worker_without_blocks_is_unsupported() -> None:
    async def test() -> None:
        async with served(None) as address:
            stub = GrpcBlockWorker.dial(address, TOKEN, 3)
            with pytest.raises(Unsupported, match="this worker moves no blocks"):
                await soon(stub.export_metadata(), "an export")
            await refused(copy(stub), "UNSUPPORTED")
            await stub.close()

    run(test())
