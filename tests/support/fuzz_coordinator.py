"""A coordinator to be fuzzed: one that waits for workers, and one with a step in progress."""

import contextlib
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from ayni import PROTOCOL_VERSION
from ayni.channels import open_sync_channel
from ayni.v1 import collective_pb2, tensor_pb2, worker_pb2
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator
from tests.support.fuzz_calls import Base, Ended, Waiting, path_of
from tests.support.fuzz_insiders import PATH, SERVICE, SIZE, Insider, bases_of

_RELAYED = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name["ReadBlocks"]
"""The one method of workers that the coordinator has too, for those that nobody can dial."""

_EXCHANGE = collective_pb2.DESCRIPTOR.services_by_name["CollectiveService"].methods_by_name["Exchange"]

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
            "Lanes",
            "ReadBlocks",
            "Exchange",
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

    methods: ClassVar = {path_of(method): method for method in (*SERVICE.methods, _RELAYED, _EXCHANGE)}

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
            for frames in bases_of(method.name, member)
        ]

    def snapshot(self) -> dict[str, object]:
        answer = self._call("GetRun", pb.GetRunRequest(), pb.GetRunResponse)
        return {"run": str(stable(answer))}

    def may_change(self, ended: Ended) -> bool:
        # Lanes of one stream are calls of their own: one may have counted before another ended the stream.
        is_cause = ended.reason in _FATAL | _EXPELLED or ended.call.name == "Lanes"
        return "ayni-session" in dict(ended.call.metadata) and is_cause

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
        call: Any = self.channel.unary_unary(f"{PATH}/{name}")
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
            "CollectiveHello.group": ["alone", "pair"],
            "CollectiveHello.world_size": [1, 2],
            "CollectiveSend.to": [0, 1],
        }


def stable(answer: pb.GetRunResponse) -> pb.GetRunResponse:
    """The answer without what changes by itself."""
    snapshot = answer.snapshot
    for field in ("elapsed", "step_elapsed", "unix_time", "samples_per_second", "received_bytes", "reducer_peak_bytes"):
        _clear(snapshot, field)
    for worker in snapshot.workers:
        for field in ("last_seen", "received_bytes", "activity", "so_far"):
            _clear(worker, field)
    return answer


def _clear(message: Message, field: str) -> None:
    message.ClearField(field)
