"""Client of CoordinatorService: one method for each call a worker makes.  [shell]

Every method runs on the event loop. A refusal is raised as its own class (`ayni.errors`), a broken transport as
`TransportBroken`; nothing is retried here.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from datetime import timedelta

from grpc import aio

from ayni import PROTOCOL_VERSION, failpoints, rpc
from ayni.buckets import Bucket
from ayni.channels import HeaderChannel
from ayni.errors import UnknownWorker
from ayni.messages import origin_message
from ayni.step_values import Origin
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from worker_agent import messages
from worker_agent.assignment_frames import Frame, assignment_frame
from worker_agent.exchange import Call
from worker_agent.faults import TransportBroken
from worker_agent.lanes import Lane, Lanes
from worker_agent.messages import JoinFacts, Membership, Run, SignOfLife
from worker_agent.session import Commit, Report, ShardAssignment

_METHODS = {"flat": "Gradient", "block": "BlockGradient", "non_block": "NonBlockGradient"}
_LANE_METHODS = {
    "flat": pb.LANE_METHOD_GRADIENT,
    "block": pb.LANE_METHOD_BLOCK_GRADIENT,
    "non_block": pb.LANE_METHOD_NON_BLOCK_GRADIENT,
}
_COMMIT_ASKED = "worker.commit.asked"
_SMALL_BYTES = 64 << 10
"""Longest part of a contribution that goes over a lane, where it is copied once more."""

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


class Coordinator:
    """The coordinator, as a worker sees it."""

    def __init__(self, channel: HeaderChannel, address: str) -> None:
        """Uses a channel that carries the join token; after Join it carries the session too."""
        self.address = address
        self._channel = channel
        self._stub = CoordinatorServiceStub(channel)
        self._streams = {kind: channel.stream_stream(f"/{SERVICE}/{name}") for kind, name in _METHODS.items()}
        self.worker_id = -1
        self.chunk_bytes = 0
        """Length of chunks in the run; 0 for not said."""
        self._lanes: Lanes | None = None

    async def close(self) -> None:
        """Ends the connection."""
        if self._lanes:
            await self._lanes.close()
        await self._channel.close()

    async def get_run(self, run_id: str, within: timedelta) -> Run:
        """Asks what the run is."""
        with translated("GetRun", self.address):
            request = pb.GetRunRequest(run_id=run_id)
            return messages.run(await self._stub.GetRun(request, timeout=within.total_seconds()))

    async def measure(self, padding: bytes, answer_bytes: int, within: timedelta) -> None:
        """Sends some bytes and gets some back."""
        request = pb.MeasureLinkRequest(padding=padding, answer_bytes=answer_bytes)
        with translated("MeasureLink", self.address):
            await self._stub.MeasureLink(request, timeout=within.total_seconds())

    async def join(self, facts: JoinFacts, within: timedelta) -> Membership:
        """Becomes a member; later calls are made as this member."""
        request = messages.join_request(facts, PROTOCOL_VERSION)
        with translated("Join", self.address):
            membership = messages.membership(await self._stub.Join(request, timeout=within.total_seconds()))
        self._channel.headers["ayni-session"] = membership.session
        self.worker_id, self.chunk_bytes = membership.worker_id, membership.chunk_bytes
        if membership.chunk_bytes and self._lanes is None:
            call = self._channel.stream_stream(f"/{SERVICE}/Lanes")()
            self._lanes = Lanes(call, self.address, membership.chunk_bytes)
        return membership

    async def assignments(
        self, completed_steps: int, parameters_sha256: str, origin: Origin | None = None
    ) -> AsyncGenerator[Frame]:
        """Yields what the coordinator says to this worker, as long as it is a member."""
        request = pb.ShardAssignmentRequest(
            worker_id=self.worker_id,
            completed_steps=completed_steps,
            parameters_sha256=parameters_sha256,
            origin=origin_message(origin),
        )
        if self._lanes and self._lanes.is_open:
            lane = self._lanes.open(pb.LANE_METHOD_SHARD_ASSIGNMENT)
            async with aclosing(_assignments_on_lane(lane, request)) as frames:
                async for frame in frames:
                    yield assignment_frame(frame)
            return
        call = self._stub.ShardAssignment(request)
        with translated("ShardAssignment", self.address):
            async for frame in call:
                yield assignment_frame(frame)

    def reduction(self, bucket: Bucket, part_bytes: int) -> Call:
        """Opens the call of one contribution to one reduction, whose parts are so many bytes in frames."""
        lanes = self._lanes
        if lanes and lanes.is_open and part_bytes <= min(_SMALL_BYTES, lanes.chunk_bytes):
            return lanes.open(_LANE_METHODS[bucket.kind])
        call: Call = self._streams[bucket.kind]()
        return call

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit:
        """Says that the lease is done and waits for the step's commit."""
        request = messages.commit_request(self.worker_id, assignment, report)
        if self._lanes and self._lanes.is_open:
            return await self._commit_on_lane(self._lanes.open(pb.LANE_METHOD_COMMIT_STEP), request)
        with translated("CommitStep", self.address):
            call = self._stub.CommitStep(request)
            # One turn of the loop, in which the request leaves.
            await asyncio.sleep(0)
            failpoints.hit(_COMMIT_ASKED)
            return messages.commit(await call)

    async def _commit_on_lane(self, lane: Lane, request: pb.CommitStepRequest) -> Commit:
        try:
            await lane.write(request.SerializeToString())
            await lane.done_writing()
            if failpoints.is_armed(_COMMIT_ASKED):
                await lane.left()
            failpoints.hit(_COMMIT_ASKED)
            answer = await lane.read()
        finally:
            lane.cancel()
        if not isinstance(answer, bytes):
            raise TransportBroken(f"the coordinator at {self.address} ended the lane of a commit without an answer")
        return messages.commit(pb.CommitStepResponse.FromString(answer))

    async def heartbeat(self, sign: SignOfLife, within: timedelta) -> int:
        """Renews the lease of the membership; returns the steps behind the newest settled state."""
        request = messages.heartbeat_request(self.worker_id, sign)
        with translated("Heartbeat", self.address):
            response = await self._stub.Heartbeat(request, timeout=within.total_seconds())
        return int(response.stored_steps)

    async def end(self, membership: Membership, reason: str, within: timedelta) -> None:
        """Ends an earlier membership, if the coordinator still believes in it."""
        request = pb.LeaveRequest(worker_id=membership.worker_id, reason=reason)
        session = (("ayni-session", membership.session),)
        with contextlib.suppress(UnknownWorker), translated("Leave", self.address):
            await self._stub.Leave(request, timeout=within.total_seconds(), metadata=session)

    async def leave(self, reason: str, parameters_sha256: str, within: timedelta) -> None:
        """Ends the membership."""
        request = pb.LeaveRequest(worker_id=self.worker_id, reason=reason, parameters_sha256=parameters_sha256)
        with translated("Leave", self.address):
            await self._stub.Leave(request, timeout=within.total_seconds())

    async def fetch(self, sha256: str, offset_bytes: int) -> AsyncGenerator[tuple[int, bytes]]:
        """Yields (offset, bytes) of a file of the run, from an offset on."""
        call = self._stub.FetchArtifact(pb.FetchArtifactRequest(sha256=sha256, offset_bytes=offset_bytes))
        try:
            with translated("FetchArtifact", self.address):
                async for frame in call:
                    yield frame.chunk.offset_bytes, frame.chunk.data
        finally:
            call.cancel()


async def _assignments_on_lane(
    lane: Lane, request: pb.ShardAssignmentRequest
) -> AsyncGenerator[pb.ShardAssignmentResponse]:
    try:
        await lane.write(request.SerializeToString())
        while isinstance(data := await lane.read(), bytes):
            yield pb.ShardAssignmentResponse.FromString(data)
    finally:
        lane.cancel()


@contextmanager
def translated(call: str, address: str) -> Iterator[None]:
    """Turns the errors of a call into ours.

    Raises:
        AyniError: the coordinator refused.
        TransportBroken: nobody decided anything.
    """
    try:
        yield
    except aio.AioRpcError as error:
        raise verdict(error, call, address) from error


def verdict(error: aio.AioRpcError, call: str, address: str) -> Exception:
    """Returns what the status of a call means: an AyniError or a TransportBroken."""
    refusal = rpc.error_from(error)
    if refusal is not None:
        return refusal
    code = error.code().name
    return TransportBroken(f"{call} to the coordinator at {address} broke: {code}, {error.details()}", code)
