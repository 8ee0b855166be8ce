"""CoordinatorServicer: decode, one call, encode.  [shell]"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from typing import Any

from ayni import PROTOCOL_VERSION, failpoints
from ayni.errors import AyniError, BadRequest, Duplicate, Incompatible, UnknownWorker
from ayni.identity import check_identity
from ayni.messages import dtype_enum, dtype_name, duration, origin_of, seconds_of
from ayni.rpc import Context, peer_of
from ayni.servers import certificate_names
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service import status, wire
from coordinator_service.artifacts import Artifacts
from coordinator_service.attachments import Attachments
from coordinator_service.contributions import Contributions
from coordinator_service.epochs import Seat, new_session
from coordinator_service.lanes import Lane, Lanes, Serve
from coordinator_service.run import Run
from coordinator_service.values import Shutdown, StateOffer

RAW_METHODS = frozenset({"Gradient", "BlockGradient", "NonBlockGradient", "Lanes"})
"""Methods whose messages come and go as bytes; see `ayni.frames`."""


class CoordinatorServicer:
    """Answers the calls of CoordinatorService for one run."""

    def __init__(self, run: Run, artifacts: Artifacts, attachments: Attachments) -> None:
        """Serves a run, its files, and the agents that nobody can dial."""
        self._run = run
        self.attachments = attachments
        self._artifacts = artifacts
        self._contributions = Contributions(run)
        self._with_lanes: set[str] = set()
        """Sessions with a stream of lanes: what waits there is bounded for each."""
        self._lane_methods = {
            pb.LANE_METHOD_GRADIENT: self._gradients_on_lane(pb.GradientBegin, pb.GradientResponse),
            pb.LANE_METHOD_BLOCK_GRADIENT: self._gradients_on_lane(pb.BlockGradientBegin, pb.BlockGradientResponse),
            pb.LANE_METHOD_NON_BLOCK_GRADIENT: self._gradients_on_lane(
                pb.NonBlockGradientBegin, pb.NonBlockGradientResponse
            ),
            pb.LANE_METHOD_COMMIT_STEP: self._commit_on_lane,
            pb.LANE_METHOD_SHARD_ASSIGNMENT: self._assignments_on_lane,
        }

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """Makes the caller a member."""
        self._check_negotiation(request)
        if self._run.file.tls.client_ca and self._run.file.tls.bind_names:
            check_identity(request.worker_name, certificate_names(context))
        member = await self._run.join(wire.applicant(request, new_session(), peer_of(context)))
        file = self._run.file
        return pb.JoinResponse(
            worker_id=member.worker_id,
            session=member.applicant.session,
            total_workers=max(file.num_starters, len(self._run.epochs.seats)),
            run_id=file.run_id,
            epoch=self._run.epochs.core.epoch.number,
            lease=duration(file.timeouts.lease.total_seconds()),
            heartbeat_interval=duration(file.timeouts.heartbeat_interval.total_seconds()),
            wire_type=dtype_enum(self._run.wire_types.now),
            update=self._run.update_mode,
            shared_memory=wire.shared_memory(self._run.same_host.offer()),
            chunk_bytes=file.chunk_bytes,
            topology=file.topology,
        )

    async def ShardAssignment(
        self, request: pb.ShardAssignmentRequest, context: Context
    ) -> AsyncGenerator[pb.ShardAssignmentResponse]:
        """Streams the worker's leases; its membership lasts as long."""
        seat = self._seat(request.worker_id, context)
        try:
            self._run.ready(seat, request.completed_steps, request.parameters_sha256, origin_of(request))
        except AyniError as error:
            self._run.epochs.expel(seat.member.worker_id, f"refused: {error.message}")
            raise
        try:
            while True:
                frame = await seat.outbox.get()
                if isinstance(frame, AyniError):
                    raise frame
                if isinstance(frame, StateOffer):
                    seat.unproven = False
                yield wire.assignment_frame(frame)
                if isinstance(frame, Shutdown):
                    return
        finally:
            if not seat.dismissed:
                self._run.epochs.expel(seat.member.worker_id, "its assignment stream broke")

    async def Gradient(self, _: object, context: Context) -> None:
        """Reduces the flat gradient vector."""
        await self._contributions.serve(context, self._seat, pb.GradientBegin, pb.GradientResponse)

    async def BlockGradient(self, _: object, context: Context) -> None:
        """Reduces a block's gradient."""
        await self._contributions.serve(context, self._seat, pb.BlockGradientBegin, pb.BlockGradientResponse)

    async def NonBlockGradient(self, _: object, context: Context) -> None:
        """Reduces the gradient of a component outside the blocks."""
        await self._contributions.serve(context, self._seat, pb.NonBlockGradientBegin, pb.NonBlockGradientResponse)

    async def CommitStep(self, request: pb.CommitStepRequest, context: Context) -> pb.CommitStepResponse:
        """Waits for the step's commit."""
        seat = self._seat(request.worker_id, context)
        try:
            kind = wire.kind_name(request.kind)
            told = await self._run.commit(seat, wire.key(request), kind, wire.report(request))
        except AyniError as error:
            self._run.note_refusal(error, seat)
            raise
        failpoints.hit("coordinator.commit.told")
        return wire.committed(told)

    async def Lanes(self, _: object, context: Context) -> None:
        """Carries assignments, gradient streams and commits of one worker, as long as it likes."""
        session = self._session(context)
        if not self._run.epochs.has_session(session):
            raise UnknownWorker("lanes are for members of the run; join first", worker_id="none")
        if session in self._with_lanes:
            raise Duplicate("this member has a stream of lanes; it can have one", bucket="lanes", contributed="twice")
        self._with_lanes.add(session)
        try:
            await Lanes(context, self._lane_methods).serve()
        finally:
            self._with_lanes.discard(session)

    async def _commit_on_lane(self, lane: Lane) -> None:
        request = pb.CommitStepRequest.FromString(await lane.first(self._accept))
        response = await self.CommitStep(request, lane.context)
        await lane.write(response.SerializeToString())

    async def _assignments_on_lane(self, lane: Lane) -> None:
        request = pb.ShardAssignmentRequest.FromString(await lane.first(self._accept))
        async with aclosing(self.ShardAssignment(request, lane.context)) as frames:
            async for frame in frames:
                await lane.write(frame.SerializeToString())

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        """Renews a lease."""
        seat = self._seat(request.worker_id, context)
        self._run.epochs.renew(seat.member.worker_id, wire.one_line(request.activity[:32]))
        self._run.note_exchange(seat, wire.exchange_news(request))
        seat.cpu_fallbacks = request.cpu_fallbacks
        states = self._run.states
        states.published(seat, request.published_steps)
        if seat.elastic:
            states.completed(seat, request.completed_steps, origin_of(request))
            reason = wire.one_line(request.failed_offer_reason[:256])
            states.failed_offer(seat, request.failed_offer_id, reason, is_damaged=request.offered_state_is_damaged)
        return pb.HeartbeatResponse(
            epoch=self._run.epochs.core.epoch.number, stored_steps=self._run.progress.settled_steps
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """Ends a membership; one that has ended is fine."""
        try:
            seat = self._seat(request.worker_id, context)
        except UnknownWorker:
            return pb.LeaveResponse()
        reason = wire.one_line(request.reason[:256]) or "it left"
        self._run.epochs.leave(seat.member.worker_id, reason, request.parameters_sha256[:64])
        return pb.LeaveResponse()

    async def FetchArtifact(
        self, request: pb.FetchArtifactRequest, context: Context
    ) -> AsyncIterator[pb.FetchArtifactResponse]:
        """Streams a file."""
        chunks = self._artifacts.open(request.sha256, request.offset_bytes)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            response = pb.FetchArtifactResponse()
            response.chunk.offset_bytes, response.chunk.data = chunk
            yield response

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Describes the run."""
        self._check_run_id(request.run_id)
        return status.describe(self._run, self._artifacts, with_history=request.with_history)

    async def MeasureLink(self, request: pb.MeasureLinkRequest, context: Context) -> pb.MeasureLinkResponse:
        """Answers with as many bytes as were asked for."""
        return pb.MeasureLinkResponse(padding=bytes(wire.measured_bytes(request)))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        """Streams snapshots until the run ends."""
        given = seconds_of(request.min_interval) if request.HasField("min_interval") else 0.2
        interval = min(max(given, 0.05), 60.0)
        while True:
            ended = self._run.progress.ended
            yield pb.WatchRunResponse(snapshot=status.snapshot(self._run, with_history=request.with_history))
            if ended:
                return
            await self._run.next_change(interval, limit=1.0)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        """Carries calls to an agent that nobody can dial, as long as it is a member."""
        async with aclosing(self.attachments.serve(requests, context, self._seat)) as responses:
            async for response in responses:
                yield response

    def _seat(self, worker_id: int, context: Context) -> Seat:
        return self._run.epochs.seat(worker_id, self._session(context))

    @property
    def _accept(self) -> timedelta:
        return self._run.file.timeouts.accept

    @staticmethod
    def _session(context: Context) -> str:
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        session = metadata.get("ayni-session", "")
        return session if isinstance(session, str) else ""

    def _gradients_on_lane(self, begin_class: Any, response_class: Any) -> Serve:
        return lambda lane: self._contributions.serve_lane(lane, self._seat, begin_class, response_class)

    def _check_negotiation(self, request: pb.JoinRequest) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            raise _incompatible("protocol_version", PROTOCOL_VERSION, request.protocol_version or "not said")
        self._check_run_id(request.run_id)
        offered = [dtype_name(value) for value in request.wire_types] or ["float32"]
        if self._run.wire_types.now not in offered:
            raise _incompatible("wire_type", self._run.wire_types.now, ", ".join(offered))
        self._check_topology(request)
        if request.backend not in ("cuda", "wgpu", "cpu"):
            raise BadRequest(f"backend is {request.backend!r}; it must be cuda, wgpu or cpu", field="backend")

    def _check_topology(self, request: pb.JoinRequest) -> None:
        """Refuses a worker that takes no part in the only exchange there is; with "auto" there is always star."""
        topology = self._run.file.topology
        if topology in ("star", "auto"):
            return
        if topology not in request.topologies:
            raise _incompatible("topologies", topology, ", ".join(request.topologies) or "star alone")
        if not request.elastic:
            raise _incompatible("topologies", f"{topology}, for elastic workers", "one that is not elastic")

    def _check_run_id(self, run_id: str) -> None:
        if run_id and run_id != self._run.file.run_id:
            raise _incompatible("run_id", self._run.file.run_id, run_id[:128])


def _incompatible(field: str, ours: object, theirs: object) -> Incompatible:
    return Incompatible(
        f"{field} differs: this coordinator has {ours}, the caller has {theirs}",
        field=field,
        coordinator=ours,
        worker=theirs,
    )
