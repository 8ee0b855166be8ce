"""What is simulated: workers, model, links, computing; and what each thing costs."""

import math
from dataclasses import asdict, dataclass

WIRES = {"float32": (4.0, 4.0), "bfloat16": (2.0, 2.0), "float16": (2.0, 2.0), "int8": (1 + 4 / 256, 2.0)}
"""Bytes of an element on its way in and of the mean on its way out, for each wire type. int8 has one float32 scale for
each 256 elements, and its mean travels as bfloat16."""
TOPOLOGIES = ("star", "sharded")
CHUNK_BYTES = 1 << 20
_LEAST_LEFT = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Processor seconds of one side, the coordinator's or a worker's.

    Attributes:
        step_s: once a step, however many workers there are.
        commit_s: for each worker: a lease, a commit and its answer.
        stream_s: for each contribution: a stream opened and closed.
        chunk_s: for each chunk of a contribution that comes, and goes out again in the mean.
        byte_s: for each of their bytes, in the same way.
        commit_square_s, stream_square_s: for each pair of workers; 0 where the cost is linear.
    """

    step_s: float = 0.0
    commit_s: float = 0.0
    stream_s: float = 0.0
    chunk_s: float = 0.0
    byte_s: float = 0.0
    commit_square_s: float = 0.0
    stream_square_s: float = 0.0

    def commit(self, workers: int) -> float:
        """Returns the seconds for one worker's lease, commit and answer, among so many."""
        return self.commit_s + self.commit_square_s * workers

    def stream(self, workers: int) -> float:
        """Returns the seconds for one worker's stream, among so many."""
        return self.stream_s + self.stream_square_s * workers

    def one_way(self, num_bytes: float, num_chunks: float) -> float:
        """Returns the seconds for bytes that come, or go."""
        return (self.byte_s * num_bytes + self.chunk_s * num_chunks) / 2

    def slowed(self, taken: float) -> "Share":
        """Returns the same where something else takes a part of the processor's time."""
        longer = 1 / max(_LEAST_LEFT, 1 - taken)
        return Share(**{name: seconds * longer for name, seconds in asdict(self).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What was measured.

    Attributes:
        coordinator: its processor time.
        worker: a worker's, without computing.
        store_s: a step waits so long for the disk.
        hop_s: a message waits so long for its receiver, besides what the network needs.
        beat_s: processor time of the coordinator for one heartbeat.
    """

    coordinator: Share
    worker: Share
    store_s: float = 0.0
    hop_s: float = 0.0
    beat_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """All on one host, as `tests/bench/scale.py` does it: so many cores, and workers in so many processes."""

    cores: int
    crews: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One run.

    Attributes:
        workers: number of them.
        elements: parameters of the model; 0: only leases and commits.
        wire: key of WIRES.
        topology: one of TOPOLOGIES.
        link: bytes a second of a worker's link, each way.
        coordinator_link: the same of the coordinator's.
        latency_s: from one host to another.
        compute_s: computing of one inner step.
        inner_steps: H: steps that a worker makes by itself before it exchanges; 1 exchanges each gradient.
        buckets: streams of each worker in a step, one for each part of the model.
        overlap: part of the computing time, at its end, in which the buckets become ready one after the other. Without
            influence with inner steps: their sum is there only after the last.
        beat_interval_s: from one heartbeat of a worker to the next.
        bench: everything on one host instead of one host for each.
    """

    workers: int
    elements: int
    wire: str = "float32"
    topology: str = "star"
    link: float = math.inf
    coordinator_link: float = math.inf
    latency_s: float = 0.0
    compute_s: float = 0.0
    inner_steps: int = 1
    buckets: int = 1
    overlap: float = 0.0
    beat_interval_s: float = math.inf
    bench: Bench | None = None

    @property
    def in_bytes(self) -> float:
        """Bytes of one worker's contribution."""
        return self.elements * WIRES[self.wire][0]

    @property
    def out_bytes(self) -> float:
        """Bytes of the mean."""
        return self.elements * WIRES[self.wire][1]

    @property
    def in_chunks(self) -> int:
        """Chunks of one worker's contribution, over all buckets."""
        return self.buckets * self._chunks(self.in_bytes)

    @property
    def out_chunks(self) -> int:
        """Chunks of the mean, over all buckets."""
        return self.buckets * self._chunks(self.out_bytes)

    @property
    def computing_s(self) -> float:
        """Computing of a whole step."""
        return self.compute_s * self.inner_steps

    def ready_s(self, bucket: int) -> float:
        """Returns when a bucket is ready, from the beginning of the step's computing."""
        during = self.compute_s * (self.overlap if self.inner_steps == 1 else 0.0)
        return self.computing_s - during * (1 - (bucket + 1) / self.buckets)

    def _chunks(self, num_bytes: float) -> int:
        return int(-(-num_bytes // (self.buckets * CHUNK_BYTES)))
