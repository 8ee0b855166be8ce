"""One bucket's stream, against a scripted call: no socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from ayni.errors import BadChunk, BadRequest, StepVoided
from ayni.frames import ChunkView, decode_frame, encode_chunk
from ayni.rpc import error_from, status_of
from ayni.tensors import TensorSpec, decode
from ayni.v1 import coordinator_pb2 as pb
from worker_agent.exchange import Contribution, Outcome, Traffic, exchange
from worker_agent.faults import TransportBroken

BEGIN = b"\x0a\x00"
ACCEPTED = pb.GradientResponse(accepted=pb.RoundAccepted(chunk_bytes=8)).SerializeToString()


def complete(**fields: Any) -> bytes:
    return pb.GradientResponse(complete=pb.RoundComplete(**{"total_weight": 2, **fields})).SerializeToString()


def mean_chunk(offset: int, *values: float) -> bytes:
    return encode_chunk(2, offset, 0, np.array(values, np.float32).tobytes())


def status_error(code: grpc.StatusCode, details: str = "") -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=details)


def refusal(error: StepVoided) -> aio.AioRpcError:
    status = status_of(error)
    trailing = aio.Metadata(*status.trailing_metadata)
    return aio.AioRpcError(status.code, aio.Metadata(), trailing, details=status.details)


class ScriptedCall:
    """A call whose other side is a function: told of each frame written, it says what to read next."""

    def __init__(self, react: Callable[[list[bytes]], list[Any]], break_writes_after: int = 1000) -> None:
        self.written: list[bytes] = []
        self.half_closed = asyncio.Event()
        self.cancelled = False
        self._react = react
        self._limit = break_writes_after
        self._to_read: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(0)
        if len(self.written) >= self._limit:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.written.append(frame)
        for item in self._react(self.written):
            self._to_read.put_nowait(item)

    async def read(self) -> Any:
        item = await self._to_read.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def done_writing(self) -> None:
        self.half_closed.set()

    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        self.cancelled = True
        return True


def echo(num_chunks: int, reply: Callable[[ChunkView], list[bytes]], end: bytes) -> Callable[[list[bytes]], list[Any]]:
    """Accepts, answers each chunk, and ends after the given number of chunks."""

    def react(written: list[bytes]) -> list[Any]:
        last = [end, aio.EOF] if len(written) == num_chunks + 1 else []
        if len(written) == 1:
            return [ACCEPTED, *last]
        content = decode_frame(written[-1])[1]
        assert isinstance(content, ChunkView)
        return [*reply(content), *last]

    return react


def contribution(*parts: np.ndarray | None, dtype: str = "float32", num_elements: int = 5) -> Contribution:
    return Contribution(
        name="flat of step 3",
        begin=BEGIN,
        spec=TensorSpec(dtype=dtype, num_elements=num_elements),
        parts=parts,
        out=np.full(num_elements, np.nan, np.float32),
    )


def run(call: ScriptedCall, offer: Contribution, traffic: Traffic | None = None) -> Outcome:
    async def bounded() -> Outcome:
        async with asyncio.timeout(10):
            return await exchange(lambda part_bytes: call, offer, traffic or Traffic())  # type: ignore[arg-type, return-value]

    return asyncio.run(bounded())


def chunks_of(call: ScriptedCall) -> list[tuple[int, int, bytes]]:
    contents = [decode_frame(frame)[1] for frame in call.written[1:]]
    assert all(isinstance(content, ChunkView) for content in contents)
    return [(c.offset_bytes, c.part, bytes(c.data)) for c in contents if isinstance(c, ChunkView)]


VALUES = np.arange(5, dtype=np.float32)


def test_one_part_goes_out_in_chunks_and_the_mean_comes_in():
    def doubled(chunk: ChunkView) -> list[bytes]:
        return [encode_chunk(2, chunk.offset_bytes, 0, (decode(chunk.data, "float32") * 2).tobytes())]

    end = complete(num_contributors=3, total_weight=7, global_loss=0.5, num_correct=4, num_predictions=6)
    call, offer, traffic = ScriptedCall(echo(3, doubled, end)), contribution(VALUES), Traffic()
    outcome = run(call, offer, traffic)
    assert outcome == Outcome(num_contributors=3, total_weight=7, global_loss=0.5, num_correct=4, num_predictions=6)
    assert call.written[0] == BEGIN
    assert chunks_of(call) == [
        (0, 0, VALUES[:2].tobytes()),
        (8, 0, VALUES[2:4].tobytes()),
        (16, 0, VALUES[4:].tobytes()),
    ]
    assert offer.out is not None
    assert offer.out.tolist() == [0, 2, 4, 6, 8]
    assert call.half_closed.is_set()
    assert traffic.sent_bytes == sum(map(len, call.written))
    assert traffic.received_bytes == len(ACCEPTED) + len(end) + sum(map(len, call.written[1:]))


def test_parts_alternate_and_a_part_without_weight_sends_nothing():
    def first_part(chunk: ChunkView) -> list[bytes]:
        return [encode_chunk(2, chunk.offset_bytes, 0, chunk.data)] if chunk.part == 0 else []

    call = ScriptedCall(echo(6, first_part, complete()))
    run(call, contribution(VALUES, None, VALUES * 10))
    assert [(offset, part) for offset, part, _ in chunks_of(call)] == [(0, 0), (0, 2), (8, 0), (8, 2), (16, 0), (16, 2)]
    assert chunks_of(call)[1][2] == (VALUES[:2] * 10).tobytes()


def test_bfloat16_on_the_wire():
    call = ScriptedCall(echo(2, lambda c: [encode_chunk(2, c.offset_bytes, 0, c.data)], complete()))
    offer = contribution(np.array([1.0, 1.00390625, -3.0, 0.1, 2.5], np.float32), dtype="bfloat16")
    run(call, offer)
    assert [len(data) for _, _, data in chunks_of(call)] == [8, 2]
    assert offer.out is not None
    assert offer.out.tolist() == [1.0, 1.0, -3.0, 0.10009765625, 2.5]


def test_a_total_weight_of_zero_gives_zeros_and_no_loss():
    outcome_of = ScriptedCall(echo(0, lambda c: [], complete(total_weight=0)))
    offer = contribution(None)
    assert run(outcome_of, offer).global_loss is None
    assert outcome_of.written == [BEGIN]
    assert offer.out is not None
    assert offer.out.tolist() == [0] * 5


def test_nothing_is_sent_before_the_contribution_is_accepted():
    call = ScriptedCall(lambda written: [refusal(StepVoided("given up", step=3))] if len(written) == 1 else [])
    with pytest.raises(aio.AioRpcError) as caught:
        run(call, contribution(VALUES))
    assert type(error_from(caught.value)) is StepVoided
    assert call.written == [BEGIN]


def test_the_mean_is_read_while_chunks_are_still_to_be_sent():
    async def scenario() -> None:
        read = asyncio.Event()

        class Stubborn(ScriptedCall):
            async def write(self, frame: bytes) -> None:
                if len(self.written) == 3:
                    await read.wait()
                await super().write(frame)

            async def read(self) -> Any:
                item = await super().read()
                if item == mean_chunk(0, 0, 1):
                    read.set()
                return item

        call = Stubborn(echo(3, lambda c: [encode_chunk(2, c.offset_bytes, 0, c.data)], complete()))
        async with asyncio.timeout(10):
            await exchange(lambda part_bytes: call, contribution(VALUES), Traffic())  # type: ignore[arg-type, return-value]

    asyncio.run(scenario())


@pytest.mark.parametrize("broken_writer", [False, True])
def test_a_refusal_in_the_middle_arrives_as_it_was_given(broken_writer):
    voided = refusal(StepVoided("step 3 attempt 0 was given up: ant left", step=3))
    call = ScriptedCall(
        lambda written: [ACCEPTED, voided] if len(written) == 1 else [], break_writes_after=2 if broken_writer else 1000
    )
    with pytest.raises(aio.AioRpcError) as caught:
        run(call, contribution(VALUES))
    error = error_from(caught.value)
    assert type(error) is StepVoided
    assert "ant left" in error.message
    assert call.cancelled


def test_a_lost_status_stays_a_status_of_the_transport():
    call = ScriptedCall(
        lambda written: [ACCEPTED, status_error(grpc.StatusCode.INTERNAL, "lost")] if len(written) == 1 else []
    )
    with pytest.raises(aio.AioRpcError) as caught:
        run(call, contribution(VALUES))
    assert error_from(caught.value) is None


@pytest.mark.parametrize(
    ("frames", "error", "words"),
    [
        ([aio.EOF], TransportBroken, "ended the stream of flat of step 3 before"),
        ([ACCEPTED, mean_chunk(0, 1, 2), aio.EOF], TransportBroken, "before it was complete"),
        ([mean_chunk(0, 1, 2)], BadRequest, "frame kind 2 out of order"),
        ([ACCEPTED, ACCEPTED], BadRequest, "frame kind 1 out of order"),
        ([ACCEPTED, mean_chunk(8, 1, 2)], BadChunk, "wrong offset"),
        ([ACCEPTED, mean_chunk(0, 1, 2), complete()], BadChunk, "expected 20 in all, received 8"),
        ([ACCEPTED, mean_chunk(0, 1, 2, 3, 4, 5, 6)], BadChunk, "at most 20, received 24"),
        ([ACCEPTED, b"\xff\xff"], BadRequest, "cut short"),
        ([pb.GradientResponse(accepted=pb.RoundAccepted(chunk_bytes=3)).SerializeToString()], BadRequest, "3 bytes"),
    ],
)
def test_a_coordinator_that_speaks_out_of_turn_is_not_believed(frames, error, words):
    call = ScriptedCall(lambda written: frames if len(written) == 1 else [])
    with pytest.raises(error, match=words):
        run(call, contribution(VALUES))
    assert call.cancelled


def test_a_stopped_exchange_ends_its_call():
    async def scenario() -> ScriptedCall:
        call = ScriptedCall(lambda written: [ACCEPTED] if len(written) == 1 else [])
        task = asyncio.create_task(exchange(lambda part_bytes: call, contribution(VALUES), Traffic()))  # type: ignore[arg-type, return-value]
        await call.half_closed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return call

    assert asyncio.run(scenario()).cancelled
