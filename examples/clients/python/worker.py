"""A worker that uses nothing of Ayni but the generated stubs: least squares, computed with numpy.

What it computes, and what all example workers have in common: examples/clients/README.md.
"""

import argparse
import contextlib
import hashlib
import json
import queue
import secrets
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc, tensor_pb2

Vector = npt.NDArray[np.float32]

FEATURES, SAMPLES, ENTRIES = 20000, 96, 8
FINGERPRINT = hashlib.sha256(b"ayni example: least squares 1").hexdigest()
DROPPED = {"STEP_VOIDED", "STALE_STEP", "STALE_EPOCH"}
"""Reasons after which the next assignment is waited for; nothing of the step counts."""
CALL_S, WAIT_S, RUN_S = 30, 120, 600
"""Deadlines of short calls, of those that wait for other workers, and of the whole run."""


# The model. Every operation is rounded to float32 for itself: then any language gets the same bytes.


@dataclass
class Microbatch:
    """The sum of the gradients of a micro-batch's samples; None where nothing has weight."""

    gradient: Vector | None
    stats: pb.MicrobatchStats


def entries(sample: int) -> Iterator[tuple[int, np.float32]]:
    """The features of a sample that are not zero, with their values."""
    for k in range(ENTRIES):
        yield (sample * 199 + k * 5970) % FEATURES, np.float32((sample * 7 + k * 13) % 17 - 8)


def compute(parameters: Vector, number: int, start: int, stop: int) -> Microbatch:
    """Loss and gradient over the samples at positions start to stop - 1."""
    gradient, total, loss = np.zeros(FEATURES, np.float32), 0, 0.0
    for position in range(start, stop):
        sample = position % SAMPLES
        weight, target = sample // 8 % 4, sample * 37 % 101 - 50
        prediction = np.float32(0)
        for feature, value in entries(sample):
            prediction += parameters[feature] * value
        error = prediction - np.float32(target)
        scaled = np.float32(weight) * error
        for feature, value in entries(sample):
            gradient[feature] += scaled * value
        total += weight
        loss += weight * float(error) * float(error) / 2
    stats = pb.MicrobatchStats(microbatch=number, weight=total, loss_sum=loss)
    return Microbatch(gradient if total else None, stats)


def update(parameters: Vector, mean: Vector, learning_rate: float, clip_factor: float) -> None:
    """One step of gradient descent."""
    parameters -= np.float32(learning_rate) * (np.float32(clip_factor) * mean)


def digest(parameters: Vector) -> str:
    """The hash that workers compare."""
    return hashlib.sha256(parameters.astype("<f4").tobytes()).hexdigest()


# The tree.


