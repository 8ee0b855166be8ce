"""A worker behind gRPC that is lost, silent, given up or odd: no block may count as done, and the end comes in time."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, PresenceState
from ayni.blocks.transfers import (
    TransferOptions,
    TransferOutcome,
    TransferResult,
)
from ayni.channels import open_channel
from ayni.errors import Deadline
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.array_groups import SHAPE, TOKEN, far, served
from tests.support.array_layouts import World
from tests.support.array_worker import ArrayWorker
from tests.support.block_groups import keys, soon
from tests.support.stub_calls import DEVICE, SHORT, copy, failed, now, pair, run, until


@pytest.mark.parametrize("options", [SHORT, replace(SHORT, drain_s=0.5)])
def test_nobody_there_is_a_lost_peer(options: TransferOptions) -> None:
    async def test() -> None:
        stub = GrpcBlockWorker.dial("127.0.0.1:1", TOKEN, 3)
        began = now()
        notification = copy(stub, options)
        outcome = await failed(notification, "PEER_LOST", 2.0)
        assert "worker 3 at 127.0.0.1:1 was lost during ExecuteLocalTransfer" in outcome.failures[0].failure.message
        await soon(notification.quiesced(), "the time after which no byte lands", 3.0)
        assert now() - began >= options.timeout_s + options.drain_s - 0.01
        with pytest.raises(ConnectionError, match="ExportMetadata to worker 3 at 127"):
            await soon(stub.export_metadata(), "an export")
        await stub.close()

    run(test())


def test_calls_about_keys_answer_for_each_key_when_nobody_is_there() -> None:
    async def test() -> None:
        stub = GrpcBlockWorker.dial("127.0.0.1:1", TOKEN, 3)
        found = await soon(stub.has_blocks(DEVICE, keys(1, 2)), "a question")
        assert [one.state for one in found.presences] == [PresenceState.UNKNOWN] * 2
        put = await soon(stub.put_blocks(DEVICE, [1, 2], keys(1, 2)), "a put")
        got = await soon(stub.get_blocks(keys(1, 2), DEVICE, [1, 2]), "a get")
        for report in (put, got):
            assert [one.state for one in report.outcomes] == [OutcomeState.FAILED] * 2
        failures = [one.failure for one in found.presences]
        failures += [one.failure for report in (put, got) for one in report.outcomes]
        assert {failure and failure.reason for failure in failures} == {"PEER_LOST"}
        await stub.close()

    run(test())


def test_a_worker_that_is_stopped_in_the_middle_is_a_lost_peer() -> None:
    async def test() -> None:
        worker = ArrayWorker(World(), SHAPE)
        worker.go.clear()
        async with served(worker) as address:
            stub = GrpcBlockWorker.dial(address, TOKEN, 3)
            notification = copy(stub, TransferOptions(timeout_s=1.0, drain_s=0.1))
            await until(lambda: worker.calls == ["execute_local_transfer"])
        await failed(notification, "PEER_LOST", 1.0)
        await soon(notification.quiesced(), "the time after which no byte lands", 2.0)
        await stub.close()

    run(test())


class Silent(ArrayWorker):
    """Answers nothing, and does not care about deadlines."""

    def execute_local_transfer(self, *_: object, **__: object) -> Any:
        return self

    async def result(self) -> TransferResult:
        await asyncio.Event().wait()
        raise AssertionError

    def cancel(self) -> None:
        self.calls.append("cancel")

    async def export_metadata(self) -> Any:
        await asyncio.Event().wait()

    async def put_blocks(self, *_: object, **__: object) -> Any:
        await asyncio.Event().wait()


def test_a_worker_that_does_not_answer_has_reached_the_deadline() -> None:
    async def test() -> None:
        worker = Silent(World(), SHAPE)
        async with served(worker) as address:
            stub = GrpcBlockWorker.dial(address, TOKEN, 3)
            began = now()
            outcome = await failed(copy(stub), "DEADLINE", SHORT.timeout_s + 0.5)
            assert SHORT.timeout_s <= now() - began < SHORT.timeout_s + 0.5
            assert outcome.failures[0].failure.message.endswith("did not answer ExecuteLocalTransfer within 0.6 s")
            await until(lambda: worker.calls == ["cancel"])
            put = await soon(stub.put_blocks(DEVICE, [1], keys(1), timeout_s=0.1), "a put", 1.0)
            assert put.outcomes[0].failure
            assert put.outcomes[0].failure.reason == "DEADLINE"
            await stub.close()
            impatient = GrpcBlockWorker(open_channel(address, TOKEN), 3, timeout_s=0.1)
            with pytest.raises(Deadline, match=r"did not answer ExportMetadata within 0\.1 s"):
                await soon(impatient.export_metadata(), "an export", 2.0)
            await impatient.close()

    run(test())


@pytest.mark.parametrize("at_once", [True, False])
def test_cancelling_stops_the_worker(at_once: bool) -> None:
    async def test() -> None:
        async with pair() as (worker, stub):
            worker.go.clear()
            notification = copy(stub)
            if not at_once:
                await until(lambda: bool(worker._busy))
            notification.cancel()
            await failed(notification, "CANCELLED", 0.3)
            await until(lambda: not worker._busy)
            notification.cancel()
            worker.go.set()
            await soon(copy(stub), "the next copy")
            await soon(notification.quiesced(), "the time after which no byte lands", 2.0)
            assert not worker.arrays[DEVICE].any()

    run(test())


def test_closing_ends_what_is_under_way() -> None:
    async def test() -> None:
        async with pair() as (worker, stub):
            worker.go.clear()
            notification = copy(stub)
            await until(lambda: bool(worker._busy))
            await stub.close()
            await failed(notification, "CANCELLED", 0.3)
            with pytest.raises(Exception, match="closed"):
                await soon(stub.export_metadata(), "an export after the end")

    run(test())


class Odd(ArrayWorker):
    """Gives answers that fit no question."""

    answer: Any = None

    def execute_local_transfer(self, *_: object, **__: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self

    async def result(self) -> TransferResult:
        return TransferResult(outcomes=(self.answer,))

    async def get_blocks(self, *_: object, **__: object) -> KeyReport:
        return KeyReport(outcomes=(KeyOutcome(state=OutcomeState.DONE),))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (TransferOutcome(rank=0, num_done=1), "BAD_REQUEST"),
        (TransferOutcome(rank=0, num_done=3), "BAD_REQUEST"),
        (RuntimeError("a bug"), "PEER_LOST"),
    ],
)
def test_an_answer_that_fits_no_question_makes_no_block_done(answer: Any, reason: str) -> None:
    async def test() -> None:
        worker = Odd(World(), SHAPE)
        worker.answer = answer
        async with far(worker, 3) as stub:
            await failed(copy(stub), reason, 2.0)
            got = await soon(stub.get_blocks(keys(1, 2), DEVICE, [1, 2]), "a get")
            assert [one.state for one in got.outcomes] == [OutcomeState.FAILED] * 2

    run(test())
