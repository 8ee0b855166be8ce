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


@dataclass(frozen=True, kw_only=True)
class Case:
    workers: int
    numel: int
    repeat: int
    wire: str
    path: str
    """"shm" or "grpc"."""

    def __str__(self) -> str:
        return f"{self.numel:,} {self.wire} {self.path}, {self.workers} workers"

    @property
    def up_bytes(self) -> float:
        """A contribution, as it travels."""
        return self.numel * UP_BYTES[self.wire]

    @property
    def down_bytes(self) -> float:
        """The mean, as it travels."""
        return self.numel * DOWN_BYTES[self.wire]

    @property
    def wire_bytes(self) -> float:
        """What a star moves: every worker's vector in, the mean out to every worker."""
        return self.workers * (self.up_bytes + self.down_bytes)


def measure(case: Case) -> list[dict]:
    """What each worker printed.

    Raises:
        BenchFailed: a worker failed, two hold different means, or gradients went another way than they should.
    """
    print(f"{case}: {WARM_UP} + {case.repeat} repetitions", file=sys.stderr)
    steps = WARM_UP + case.repeat
    run = {"min_workers": case.workers, "num_steps": steps, "wire_type": case.wire, "run_id": "bench"}
    with tempfile.TemporaryDirectory() as name, processes.coordinator(Path(name), run) as served:
        folder = Path(name)
        flags = {"--coordinator": served.word(), "--coordinator-pid": served.pid, **_flags(case, folder)}
        with ExitStack() as stack:
            bare = list(_bare_servers(stack, folder)) if case.path == "grpc" else []
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
    vectors = int((WARM_UP + case.repeat) * case.up_bytes)
    for result in results:
        sent = result["traffic"]["sent_bytes"]
        if (sent > vectors // 2) != (case.path == "grpc"):
            raise BenchFailed(f"{case}: {sent:,} bytes left over gRPC; the vectors have {vectors:,}")


def _flags(case: Case, folder: Path) -> dict[str, object]:
    return {
        "--store": folder / "store",
        "--workers": case.workers,
        "--numel": case.numel,
        "--warm-up": WARM_UP,
        "--repeat": case.repeat,
        "--wire": case.wire,
        "--path": case.path,
    }


def _bare_servers(stack: contextlib.ExitStack, folder: Path) -> Iterator[str]:
    for kind in KINDS:
        program = stack.enter_context(Program.start(f"bare {kind}", [str(HERE / "bare_grpc.py"), kind], folder))
        yield f"{kind}={program.word()}={program.pid}"