def cover(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """The fewest nodes of the tree over `count` micro-batches that make up start to stop - 1, left to right."""
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and size < count and min(start + 2 * size, count) <= stop:
            size *= 2
        yield start, min(start + size, count)
        start = min(start + size, count)


def add_up(leaves: dict[int, Vector | None], start: int, stop: int) -> Vector | None:
    """The value of a node: left plus right; what is absent is left out."""
    if stop - start == 1:
        return leaves[start]
    half = 1
    while 2 * half < stop - start:
        half *= 2
    left, right = add_up(leaves, start, start + half), add_up(leaves, start + half, stop)
    if left is None or right is None:
        return right if left is None else left
    return left + right


# The calls.


class Worker:
    """One membership, from Join to Leave."""

    def __init__(self, channel: grpc.Channel, token: str, name: str) -> None:
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self._metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),)
        self._name = name
        self._id = 0
        self._parameters = np.zeros(FEATURES, np.float32)
        self._losses: list[float] = []
        self._at = (0, -1, "loading")
        self._over = threading.Event()

    def run(self) -> dict[str, Any]:
        """Takes part in the whole run; returns what is printed."""
        heart = self._join()
        try:
            end = self._follow_assignments()
        except BaseException:
            # A goodbye that fails as well says less than what went wrong before it.
            with contextlib.suppress(grpc.RpcError):
                self._leave(heart, "the worker failed", "")
            raise
        self._leave(heart, "the run is over", digest(self._parameters))
        if not end.finished:
            raise RuntimeError(f"the run was stopped: {end.reason}")
        return {
            "language": "python",
            "worker": self._name,
            "steps": end.committed_steps,
            "parameters_sha256": digest(self._parameters),
            "first_loss": self._losses[0],
            "loss": self._losses[-1],
        }

    def _join(self) -> threading.Thread:
        run = self._stub.GetRun(pb.GetRunRequest(), timeout=CALL_S, metadata=self._metadata, wait_for_ready=True)
        version = run.protocol_version
        if version != 1:
            raise RuntimeError(f"the coordinator speaks version {version} of the protocol, this worker version 1")
        request = pb.JoinRequest(
            protocol_version=1,
            worker_name=self._name,
            join_nonce=secrets.token_hex(16),
            backend="cpu",
            wire_types=[tensor_pb2.DTYPE_FLOAT32],
            num_training_samples=SAMPLES,
            task_fingerprint=FINGERPRINT,
            task_summary="least squares of the example clients",
        )
        answer = self._stub.Join(request, timeout=CALL_S, metadata=self._metadata)
        if answer.wire_type != tensor_pb2.DTYPE_FLOAT32 or answer.topology != "star":
            raise RuntimeError("this example sends float32 to the coordinator; the run file says something else")
        self._id = answer.worker_id
        self._metadata += (("ayni-session", answer.session),)
        log(f"joined {answer.run_id} as worker {self._id}")
        interval, lease = answer.heartbeat_interval.ToTimedelta(), answer.lease.ToTimedelta()
        seconds = (interval.total_seconds(), lease.total_seconds())
        heart = threading.Thread(target=self._beat, args=seconds, daemon=True)
        heart.start()
        return heart

    def _leave(self, heart: threading.Thread, why: str, parameters_sha256: str) -> None:
        self._over.set()
        heart.join()
        leave = pb.LeaveRequest(worker_id=self._id, reason=why, parameters_sha256=parameters_sha256)
        self._stub.Leave(leave, timeout=CALL_S, metadata=self._metadata)

    def _beat(self, interval: float, lease: float) -> None:
        """Gives signs of life. What is wrong with them ends the stream of assignments as well."""
        while not self._over.wait(interval):
            epoch, step, activity = self._at
            request = pb.HeartbeatRequest(worker_id=self._id, epoch=epoch, step=step, activity=activity)
            try:
                self._stub.Heartbeat(request, timeout=lease, metadata=self._metadata)
            except grpc.RpcError as error:
                log(f"no heartbeat: {sentence(error)}")

    def _follow_assignments(self) -> pb.Shutdown:
        request = pb.ShardAssignmentRequest(worker_id=self._id, parameters_sha256=digest(self._parameters))
        for frame in self._stub.ShardAssignment(request, timeout=RUN_S, metadata=self._metadata):
            match frame.WhichOneof("frame"):
                case "assignment":
                    self._try_step(frame.assignment)
                case "waiting":
                    log(frame.waiting.reason)
                case "shutdown":
                    log(frame.shutdown.reason)
                    return frame.shutdown
        raise RuntimeError("the stream of assignments ended without a shutdown")

    def _try_step(self, lease: pb.Assignment) -> None:
        try:
            self._step(lease)
        except grpc.RpcError as error:
            if reason(error) not in DROPPED:
                raise
            log(f"attempt {lease.attempt} of step {lease.step} is void: {sentence(error)}")
        self._at = (lease.epoch, lease.step, "waiting")

    def _step(self, lease: pb.Assignment) -> None:
        if lease.kind != pb.STEP_KIND_TRAIN:
            raise RuntimeError("this example does not evaluate")
        if lease.step != len(self._losses):
            raise RuntimeError(f"the run is at step {lease.step}, but this worker has made {len(self._losses)}")
        self._at = (lease.epoch, lease.step, "computing")
        microbatches = [
            compute(self._parameters, m, position_of(lease, m), position_of(lease, m + 1))
            for m in range(lease.microbatch_start, lease.microbatch_stop)
        ]
        leaves = {batch.stats.microbatch: batch.gradient for batch in microbatches}
        nodes = cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        parts = [add_up(leaves, start, stop) for start, stop in nodes]
        stats = [batch.stats for batch in microbatches]
        mean = self._reduce(lease, parts, stats)
        commit = self._commit(lease, stats)
        self._losses.append(commit.global_loss)
        if commit.total_weight:
            update(self._parameters, mean, commit.learning_rate, commit.clip_factor)

    def _reduce(self, lease: pb.Assignment, parts: list[Vector | None], stats: list[pb.MicrobatchStats]) -> Vector:
        """Contributes to the one bucket and returns the mean."""
        self._at = (lease.epoch, lease.step, "exchanging")
        accepted: queue.Queue[pb.RoundAccepted | None] = queue.Queue()
        # gRPC takes the requests on a thread of its own, so chunks go out while those of the mean come in.
        requests = self._contribution(lease, parts, stats, accepted)
        data, is_complete = bytearray(), False
        try:
            for frame in self._stub.Gradient(requests, timeout=WAIT_S, metadata=self._metadata):
                match frame.WhichOneof("frame"):
                    case "accepted":
                        accepted.put(frame.accepted)
                    case "chunk":
                        if frame.chunk.offset_bytes != len(data):
                            raise RuntimeError(f"a chunk begins at {frame.chunk.offset_bytes}, not at {len(data)}")
                        data += frame.chunk.data
                    case "complete":
                        is_complete = True
        finally:
            accepted.put(None)
        if not is_complete:
            raise RuntimeError("a gradient stream ended before it was complete")
        # Without any weight there is no mean.
        return np.frombuffer(data, "<f4") if data else np.zeros(FEATURES, np.float32)

    def _contribution(
        self,
        lease: pb.Assignment,
        parts: list[Vector | None],
        stats: list[pb.MicrobatchStats],
        accepted: "queue.Queue[pb.RoundAccepted | None]",
    ) -> Iterator[pb.GradientRequest]:
        begin = pb.RoundBegin(
            worker_id=self._id,
            epoch=lease.epoch,
            step=lease.step,
            attempt=lease.attempt,
            lease_id=lease.lease_id,
            tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, num_elements=FEATURES),
            microbatches=stats,
            num_buckets=1,
        )
        yield pb.GradientRequest(begin=pb.GradientBegin(round=begin))
        answer = accepted.get()
        if answer is None or answer.already_held:
            return
        for number, part in enumerate(parts):
            data = b"" if part is None else part.astype("<f4").tobytes()
            for offset in range(0, len(data), answer.chunk_bytes):
                content = data[offset : offset + answer.chunk_bytes]
                yield pb.GradientRequest(chunk=tensor_pb2.Chunk(offset_bytes=offset, part=number, data=content))

    def _commit(self, lease: pb.Assignment, stats: list[pb.MicrobatchStats]) -> pb.CommitStepResponse:
        self._at = (lease.epoch, lease.step, "waiting")
        request = pb.CommitStepRequest(
            worker_id=self._id,
            epoch=lease.epoch,
            step=lease.step,
            attempt=lease.attempt,
            lease_id=lease.lease_id,
            kind=lease.kind,
            num_buckets=1,
            microbatches=stats,
            parameters_sha256=digest(self._parameters),
        )
        return self._stub.CommitStep(request, timeout=WAIT_S, metadata=self._metadata)


def position_of(lease: pb.Assignment, microbatch: int) -> int:
    """The position of a micro-batch's first sample."""
    return lease.position + microbatch * lease.num_samples // lease.num_microbatches


def reason(error: grpc.RpcError) -> str:
    """Why a call was refused; empty where the transport broke."""
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else {}
    return str(trailing.get("ayni-reason", ""))


def sentence(error: grpc.RpcError) -> str:
    """What a failed call says."""
    return f"{reason(error) or error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


def log(text: str) -> None:
    """One line for people."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Takes part in one run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ca", type=Path, help="PEM file of the authority; switches TLS on")
    given = parser.parse_args()
    token = given.token_file.read_text().strip()
    secure = grpc.ssl_channel_credentials(given.ca.read_bytes()) if given.ca else None
    address = given.coordinator
    with grpc.secure_channel(address, secure) if secure else grpc.insecure_channel(address) as channel:
        try:
            result = Worker(channel, token, given.name).run()
        except grpc.RpcError as error:
            log(sentence(error))
            return 1
        except RuntimeError as error:
            log(str(error))
            return 1
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
