"""A coordinator for one worker that does as it is told, so that it can fail in ways that the real one does not.

It runs on the clients' own event loop. By default every contribution is answered with its mean (one part, one chunk
size) and every commit with fixed values; a test replaces what it wants to break. A worker that joins again, with
another nonce, is another member: the first is worker 7, the next worker 8.
"""
# ruff: noqa: N802 -- methods are named after calls

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from ayni.errors import AyniError
from ayni.frames import ChunkView, decode_frame, encode_chunk
from ayni.servers import TokenInterceptor, add_service, bind, make_server
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
from worker_agent import bridge

TOKEN = "a-token-for-tests-only"
SERVICE = "ayni.v1.CoordinatorService"
RAW = frozenset({"Gradient", "BlockGradient", "NonBlockGradient"})
ACCEPTED = pb.GradientResponse(accepted=pb.RoundAccepted(chunk_bytes=1 << 16)).SerializeToString()

Handler = Callable[[Any], Awaitable[None]]
Frame = pb.ShardAssignmentResponse | AyniError | None
"""What the assignment stream says next; None ends it without a word."""


def lease(step: int = 0, attempt: int = 0, **changes: Any) -> pb.ShardAssignmentResponse:
    """An assignment of one micro-batch with four samples."""
    fields: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "epoch": 1 + attempt,
        "lease_id": 10 * step + attempt + 1,
        "kind": pb.STEP_KIND_TRAIN,
        "microbatch_stop": 1,
        "num_microbatches": 1,
        "num_samples": 4,
        "shard_stop": 4,
        "world_size": 1,
    }
    return pb.ShardAssignmentResponse(assignment=pb.Assignment(**{**fields, **changes}))


def revoked(lease_id: int, reason: str = "another worker was faster") -> pb.ShardAssignmentResponse:
    return pb.ShardAssignmentResponse(revoked=pb.Revoked(lease_id=lease_id, reason=reason))


def shutdown() -> pb.ShardAssignmentResponse:
    return pb.ShardAssignmentResponse(shutdown=pb.Shutdown(reason="the last step is committed", finished=True))


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromTimedelta(timedelta(seconds=seconds))
    return result


class EchoCoordinator:
    """Answers one worker."""

    def __init__(self, lease_seconds: float = 1.0, heartbeat_seconds: float = 0.05) -> None:
        self.calls: Counter[str] = Counter()
        self.joins: list[pb.JoinRequest] = []
        self.openings: list[pb.ShardAssignmentRequest] = []
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.leaves: list[pb.LeaveRequest] = []
        self.begins: list[pb.RoundBegin] = []
        self.stored_steps = 0
        self.commits: list[pb.CommitStepRequest] = []
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.on: dict[str, Handler] = {}
        """What a call does first, by method; it may abort the call."""
        self.gradient: Callable[[Any], Awaitable[None]] = self.echo
        self._lease, self._heartbeat = duration(lease_seconds), duration(heartbeat_seconds)
        self._numbers: dict[str, int] = {}

    def say(self, frame: Frame) -> None:
        """Puts a frame on the assignment stream; from any thread."""
        bridge.shared().call_soon(self.frames.put_nowait, frame)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        self.joins.append(request)
        await self._begin("Join", context)
        number = self._numbers.setdefault(request.join_nonce, 7 + len(self._numbers))
        return pb.JoinResponse(
            worker_id=number,
            session=f"secret-{number}",
            total_workers=1,
            lease=self._lease,
            heartbeat_interval=self._heartbeat,
            wire_type=tensor_pb2.DTYPE_FLOAT32,
        )

    async def ShardAssignment(self, request: pb.ShardAssignmentRequest, context: Any) -> AsyncIterator[Any]:
        self.openings.append(request)
        await self._begin("ShardAssignment", context)
        while (frame := await self.frames.get()) is not None:
            if isinstance(frame, AyniError):
                raise frame
            yield frame
            if frame.HasField("shutdown"):
                return

    async def Gradient(self, _: object, context: Any) -> None:
        await self._begin("Gradient", context)
        await self.gradient(context)

    BlockGradient = NonBlockGradient = Gradient

    async def CommitStep(self, request: pb.CommitStepRequest, context: Any) -> pb.CommitStepResponse:
        self.commits.append(request)
        await self._begin("CommitStep", context)
        return pb.CommitStepResponse(step=request.step, attempt=request.attempt, total_weight=4, global_loss=0.5)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.heartbeats.append(request)
        await self._begin("Heartbeat", context)
        return pb.HeartbeatResponse(stored_steps=self.stored_steps)

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        self.leaves.append(request)
        await self._begin("Leave", context)
        return pb.LeaveResponse()

    async def echo(self, context: Any, factor: float = 1.0, *, sends_mean: bool = True) -> None:
        """Contributions come back as their mean, times a factor."""
        begin = await self.begun(context)
        weight = sum(stats.weight for stats in begin.microbatches)
        await context.write(ACCEPTED)
        left = begin.tensor.num_elements * 4
        while left:
            _, chunk = decode_frame(await context.read())
            assert isinstance(chunk, ChunkView)
            left -= len(chunk.data)
            mean = np.frombuffer(chunk.data, np.float32) / np.float32(weight) * np.float32(factor)
            if sends_mean:
                await context.write(encode_chunk(2, chunk.offset_bytes, 0, mean.tobytes()))
        complete = pb.RoundComplete(total_weight=weight, num_contributors=1)
        await context.write(pb.GradientResponse(complete=complete).SerializeToString())

    async def begun(self, context: Any) -> pb.RoundBegin:
        """Reads what a contribution to the flat bucket says it is."""
        begin = pb.GradientRequest.FromString(await context.read()).begin.round
        self.begins.append(begin)
        return begin

    async def _begin(self, method: str, context: Any) -> None:
        self.calls[method] += 1
        if method in self.on:
            await self.on[method](context)


async def accept_and_hang(context: Any) -> None:
    """Takes a whole contribution and never answers."""
    await context.read()
    await context.write(ACCEPTED)
    while await context.read() is not grpc.aio.EOF:
        pass
    await asyncio.Event().wait()


async def accept_and_lose(context: Any) -> None:
    """Ends a contribution in the way in which a verdict that is lost on its way looks."""
    await context.read()
    await context.write(ACCEPTED)
    await context.abort(grpc.StatusCode.INTERNAL, "RST_STREAM")


async def hang(_: Any) -> None:
    await asyncio.Event().wait()


def breaking(times: int) -> Handler:
    """Breaks the first calls as a transport does."""
    left = iter(range(times))

    async def maybe(context: Any) -> None:
        if next(left, None) is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return maybe


@contextmanager
def serving(coordinator: EchoCoordinator, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """Serves on a loopback port, a free one if not told, and gives the address."""

    async def start() -> tuple[grpc.aio.Server, str]:
        server = make_server(TokenInterceptor(TOKEN))
        add_service(server, SERVICE, coordinator, RAW)
        address = bind(server, listen)
        await server.start()
        return server, address

    network = bridge.shared()
    server, address = network.wait(start(), 20, "the echo coordinator")
    try:
        yield address
    finally:
        network.wait(server.stop(grace=None), 20, "the end of the echo coordinator")
