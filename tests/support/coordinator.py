"""Starts real coordinator processes, and talks to them frame by frame."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from ayni import PROTOCOL_VERSION, frames
from ayni.channels import HeaderChannel, open_channel
from ayni.errors import AyniError
from ayni.rpc import error_from
from ayni.tree import cover
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc, tensor_pb2

TOKEN = "a-token-for-tests-only"
ROOT = Path(__file__).parents[2]
START_TIMEOUT = 60.0


@dataclass
class CoordinatorProcess:
    address: str
    process: subprocess.Popen
    log: Path
    folder: Path

    def read_log(self) -> str:
        return self.log.read_text()

    def wait_for_log(self, text: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.read_log():
            assert self.process.poll() is None or text in self.read_log(), f"ended without {text!r}:\n{self.read_log()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s in:\n{self.read_log()}"
            select.select([], [], [], 0.02)


def environment(**extra: str) -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
    return {**os.environ, "PYTHONPATH": paths, "AYNI_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **extra}


@contextlib.contextmanager
def coordinator(folder: Path, run: dict, *flags: str, failpoints: str = "") -> Iterator[CoordinatorProcess]:
    """A coordinator process on a free loopback port; killed at the end if it is still there.

    `failpoints` is what AYNI_FAILPOINTS says to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "run.yaml", folder / "coordinator.log"
    config.write_text(yaml.safe_dump({"state_dir": str(folder / "state"), **run}))
    command = [sys.executable, "-m", "coordinator_service", "--config", str(config), *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(AYNI_FAILPOINTS=failpoints),
            cwd=folder,
        )
    try:
        yield CoordinatorProcess(_address(process, log), process, log, folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def _address(process: subprocess.Popen, log: Path) -> str:
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT)
    line = process.stdout.readline() if ready else ""
    assert line.startswith("listening on "), f"the coordinator did not start: {line!r}\n{log.read_text()}"
    return line.split()[-1]


@dataclass
class RawWorker:
    """A worker made of generated stubs and hand-made frames, so that it can misbehave."""

    channel: HeaderChannel
    stub: Any
    name: str
    worker_id: int = -1
    stream: Any = None
    assignment: pb.Assignment = field(default_factory=pb.Assignment)
    num_buckets: int = 0
    """What a contribution says about the buckets of the step; 0 for nothing."""

    async def join(self, **fields: object) -> pb.JoinResponse:
        request: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "worker_name": self.name,
            "join_nonce": self.name,
        }
        answer = await self.stub.Join(pb.JoinRequest(**{**request, "backend": "cpu", **fields}), timeout=20)
        self.worker_id = answer.worker_id
        self.channel.headers["ayni-session"] = answer.session
        return answer

    def open_assignments(self, sha256: str = "") -> None:
        request = pb.ShardAssignmentRequest(worker_id=self.worker_id, parameters_sha256=sha256)
        self.stream = self.stub.ShardAssignment(request)

    async def next_frame(self, *, waiting: bool = False) -> pb.ShardAssignmentResponse:
        assert self.stream is not None
        while True:
            async with asyncio.timeout(20):
                frame = await self.stream.read()
            assert frame is not grpc.aio.EOF, "the assignment stream ended"
            if frame.WhichOneof("frame") == "assignment":
                self.assignment = frame.assignment
            if waiting or frame.WhichOneof("frame") != "waiting":
                return frame

    def stats(self, weights: dict[int, int], loss: float = 1.0) -> list[pb.MicrobatchStats]:
        return [
            pb.MicrobatchStats(microbatch=m, weight=w, loss_sum=loss * w, num_correct=w, num_predictions=w)
            for m, w in weights.items()
        ]

    def begin(self, weights: dict[int, int], num_elements: int, **changes: object) -> pb.RoundBegin:
        a = self.assignment
        fields: dict[str, Any] = {
            "worker_id": self.worker_id,
            "epoch": a.epoch,
            "step": a.step,
            "attempt": a.attempt,
            "lease_id": a.lease_id,
            "tensor": tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, num_elements=num_elements),
            "microbatches": self.stats(weights),
            "num_buckets": self.num_buckets,
        }
        return pb.RoundBegin(**{**fields, **changes})

    @property
    def leased(self) -> range:
        return range(self.assignment.microbatch_start, self.assignment.microbatch_stop)

    def open_gradient(self, method: str = "Gradient") -> grpc.aio.StreamStreamCall:
        return self.channel.stream_stream(f"/ayni.v1.CoordinatorService/{method}")(timeout=60)

    async def reduce(self, parts: Sequence[np.ndarray], weights: dict[int, int]) -> tuple[np.ndarray, pb.RoundComplete]:
        """Contributes whole parts to the flat bucket and returns the mean and the last frame."""
        size = parts[0].size if parts else 0
        call = self.open_gradient()
        begin = pb.GradientBegin(round=self.begin(weights, size))
        await call.write(pb.GradientRequest(begin=begin).SerializeToString())
        accepted = pb.GradientResponse.FromString(await self._read(call)).accepted
        writer = asyncio.create_task(self.send(call, parts, accepted.chunk_bytes))
        mean = np.empty(size, np.float32)
        while True:
            number, content = frames.decode_frame(await self._read(call))
            if not isinstance(content, frames.ChunkView):
                assert number == 3
                await writer
                return mean, pb.RoundComplete.FromString(bytes(content))
            start = content.offset_bytes // 4
            mean[start : start + len(content.data) // 4] = np.frombuffer(content.data, np.float32)

    async def send(self, call: grpc.aio.StreamStreamCall, parts: Sequence[np.ndarray], chunk_bytes: int) -> None:
        step = chunk_bytes // 4
        for start in range(0, parts[0].size, step):
            for part, values in enumerate(parts):
                payload = values[start : start + step].tobytes()
                await call.write(frames.encode_chunk(frames.CHUNK_FIELD, start * 4, part, payload))
        await call.done_writing()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> bytes:
        async with asyncio.timeout(30):
            frame: Any = await call.read()
        if frame is grpc.aio.EOF:
            await _raise_status(call)
        return frame

    def commit_request(self, weights: dict[int, int], num_buckets: int = 1, **changes: object) -> pb.CommitStepRequest:
        a = self.assignment
        fields: dict[str, Any] = {
            "worker_id": self.worker_id,
            "epoch": a.epoch,
            "step": a.step,
            "attempt": a.attempt,
            "lease_id": a.lease_id,
            "kind": a.kind,
            "num_buckets": num_buckets,
            "microbatches": self.stats(weights),
        }
        return pb.CommitStepRequest(**{**fields, **changes})

    async def commit(self, weights: dict[int, int], num_buckets: int = 1, **changes: object) -> pb.CommitStepResponse:
        return await self.stub.CommitStep(self.commit_request(weights, num_buckets, **changes), timeout=30)

    async def leave(self, reason: str = "") -> None:
        await self.stub.Leave(pb.LeaveRequest(worker_id=self.worker_id, reason=reason), timeout=20)


async def _raise_status(call: grpc.aio.StreamStreamCall) -> None:
    code, details = await call.code(), await call.details()
    raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details=details)


