"""A coordinator to be fuzzed: one that waits for workers, and one with a step in progress."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from ayni import PROTOCOL_VERSION
from ayni.channels import open_sync_channel
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2, worker_pb2
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator
from tests.support.fuzz_calls import Base, Ended, Waiting, path_of

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
SIZE = 1_000
"""Elements of the gradients that the fuzzer's members speak of."""

_RELAYED = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name["ReadBlocks"]
"""The one method of workers that the coordinator has too, for those that nobody can dial."""

_PATH = f"/{SERVICE.full_name}"
_WAITING = Waiting(
    methods=frozenset(
        {
            "ShardAssignment",
            "WatchRun",
            "CommitStep",
            "Gradient",
            "BlockGradient",
            "NonBlockGradient",
            "Attach",
            "ReadBlocks",
        }
    )
)
_FATAL = {
    "NON_FINITE",
    "SPEC_MISMATCH",
    "BAD_CHUNK",
    "WEIGHT_MISMATCH",
    "CHECKSUM",
    "BAD_REQUEST",
    "HALTED",
    "DIVERGED",
}
"""Refusals after which the policy may stop the run, where a member with a lease gave cause for it."""

_EXPELLED = {"INCOMPATIBLE", "DIVERGED", "STEP_VOIDED", "HALTED"}
"""Refusals of ShardAssignment that end the caller's membership."""

_RUN: dict[str, Any] = {
    "run_id": "fuzzed",
    "num_steps": 0,
    "max_workers": 6,
    "batch": {"samples": 10, "microbatches": 5},
    "max_attempts": 1_000_000,
    "max_bucket_bytes": 1 << 22,
    "timeouts": {"heartbeat_interval": "1s", "lease": "10m", "accept": "11m", "step": "1h", "drain": "1s"},
}


class FuzzedCoordinator:
    """A coordinator with members "ant" and "bee" whose sessions the fuzzer has."""

    methods: ClassVar = {path_of(method): method for method in (*SERVICE.methods, _RELAYED)}

    def __init__(self, folder: Path, in_progress: bool) -> None:
        self.name = "coordinator with a step in progress" if in_progress else "coordinator that waits"
        self.hints: dict[str, list[Any]] = {}
        self._folder, self._in_progress = folder, in_progress
        self._stack = contextlib.ExitStack()
        self._starts = 0
        self._past_log = ""
        (folder / "artifacts").mkdir(parents=True)
        (folder / "artifacts" / "file.bin").write_bytes(bytes(300_000))
        self._start()

    @property
    def pid(self) -> int:
        return self._process.process.pid

    @property
    def address(self) -> str:
        return self._process.address

    @property
    def log(self) -> str:
        return self._past_log + self._process.read_log()

    def close(self) -> None:
        self._stack.close()

    def bases(self, method: MethodDescriptor) -> list[Base]:
        return [
            Base(
                frames=frames,
                metadata=(("ayni-session", member.session), ("ayni-relay", str(self._members[0].worker_id))),
            )
            for member in self._members
            for frames in _bases(method.name, member)
        ]

    def snapshot(self) -> dict[str, object]:
        answer = self._call("GetRun", pb.GetRunRequest(), pb.GetRunResponse)
        return {"run": str(stable(answer))}

    def may_change(self, ended: Ended) -> bool:
        return "ayni-session" in dict(ended.call.metadata) and ended.reason in _FATAL | _EXPELLED

    def good_call(self) -> None:
        assert self._call("GetRun", pb.GetRunRequest(), pb.GetRunResponse).run_id == "fuzzed"

    def renew(self) -> bool:
        restarted = False
        if self._process.process.poll() is not None or self._state() in (
            pb.RUN_STATE_HALTED,
            pb.RUN_STATE_FINISHED,
        ):
            assert self._process.process.poll() in (None, 0, 1), f"the coordinator died:\n{self.log[-3000:]}"
            self._restart()
            restarted = True
        rejoined = [member.renew() for member in self._members]
        self._tell()
        return restarted or any(rejoined)

    def _restart(self) -> None:
        self._past_log += self._process.read_log()
        self._stack.close()
        self._start()

    def _start(self) -> None:
        self._starts += 1
        workers = 2 if self._in_progress else 6
        run = {**_RUN, "min_workers": workers, "artifacts": str(self._folder / "artifacts")}
        self._process: CoordinatorProcess = self._stack.enter_context(
            coordinator(self._folder / f"start{self._starts}", run, "--fresh")
        )
        self.channel = self._stack.enter_context(open_sync_channel(self.address, TOKEN))
        self._members = [Insider(self.channel, name, self._in_progress) for name in ("ant", "bee")]
        for member in self._members:
            self._stack.callback(member.close)
            member.renew()
        if self._in_progress:
            for member in self._members:
                member.wait_for_lease()
        self._tell()

    def _state(self) -> int:
        return self._call("GetRun", pb.GetRunRequest(), pb.GetRunResponse).snapshot.state

    def _call(self, name: str, request: Message, answer: Any) -> Any:
        call: Any = self.channel.unary_unary(f"{_PATH}/{name}")
        return answer.FromString(call(request.SerializeToString(), timeout=20))

    def _tell(self) -> None:
        sha256 = next(file.sha256 for file in self._call("GetRun", pb.GetRunRequest(), pb.GetRunResponse).artifacts)
        leases = [member.assignment for member in self._members]
        sessions = [(("ayni-session", member.session),) for member in self._members]
        self.hints |= {
            "waiting": [_WAITING],
            "metadata": [*sessions, (), (("ayni-session", "wrong"),), (("ayni-relay", "0"),), (("x-bin", b"\0\xff"),)],
            "worker_id": [*(member.worker_id for member in self._members), 0, 77],
            "run_id": ["fuzzed", "", "other"],
            "protocol_version": [PROTOCOL_VERSION],
            "worker_name": ["ant", "bee", "cat", "dog"],
            "join_nonce": ["ant", "bee", "n1"],
            "backend": ["cpu", "cuda"],
            "sha256": [sha256],
            "wire_types": [tensor_pb2.DTYPE_FLOAT32],
            "dtype": [tensor_pb2.DTYPE_FLOAT32],
            "num_elements": [SIZE, SIZE * 2, 9],
            "epoch": [lease.epoch for lease in leases],
            "step": [lease.step for lease in leases],
            "attempt": [lease.attempt for lease in leases],
            "lease_id": [lease.lease_id for lease in leases],
            "CommitStepRequest.kind": [pb.STEP_KIND_TRAIN],
            "microbatch": [0, 1, 2, 3, 4],
            "weight": [1, 2],
            "call_id": [1, 2, 3],
            "completed_steps": [0, 1],
        }


