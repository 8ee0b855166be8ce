"""A worker that reduces slices for others, to be fuzzed, and a member of its group who has begun to contribute."""

import contextlib
import json
import queue
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import grpc
from google.protobuf.descriptor import MethodDescriptor

from ayni.channels import open_sync_channel
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import peer_pb2, tensor_pb2
from tests.support.coordinator import TOKEN, environment
from tests.support.fuzz_calls import Base, Ended, Waiting, path_of
from tests.support.fuzz_peer_process import ATTEMPT, CHUNK_BYTES, EPOCH, NUM_MICROBATCHES, SECRET, STEP
from tests.support.fuzz_servers import check_health

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"]
SIZE = 2 * CHUNK_BYTES // 4 + 9
"""Elements of the buckets that the fuzzer speaks of: three chunks."""

_REDUCE = SERVICE.methods_by_name["ReduceSlice"]
_START_S, _ANSWER_S = 60.0, 20.0
_GENERATION_BURSTS = 12
"""Bursts with calls that were taken after which there is a new group: else everything is soon contributed."""
_AFTER_BEGIN = {"BAD_CHUNK", "NON_FINITE", "CHECKSUM", "BAD_REQUEST", "ROUND_RESTARTED", "STALE_EPOCH"}
"""Refusals of a later frame: what came before it was taken."""
_METADATA = (("ayni-group", SECRET),)
_RESIDENT, _LEASE = 2, 102
"""Worker that has contributed half of the flat bucket, and waits for its mean; the lease that it has."""