@contextlib.asynccontextmanager
async def raw_worker(address: str, name: str, token: str = TOKEN) -> AsyncIterator[RawWorker]:
    async with open_channel(address, token) as channel:
        worker = RawWorker(channel, coordinator_pb2_grpc.CoordinatorServiceStub(channel), name)
        yield worker
        if worker.stream is not None:
            worker.stream.cancel()


@contextlib.asynccontextmanager
async def raw_workers(address: str, *names: str) -> AsyncIterator[list[RawWorker]]:
    """Workers that have joined and hold their first assignment."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(raw_worker(address, name)) for name in names]
        for worker in workers:
            await worker.join()
            worker.open_assignments()
        for worker in workers:
            assert (await worker.next_frame()).WhichOneof("frame") == "assignment"
        yield workers


def parts_of(worker: RawWorker, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sums of micro-batch gradients over the nodes of the worker's lease."""

    def total(start: int, stop: int) -> np.ndarray:
        if stop - start == 1:
            return gradients[start]
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        return total(start, middle) + total(middle, stop)

    nodes = cover(worker.leased.start, worker.leased.stop, worker.assignment.num_microbatches)
    return [total(node.start, node.stop) for node in nodes]


RUN: dict[str, Any] = {
    "run_id": "raw",
    "num_steps": 2,
    "min_workers": 2,
    "batch": {"samples": 10, "microbatches": 5},
    "timeouts": {"shutdown": "1s"},
}
"""A run of two steps for raw workers."""

SIZE = 700_000


def refusal(caught: pytest.ExceptionInfo) -> AyniError:
    error = error_from(caught.value)
    assert error is not None, f"a bare {caught.value.code()}: {caught.value.details()}"
    return error


def microbatches(num: int, size: int = SIZE) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(num)]


async def make_step(workers, gradients):
    """Contributes, checks that all see the same mean, commits; returns the mean and the commits."""
    weights = [{m: 2 for m in worker.leased} for worker in workers]
    results = await asyncio.gather(
        *(w.reduce(parts_of(w, gradients), own) for w, own in zip(workers, weights, strict=True))
    )
    assert len({mean.tobytes() for mean, _ in results}) == 1
    commits = await asyncio.gather(*(w.commit(own) for w, own in zip(workers, weights, strict=True)))
    assert len({commit.SerializeToString() for commit in commits}) == 1
    return results[0][0], results[0][1], commits[0]