class Insider:
    """A member that does nothing by itself but hold its stream of assignments."""

    def __init__(self, channel: grpc.Channel, name: str, stays: bool) -> None:
        self.name, self.session, self.worker_id = name, "", -1
        self.assignment = pb.Assignment()
        self._channel, self._stays = channel, stays
        self._stream: Any = None
        self._attached: Any = None
        self._leased = threading.Event()
        self._nonce = 0

    def renew(self) -> bool:
        """Joins again when it is no member any more; says whether it was none."""
        if self._is_member() and not (self._stays and (self._stream is None or self._stream.done())):
            return False
        self.close()
        self._nonce += 1
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            worker_name=self.name,
            join_nonce=f"n{self._nonce}",
            backend="cpu",
            elastic=self.name == "bee",
        )
        call: Any = self._channel.unary_unary(f"{_PATH}/Join", pb.JoinRequest.SerializeToString)
        with contextlib.suppress(grpc.RpcError):  # Somebody may have its name, or the run its number of workers.
            answer = pb.JoinResponse.FromString(call(request, timeout=20))
            self.session, self.worker_id = answer.session, answer.worker_id
            if self._stays:
                self._open()
        return True

    def wait_for_lease(self) -> None:
        assert self._leased.wait(30), "no lease came"

    def close(self) -> None:
        for stream in (self._stream, self._attached):
            if stream is not None:
                stream.cancel()

    def _is_member(self) -> bool:
        call: Any = self._channel.unary_unary(f"{_PATH}/Heartbeat", pb.HeartbeatRequest.SerializeToString)
        try:
            call(
                pb.HeartbeatRequest(worker_id=max(0, self.worker_id)),
                timeout=20,
                metadata=(("ayni-session", self.session),),
            )
        except grpc.RpcError:
            return False
        return self.worker_id >= 0

    def _open(self) -> None:
        start: Any = self._channel.unary_stream(
            f"{_PATH}/ShardAssignment",
            pb.ShardAssignmentRequest.SerializeToString,
            pb.ShardAssignmentResponse.FromString,
        )
        request = pb.ShardAssignmentRequest(worker_id=self.worker_id)
        self._stream = start(request, metadata=(("ayni-session", self.session),))
        threading.Thread(target=self._follow, args=(self._stream,), daemon=True).start()
        self._attach()

    def _attach(self) -> None:
        """Lends itself to calls over a stream of its own, and answers each of them."""
        start: Any = self._channel.stream_stream(
            f"{_PATH}/Attach", pb.AttachRequest.SerializeToString, pb.AttachResponse.FromString
        )
        answers: queue.SimpleQueue[pb.AttachRequest] = queue.SimpleQueue()
        answers.put(pb.AttachRequest(hello=pb.AttachHello(worker_id=self.worker_id)))
        self._attached = start(iter(answers.get, None), metadata=(("ayni-session", self.session),))
        threading.Thread(target=self._answer, args=(self._attached, answers), daemon=True).start()

    def _answer(self, stream: Any, answers: "queue.SimpleQueue[Any]") -> None:
        with contextlib.suppress(grpc.RpcError):
            for frame in stream:
                if frame.HasField("call"):
                    reply = pb.AttachReply(call_id=frame.call.call_id, response=bytes(100))
                    answers.put(pb.AttachRequest(reply=reply))
                    answers.put(pb.AttachRequest(reply=pb.AttachReply(call_id=frame.call.call_id, last=True)))
        answers.put(None)

    def _follow(self, stream: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            for frame in stream:
                if frame.HasField("assignment"):
                    self.assignment = frame.assignment
                    self._leased.set()


def stable(answer: pb.GetRunResponse) -> pb.GetRunResponse:
    """The answer without what changes by itself."""
    snapshot = answer.snapshot
    for field in ("elapsed", "samples_per_second", "received_bytes", "reducer_peak_bytes"):
        _clear(snapshot, field)
    for worker in snapshot.workers:
        for field in ("last_seen", "received_bytes", "activity"):
            _clear(worker, field)
    return answer


def _clear(message: Message, field: str) -> None:
    message.ClearField(field)


def _bases(method: str, member: Insider) -> Iterator[list[Message]]:
    lease = member.assignment
    stats = [
        pb.MicrobatchStats(microbatch=m, weight=2, loss_sum=2.0, num_correct=1, num_predictions=2)
        for m in range(lease.microbatch_start, lease.microbatch_stop)
    ]
    key: dict[str, Any] = {"worker_id": member.worker_id, "epoch": lease.epoch, "step": lease.step}
    key |= {"attempt": lease.attempt, "lease_id": lease.lease_id}
    sizes = {"BlockGradient": [SIZE, *[0] * 8]}.get(method, [])
    tensor = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, num_elements=SIZE, component_sizes=sizes)
    round_ = pb.RoundBegin(**key, tensor=tensor, microbatches=stats)
    chunk = tensor_pb2.Chunk(data=bytes(SIZE * 4))
    if method == "Join":
        yield [pb.JoinRequest(protocol_version=PROTOCOL_VERSION, worker_name="cat", join_nonce="n", backend="cpu")]
    elif method == "Gradient":
        yield [pb.GradientRequest(begin=pb.GradientBegin(round=round_)), pb.GradientRequest(chunk=chunk)]
    elif method == "BlockGradient":
        begin = pb.BlockGradientBegin(round=round_, block_index=1, num_blocks=2)
        yield [pb.BlockGradientRequest(begin=begin), pb.BlockGradientRequest(chunk=chunk)]
    elif method == "NonBlockGradient":
        component = pb.NonBlockGradientBegin(round=round_, component=pb.NON_BLOCK_COMPONENT_LM_HEAD)
        yield [pb.NonBlockGradientRequest(begin=component), pb.NonBlockGradientRequest(chunk=chunk)]
    elif method == "CommitStep":
        yield [pb.CommitStepRequest(**key, kind=pb.STEP_KIND_TRAIN, num_buckets=1, microbatches=stats)]
    elif method == "Attach":
        hello = pb.AttachHello(worker_id=member.worker_id, epoch=lease.epoch)
        reply = pb.AttachReply(call_id=1, response=b"x", last=True)
        yield [pb.AttachRequest(hello=hello), pb.AttachRequest(reply=reply)]
    elif method == "ReadBlocks":
        yield [worker_pb2.ReadBlocksRequest(layout=worker_pb2.LayoutHandle(low=1, high=1))]
    elif method in ("ShardAssignment", "Heartbeat", "Leave"):
        yield [getattr(pb, f"{method}Request")(worker_id=member.worker_id)]
