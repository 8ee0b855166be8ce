"""Others that keep training while workers die: torchft + DDP and Hivemind, each in an environment of its own."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.bench.churn_measure import Death, Line, Outcome, outcome_of
from tests.bench.peer_environments import PeerFailed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_POLL_S = 0.02
_START_S = 120.0
_SILENCE_S = 240.0
"""Without a step by anybody, the peer counts as stuck: longer than all of its own limits."""
_MOST_CRASHES = 10
_OVERDUE_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One of the others."""

    name: str
    package: str
    program: str
    address_flag: str
    flags: tuple[str, ...] = ()
    adds: str = ""

    @property
    def label(self) -> str:
        return self.package.replace("==", " ") + self.adds


PEERS = (
    Peer(name="torchft", package="torchft==0.2.0", program="churn_torchft.py", address_flag="--lighthouse"),
    Peer(
        name="torchft-ddp",
        package="torchft==0.2.0",
        program="churn_torchft.py",
        address_flag="--lighthouse",
        flags=("--ddp",),
        adds=" + DDP",
    ),
    Peer(name="hivemind", package="hivemind==1.1.12", program="churn_hivemind.py", address_flag="--peer"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Churn:
    """What all contenders are given."""

    steps: int
    workers: int
    every: int
    """Steps from death to death; 0 for none."""
    device_ms: float

    def deaths(self) -> list[tuple[int, str]]:
        """Returns after which step which worker is killed; none in the last ones, so that the run shows how it ends."""
        if not self.every:
            return []
        steps = range(self.every, self.steps - self.every // 2, self.every)
        return [(step, f"worker-{number % self.workers}") for number, step in enumerate(steps)]


def run_peer(peer: Peer, python: Path, tuned: bool, churn: Churn, folder: Path) -> Outcome:
    """Runs one peer through the schedule.

    Raises:
        PeerFailed: it got stuck.
    """
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        crew = _Crew(stack=stack, peer=peer, python=python, tuned=tuned, churn=churn, folder=folder)
        crew.start_all()
        deaths = [crew.kill_after(step, name) for step, name in churn.deaths()]
        crew.wait_for_end()
        lines = {name: crew.lines(name) for name in crew.names}
        return replace(outcome_of(lines, deaths), crashes=crew.crashes)


@dataclass
class _Crew:
    """The processes of one run of one peer."""

    stack: ExitStack
    peer: Peer
    python: Path
    tuned: bool
    churn: Churn
    folder: Path
    address: str = ""
    killed: set[int] = field(default_factory=set)
    """Process ids."""
    crashes: int = 0
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"worker-{number}" for number in range(self.churn.workers)]

    def start_all(self) -> None:
        first = self._start("first", [], stdout=subprocess.PIPE)
        assert first.stdout
        ready, _, _ = select.select([first.stdout], [], [], _START_S)
        line = first.stdout.readline().strip() if ready else ""
        if not line:
            raise PeerFailed(f"{self.peer.label} did not start; see {self.folder / 'first.log'}")
        # The lighthouse says the machine's name, which need not lead to loopback.
        host, colon, port = line.rpartition(":")
        self.address = f"http://127.0.0.1:{port}" if host.startswith("http://") and colon else line
        for name in self.names:
            self._start_worker(name)

    def kill_after(self, step: int, name: str) -> Death:
        """Kills a worker once others have made so many steps, and starts it again."""
        self._wait_until(lambda: self._reached(but=name) >= step, f"step {step}")
        process, moment = self.processes[name], time.time()
        self.killed.add(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _kill_group(process)
        self._start_worker(name)
        return Death(name=name, unix_time=moment)

    def wait_for_end(self) -> None:
        """Waits until every worker has said its parameters' hash, or is long overdue.

        Who comes back late finds nobody any more, and would train alone for as long as the whole run.
        """

        def ended() -> bool:
            ends = [lines[-1].time for lines in map(self.lines, self.names) if lines and lines[-1].sha256]
            return len(ends) == len(self.names) or bool(ends and time.time() > min(ends) + _OVERDUE_S)

        self._wait_until(ended, "the end")

    def lines(self, name: str) -> list[Line]:
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [Line(**json.loads(line)) for line in whole.splitlines()]

    def _reached(self, but: str) -> int:
        return max((line.step + 1 for name in self.names if name != but for line in self.lines(name)), default=0)

    def _wait_until(self, reached: Callable[[], bool], what: str) -> None:
        newest, since = 0.0, time.monotonic()
        while not reached():
            self._start_again()
            moment = max((lines[-1].time for lines in map(self.lines, self.names) if lines), default=0.0)
            if moment > newest:
                newest, since = moment, time.monotonic()
            if time.monotonic() - since > _SILENCE_S:
                raise PeerFailed(
                    f"{self.peer.label} made no step for {_SILENCE_S:g} s before {what}; see {self.folder}"
                )
            select.select([], [], [], _POLL_S)

    def _start_again(self) -> None:
        """Starts survivors again that have crashed, as a supervisor would; when all have, their state is lost."""
        for name in self.names:
            process, lines = self.processes[name], self.lines(name)
            if process.poll() and process.pid not in self.killed and not (lines and lines[-1].sha256):
                self.crashes += 1
                if self.crashes > _MOST_CRASHES:
                    raise PeerFailed(f"{self.peer.label}: survivors crash after each death; see {self.folder}")
                self._start_worker(name)

    def _start_worker(self, name: str) -> None:
        self.processes[name] = self._start(name, [self.peer.address_flag, self.address, *self.peer.flags])

    def _start(self, name: str, flags: Sequence[str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
        churn = self.churn
        command = [
            *(str(self.python), str(HERE / self.peer.program), "--name", name, "--workers", str(churn.workers)),
            *("--steps", str(churn.steps), "--device-ms", str(churn.device_ms)),
            *("--output", str(self.folder / f"{name}.jsonl"), *(["--tuned"] if self.tuned else []), *flags),
        ]
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,
            )
        self.stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen) -> None:
    _kill_group(process)
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def _kill_group(process: subprocess.Popen) -> None:
    """Kills what a worker has started (Hivemind has a daemon and helpers), as a machine takes all along that dies."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
