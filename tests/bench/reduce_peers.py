"""The same vectors averaged by others: torchft, Hivemind and Flower, each in an environment of its own."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peer_environments import TORCH, PeerFailed
from tests.bench.reduce_case import WARM_UP, Case

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_START_S = 120.0
_TURN_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One of the others."""

    name: str
    package: str
    program: str
    what: str
    """What a turn consists of."""
    goal: float
    """What the ratio of our time to theirs may be."""
    with_control: bool = False
    """Whether a turn has the control of a step in it, as our commit is the control of ours."""
    first_drives: bool = False
    """Whether the first process, not the workers, does what it is told."""
    others: tuple[str, ...] = (TORCH, "numpy")

    @property
    def label(self) -> str:
        return f"{self.package.replace('==', ' ')}, {self.what}"


PEERS = (
    Peer(
        name="torchft",
        package="torchft==0.2.0",
        program="reduce_torchft.py",
        what="exchange and control",
        goal=0.4,
        with_control=True,
    ),
    Peer(
        name="hivemind",
        package="hivemind==1.1.12",
        program="reduce_hivemind.py",
        what="all-reduce of a group that is found",
        goal=0.1,
    ),
    Peer(
        name="flower",
        package="flwr==1.42.0",
        program="reduce_flower.py",
        what="fit round",
        goal=0.1,
        first_drives=True,
        others=("numpy",),
    ),
)


def run_peer(peer: Peer, python: Path, case: Case, folder: Path) -> list[list[dict]]:
    """Returns what each process that takes turns said, turn by turn, without those that don't count.

    Raises:
        PeerFailed: it got stuck, or a mean is wrong.
    """
    folder.mkdir(parents=True)
    print(f"{peer.label}: {case.numel:,} float32, {case.workers} workers", file=sys.stderr)
    with ExitStack() as stack:
        crew = _Crew(stack, peer, python, case, folder)
        first = crew.start("first")
        address = _reachable(crew.line(first, _START_S))
        flags = [("--address", address, "--rank", str(rank)) for rank in range(case.workers)]
        workers = [crew.start(f"worker-{rank}", own) for rank, own in enumerate(flags)]
        drivers = [first] if peer.first_drives else workers
        turns = [crew.turn(drivers) for _ in range(WARM_UP + case.repeat)]
    return [list(said) for said in zip(*turns[WARM_UP:], strict=True)]


@dataclass
class _Crew:
    """The processes of one case."""

    stack: ExitStack
    peer: Peer
    python: Path
    case: Case
    folder: Path

    def start(self, name: str, flags: Sequence[str] = ()) -> subprocess.Popen:
        case = self.case
        counts = {"--workers": case.workers, "--numel": case.numel, "--turns": WARM_UP + case.repeat}
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [
                    *(str(self.python), str(HERE / self.peer.program)),
                    *(str(word) for pair in counts.items() for word in pair),
                    *flags,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        self.stack.callback(_end, process)
        return process

    def turn(self, drivers: Sequence[subprocess.Popen]) -> list[dict]:
        """Has all do one turn at the same time."""
        for process in drivers:
            assert process.stdin
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failed() from None
        return [json.loads(self.line(process, _TURN_S)) for process in drivers]

    def line(self, process: subprocess.Popen, seconds: float) -> str:
        """Waits for the next line of a process."""
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line: str = process.stdout.readline().strip() if ready else ""
        if not line:
            raise self._failed()
        return line

    def _failed(self) -> PeerFailed:
        tails = [f"{log.name}: {log.read_text()[-400:].strip()}" for log in sorted(self.folder.glob("*.log"))]
        return PeerFailed(f"{self.peer.label} ended or got stuck\n" + "\n".join(tails))


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
    # Nothing is told to anybody outside.
    "FLWR_TELEMETRY_ENABLED": "0",
}


def _reachable(line: str) -> str:
    """Returns an address on loopback: a lighthouse says the machine's name, which need not lead there."""
    host, colon, port = line.rpartition(":")
    return f"http://127.0.0.1:{port}" if host.startswith("http://") and colon else line


def _end(process: subprocess.Popen) -> None:
    """Ends a process and what it has started: Hivemind has a daemon and helpers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass
    process.stdout.close()