class FuzzedPeer:
    """Worker "ant" in a group of three, whose other members the fuzzer plays."""

    methods: ClassVar = {path_of(_REDUCE): _REDUCE}
    name = "worker that reduces slices"

    def __init__(self, folder: Path) -> None:
        self.hints: dict[str, list[Any]] = {}
        folder.mkdir(parents=True)
        self._log = folder / "log"
        with self._log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fuzz_peer_process"],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.address = self._line(_START_S).split()[-1]
        self.channel = open_sync_channel(self.address, TOKEN)
        self._generation, self._taken = 0, 0
        self._resident: Any = None
        self._open()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.channel.close()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def bases(self, method: MethodDescriptor) -> list[Base]:
        return [
            Base(frames=[_begin(begin), *_chunks(begin)], metadata=_METADATA)
            for begin in (
                self.begin(1, 101, range(0, 1)),
                self.begin(1, 101, range(0, 2)),
                self.begin(1, 103, range(1, 2)),
                self.begin(1, 101, range(0)),
                self.begin(1, 101, range(NUM_MICROBATCHES), pb.BucketName(block_index=1)),
                self.begin(_RESIDENT, _LEASE, range(2, 4)),
            )
        ]

    def begin(
        self, worker_id: int, lease_id: int, microbatches: range, bucket: pb.BucketName | None = None
    ) -> peer_pb2.SliceBegin:
        """Returns what a worker says first when it contributes."""
        round_ = pb.RoundBegin(
            worker_id=worker_id,
            epoch=EPOCH,
            step=STEP,
            attempt=ATTEMPT,
            lease_id=lease_id,
            tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, num_elements=SIZE),
            microbatches=[pb.MicrobatchStats(microbatch=m, weight=2, loss_sum=2.0) for m in microbatches],
        )
        return peer_pb2.SliceBegin(
            round=round_,
            generation=self._generation,
            bucket=bucket or pb.BucketName(flat=True),
            num_elements=SIZE,
            takes_mean=True,
        )

    def snapshot(self) -> dict[str, object]:
        return self._ask("state")

    def may_change(self, ended: Ended) -> bool:
        return bool(ended.responses) or (len(ended.call.requests) > 1 and ended.reason in _AFTER_BEGIN)

    def good_call(self) -> None:
        check_health(self.address)
        start: Any = self.channel.stream_stream(path_of(_REDUCE))
        self._open()
        begin = self.begin(1, 109, range(NUM_MICROBATCHES), pb.BucketName(block_index=0))
        frames = [frame.SerializeToString() for frame in (_begin(begin), *_chunks(begin))]
        begun = start(iter(frames), timeout=_ANSWER_S, metadata=_METADATA)
        answers = [peer_pb2.ReduceSliceResponse.FromString(answer) for answer in begun]
        assert answers[-1].HasField("complete"), answers
        assert sum(len(answer.chunk.data) for answer in answers) == SIZE * 4
        self._open()

    def renew(self) -> bool:
        assert self._process.poll() is None, f"the process died:\n{self.log[-3000:]}"
        self._taken += 1
        if self._taken % _GENERATION_BURSTS:
            return False
        self._open()
        return True

    def _open(self) -> None:
        """Begins a generation, in which a member has contributed a part and waits for the rest."""
        self._generation += 1
        self._ask(f"open {self._generation}")
        if self._resident is not None:
            self._resident.cancel()
        begin = self.begin(_RESIDENT, _LEASE, range(2, 4))
        frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for frame in (_begin(begin), *_chunks(begin)):
            frames.put(frame.SerializeToString())
        start: Any = self.channel.stream_stream(path_of(_REDUCE))
        self._resident = start(iter(frames.get, None), metadata=_METADATA)
        threading.Thread(target=_follow, args=(self._resident, frames), daemon=True).start()
        while not any(f"{_LEASE} of" in one for one in self._streams()) or self._emitting():
            select.select([], [], [], 0.002)
        self._tell()

    def _streams(self) -> list[str]:
        flat = self._ask("state")["rounds"].get("flat", {})
        return list(flat.get("streams", []))

    def _emitting(self) -> bool:
        """Whether something of the member's contribution is still on its way."""
        return bool(self._ask("state")["rounds"]["flat"]["held_bytes"] != SIZE * 4)

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(_ANSWER_S))
        return answer

    def _line(self, within_s: float) -> str:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], within_s)
        line = self._process.stdout.readline() if ready else ""
        assert line, f"no answer:\n{self.log[-3000:]}"
        return line

    def _tell(self) -> None:
        self.hints |= {
            "waiting": [Waiting(methods=frozenset({"ReduceSlice"}))],
            "metadata": [_METADATA, _METADATA, (), (("ayni-group", "wrong"),), (("ayni-group", "x" * 2_000),)],
            "worker_id": [0, 1, 2, 77],
            "epoch": [EPOCH],
            "step": [STEP],
            "attempt": [ATTEMPT],
            "lease_id": [100, 101, _LEASE, 103],
            "generation": [self._generation, self._generation, self._generation + 1, max(1, self._generation - 1)],
            "dtype": [tensor_pb2.DTYPE_FLOAT32],
            "SliceBegin.num_elements": [SIZE, 9, 1 << 32],
            "TensorSpec.num_elements": [SIZE, SIZE, 9, 1 << 32],
            "first_element": [0, 65536],
            "microbatch": list(range(NUM_MICROBATCHES)),
            "weight": [0, 1, 2],
            "block_index": [0, 1, 2],
            "part": [0, 1],
            "offset_bytes": [0, CHUNK_BYTES, 2 * CHUNK_BYTES],
            "Chunk.data": [bytes(CHUNK_BYTES), bytes(36), b"\0\0\xc0\x7f" * (CHUNK_BYTES // 4)],
        }


def _begin(begin: peer_pb2.SliceBegin) -> peer_pb2.ReduceSliceRequest:
    return peer_pb2.ReduceSliceRequest(begin=begin)


def _chunks(begin: peer_pb2.SliceBegin) -> list[peer_pb2.ReduceSliceRequest]:
    """Returns the gradient of its only part, chunk by chunk."""
    if not begin.round.microbatches:
        return []
    starts = range(0, SIZE * 4, CHUNK_BYTES)
    chunks = [tensor_pb2.Chunk(offset_bytes=at, data=bytes(min(CHUNK_BYTES, SIZE * 4 - at))) for at in starts]
    return [peer_pb2.ReduceSliceRequest(chunk=chunk) for chunk in chunks]


def _follow(stream: Any, frames: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(grpc.RpcError):
        for _ in stream:
            pass
    frames.put(None)
