"""Real agents that serve blocks: started, killed, stopped and started again, and looked at without being asked."""

import atexit
import contextlib
import functools
import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from tests.support.coordinator import environment
from tests.support.seaweedfs import CREDENTIALS
from worker_agent.blocks.geometry import Geometry
from worker_agent.layouts_file import LayoutEntry

START_S = 60.0
SOON_S = 20.0
"""Longest wait for what should take moments."""

CONNECT_S = 2.0
"""Longest time that an agent takes to connect to a group."""

HEAD_SIZE, PAGE_SIZE, NUM_LAYERS = 32, 16, 2

_BAD_LINES = re.compile(r"Traceback|Task was destroyed|never retrieved|was never awaited| ERROR |ResourceWarning")


def device_entry(num_heads: int, num_blocks: int = 16) -> LayoutEntry:
    """The layout that an agent starts with; lower tiers take their shape from it. 4 KiB a block for each head."""
    return LayoutEntry(
        num_blocks=num_blocks,
        num_layers=NUM_LAYERS,
        page_size=PAGE_SIZE,
        inner_dim=num_heads * HEAD_SIZE,
        num_heads=num_heads,
    )


class ServeAgent:
    """One process `python -m worker_agent serve`. Started again it has the same folder and port."""

    def __init__(self, name: str, folder: Path, entry: LayoutEntry, *flags: str, **variables: str) -> None:
        self.name, self.folder = name, folder
        self.entry = entry
        self._flags, self._variables = flags, variables
        self._listen = "127.0.0.1:0"
        self._log_seen = 0
        folder.mkdir(parents=True)
        (folder / "layouts.yaml").write_text(yaml.safe_dump({"model": "test", "layouts": [asdict(entry)]}))
        self.process: subprocess.Popen | None = None

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def address(self) -> str:
        return self._listen

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self) -> None:
        """Starts the process; `wait_until_ready` waits for it, so that several can start at a time."""
        assert not self.is_running
        flags = [*("--layouts", "layouts.yaml", "--listen", self._listen, "--blocks-root", "root"), *self._flags]
        flags += ["--blocks-connect-timeout", f"{CONNECT_S:g}s"]
        command = [sys.executable, "-m", "worker_agent", "serve", *flags]
        with self._log.open("a") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment(**self._variables),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def wait_until_ready(self) -> None:
        assert self.process
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else ""
        self.process.stdout.close()
        assert line.startswith("listening on "), f"{self.name} did not start: {line!r}\n{self.log()}"
        self._listen = line.split()[-1]

    def restart(self) -> None:
        """Starts it again after its end."""
        self.launch()
        self.wait_until_ready()

    def kill(self) -> None:
        """Kills it; it is gone on return."""
        assert self.process
        self.process.kill()
        self.process.wait(SOON_S)

    def end(self) -> int:
        """Tells it to end, and returns its exit code."""
        assert self.process
        self.process.terminate()
        return self.process.wait(SOON_S)

    def stop(self) -> None:
        """Stops all of its threads where they are; they stand on return."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: self._states() == {"T"}, "the process to stand still")

    def go_on(self) -> None:
        """Lets it run; does nothing once it has ended."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stands still as long as the context lasts; may be killed meanwhile."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self.is_running:
            self.kill()

    def log(self) -> str:
        return self._log.read_text()

    def check_log(self) -> None:
        """Fails if there is a line in the log, since the last look, that no fault may lead to."""
        text = self.log()
        new, self._log_seen = text[self._log_seen :], len(text)
        assert not _BAD_LINES.search(new), f"{self.name} logged:\n{new}"

    def open_files(self) -> list[str]:
        """What its descriptors are, without numbers that change."""
        return sorted(re.sub(r"\d+", "N", target) for _, target in self._descriptors())

    def num_mappings(self) -> int:
        """How many pieces of shared memory it has mapped, its own and those of others."""
        return Path(f"/proc/{self.pid}/maps").read_text().count("/memfd:ayni-")

    def view(self, geometry: Geometry) -> np.ndarray:
        """The blocks of a layout in memory, as they lie in the process's own memory now, shape [B, n], read-only.

        The process does not notice and may stand still. Of several layouts of one size the newest is meant.
        """
        size = sum(-(-each // mmap.PAGESIZE) * mmap.PAGESIZE for each in geometry.allocation_bytes)
        found = [
            path
            for path, target in sorted(self._descriptors(), key=lambda one: int(one[0].name))
            if target.startswith("/memfd:ayni-blocks ") and path.stat().st_size == size
        ]
        assert found, f"{self.name} has no pool of {size} bytes"
        with found[-1].open("rb") as file:
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        config = geometry.config
        return np.frombuffer(mapped, np.uint8)[: config.total_bytes].reshape(config.num_blocks, config.block_bytes)

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def _descriptors(self) -> Iterator[tuple[Path, str]]:
        """What is open now, and what it is."""
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield path, os.readlink(path)

    def _states(self) -> set[str]:
        """States of its threads, as in man proc."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}


def wait_until(condition: Callable[[], bool], what: str, within_s: float = SOON_S) -> None:
    """Waits for something that nobody tells of."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s:g} s in vain for {what}"
        select.select([], [], [], 0.002)


class Crew:
    """Agents that tests have in common: they are started when first asked for, and again when a test killed them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ayni-crew-"))
        self.runtime = self.folder / "run"
        self.runtime.mkdir(mode=0o700)
        self._agents: dict[str, ServeAgent] = {}
        self._epoch = 0

    @property
    def sockets(self) -> list[str]:
        """Names of the sockets of shared memory."""
        return sorted(path.name for path in (self.runtime / "ayni").glob("*"))

    def next_epoch(self) -> int:
        """An agent serves no epoch below the newest that it has seen."""
        self._epoch += 1
        return self._epoch

    def agents(self, kind: str, count: int, num_heads: int, *flags: str) -> list[ServeAgent]:
        """Running agents; the same ones for the same kind."""
        agents = [self._agent(f"{kind}-{number}", num_heads, flags) for number in range(count)]
        self.ready(agents)
        return agents

    def quarters(self) -> list[ServeAgent]:
        """Four agents with a quarter of the heads each."""
        return self.agents("quarter", 4, 2)

    def halves(self) -> list[ServeAgent]:
        """Two agents with half of the heads each."""
        return self.agents("half", 2, 4)

    def ready(self, agents: Sequence[ServeAgent]) -> None:
        """Starts those that do not run, all at the same time."""
        ended = [agent for agent in agents if not agent.is_running]
        for agent in ended:
            agent.launch()
        for agent in ended:
            agent.wait_until_ready()

    def close(self) -> None:
        for agent in self._agents.values():
            agent.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _agent(self, name: str, num_heads: int, flags: Sequence[str]) -> ServeAgent:
        if name not in self._agents:
            variables = {"XDG_RUNTIME_DIR": str(self.runtime), **CREDENTIALS}
            self._agents[name] = ServeAgent(name, self.folder / name, device_entry(num_heads), *flags, **variables)
        return self._agents[name]


@functools.cache
def crew() -> Crew:
    """The agents of this test run; ended with it."""
    made = Crew()
    atexit.register(made.close)
    return made
