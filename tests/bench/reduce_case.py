"""One case of the all-reduce bench: real processes that take part in each contender's work, and what they found."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench import processes
from tests.bench.bare_grpc import KINDS
from tests.bench.processes import BenchFailed, Program

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "exchange_worker.py"
WARM_UP = 2
"""Repetitions that don't count."""
TIMEOUT = 600.0
UP_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1 + 4 / 256}
"""Bytes of an element of a contribution on the wire; int8 has a scale of 4 bytes for each 256 of them."""
DOWN_BYTES = {**UP_BYTES, "int8": 2.0}
"""Bytes of an element of the mean."""
PATHS = ("shm", "grpc")
TOPOLOGIES = ("star", "sharded", "torch")


@dataclass(frozen=True, kw_only=True)
class Case:
    workers: int
    numel: int
    repeat: int
    wire: str
    path: str
    """"shm" or "grpc"; with topology "torch" nothing goes through shared memory."""
    topology: str = "star"
    """"star", "sharded" or "torch"."""

    def __str__(self) -> str:
        way = self.path if self.topology == "star" else self.topology
        if self.topology != "star" and self.path == "shm":
            way += " shm"
        return f"{self.numel:,} {self.wire} {way}, {self.workers} workers"

    @property
    def up_bytes(self) -> float:
        """A contribution, as it travels."""
        return self.numel * UP_BYTES[self.wire]

    @property
    def down_bytes(self) -> float:
        """The mean, as it travels."""
        return self.numel * DOWN_BYTES[self.wire]

    @property
    def share_abroad(self) -> float:
        """Of a worker's vector, what travels: all of it to a coordinator, not its own slice among workers."""
        return 1.0 if self.topology == "star" else (self.workers - 1) / self.workers

    @property
    def wire_bytes(self) -> float:
        """What moves in all: every worker's vector to where it is reduced, and the mean back to every worker."""
        return self.workers * self.share_abroad * (self.up_bytes + self.down_bytes)

    @property
    def run(self) -> dict[str, object]:
        """What the run file says."""
        return {
            "run_id": "bench",
            "min_workers": self.workers,
            "num_steps": WARM_UP + self.repeat,
            "wire_type": self.wire,
            "topology": self.topology,
        }


def measure(case: Case) -> list[dict]:
    """What each worker printed.

    Raises:
        BenchFailed: a worker failed, two hold different means, or gradients went another way than they should.
    """
    print(f"{case}: {WARM_UP} + {case.repeat} repetitions", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name, processes.coordinator(Path(name), case.run) as served:
        folder = Path(name)
        flags = {"--coordinator": served.word(), "--coordinator-pid": served.pid, **_flags(case, folder)}
        with ExitStack() as stack:
            # Bare gRPC moves what a star does.
            is_compared = (case.topology, case.path) == ("star", "grpc")
            bare = list(_bare_servers(stack, folder)) if is_compared else []
            shared = [*(str(word) for pair in flags.items() for word in pair), *(["--bare", *bare] if bare else [])]
            arguments = [[*shared, "--rank", str(rank)] for rank in range(case.workers)]
            started = stack.enter_context(processes.workers(PROGRAM, arguments, folder))
            results = processes.finish(started, TIMEOUT)
    check(case, results)
    return results


def check(case: Case, results: list[dict]) -> None:
    """Raises BenchFailed when the means differ, or the bytes did not go where the case says."""
    if len({result["mean_sha256"] for result in results}) > 1:
        raise BenchFailed(f"{case}: the workers hold different means")
    abroad = int((WARM_UP + case.repeat) * case.up_bytes * case.share_abroad)
    for result in results:
        sent = result["traffic"]["sent_bytes"]
        if (sent > abroad // 2) != (case.path == "grpc" and case.topology != "torch"):
            raise BenchFailed(f"{case}: {sent:,} bytes left over gRPC; of the vectors, {abroad:,} have to travel")


def _flags(case: Case, folder: Path) -> dict[str, object]:
    return {
        "--store": folder / "store",
        "--workers": case.workers,
        "--numel": case.numel,
        "--warm-up": WARM_UP,
        "--repeat": case.repeat,
        "--wire": case.wire,
        "--path": case.path,
        "--topology": case.topology,
    }


def _bare_servers(stack: contextlib.ExitStack, folder: Path) -> Iterator[str]:
    for kind in KINDS:
        program = stack.enter_context(Program.start(f"bare {kind}", [str(HERE / "bare_grpc.py"), kind], folder))
        yield f"{kind}={program.word()}={program.pid}"
