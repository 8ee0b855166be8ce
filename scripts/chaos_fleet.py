"""The processes of a run under chaos: started, watched, ended and started again.

Whatever happens to a process happens from outside, through signals, limits and connections. Each process's log gathers
in one file, whichever start of it wrote it.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.chaos_schedule import COORDINATOR

ROOT = Path(__file__).resolve().parent.parent
LISTENING = "listening on "
_START_S = 120.0
_GOODBYE_S = 60.0
_LONGEST_LINE = 1 << 20


class ChaosFailed(Exception):
    """The run did not get through; says what to look at."""


@dataclass(eq=False)
class Child:
    """One start of a process."""

    name: str
    process: asyncio.subprocess.Process
    copying: asyncio.Task
    meant_to_end: bool = False
    """Whether somebody has ended it on purpose."""
    stopped: bool = False
    full: bool = False
    """Whether every write to a file fails."""

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def disturbed(self) -> bool:
        return self.meant_to_end or self.stopped or self.full or not self.running

    def end(self, number: signal.Signals) -> None:
        """Ends it on purpose; a process that stands still is let go first, unless it is killed."""
        self.meant_to_end = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
            if number != signal.SIGKILL:
                self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Has it stand still."""
        self.stopped = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends `stop`."""
        self.stopped = False
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    def fill_disk(self, full: bool) -> None:
        """Makes every write to a file fail, or no longer."""
        self.full = full
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0 if full else hard, hard))


@dataclass
class Fleet:
    """All processes, by name."""

    folder: Path
    """Logs and output."""
    token: str = field(repr=False)
    on_change: Callable[[], None]
    """Called whenever a process has ended or begins to listen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    ended: list[Child] = field(default_factory=list)
    """Those that have ended and were not looked at yet."""
    past: list[Child] = field(default_factory=list)
    """Every start there was."""

    async def start(self, name: str, module: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
        """Starts a process and returns what it listens at, once it does, if it is the coordinator.

        Args:
            name: of the process and of its log.
            module: `python -m MODULE`.
            arguments: its command line.
            prefix: a command that runs it, such as one that enters a network namespace.
        """
        paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *(sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "AYNI_TOKEN": self.token, **self.environment},
            cwd=self.folder,
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        child = Child(name, process, asyncio.create_task(self._copy(name, process, address)))
        self.children[name] = child
        self.past.append(child)
        child.copying.add_done_callback(lambda _: self._note_end(child))
        if name != COORDINATOR:
            address.add_done_callback(lambda done: done.cancelled() or done.exception())
            return ""
        try:
            async with asyncio.timeout(_START_S):
                return await address
        except TimeoutError:
            raise ChaosFailed(f"{name} did not listen within {_START_S:g} s; see {self.log(name)}") from None

    def log(self, name: str) -> Path:
        """Returns a process's log file."""
        return self.folder / f"{name}.log"

    def running(self, name: str) -> Child | None:
        """Returns a process, if it runs."""
        child = self.children.get(name)
        return child if child and child.running else None

    async def close(self) -> None:
        """Kills everything that still runs."""
        for child in self.past:
            child.end(signal.SIGKILL)
        await asyncio.gather(*(child.copying for child in self.past), return_exceptions=True)

    async def settle(self) -> None:
        """Waits until all have ended.

        Raises:
            ChaosFailed: one does not.
        """
        for child in self.past:
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await asyncio.shield(child.copying)
            except TimeoutError:
                raise ChaosFailed(
                    f"{child.name} did not end within {_GOODBYE_S:g} s of the run's end; see {self.log(child.name)}"
                ) from None

    def _note_end(self, child: Child) -> None:
        self.ended.append(child)
        self.on_change()

    async def _copy(self, name: str, process: asyncio.subprocess.Process, address: asyncio.Future) -> None:
        """Copies what a process says into its log, to its end."""
        assert process.stdout
        assert process.stderr
        with self.log(name).open("ab", buffering=0) as log:
            log.write(f"--- {name} starts as process {process.pid}\n".encode())

            async def copy(stream: asyncio.StreamReader) -> None:
                while line := await stream.readline():
                    log.write(line)
                    if line.startswith(LISTENING.encode()) and not address.done():
                        address.set_result(line.decode().removeprefix(LISTENING).strip())
                        self.on_change()

            await asyncio.gather(copy(process.stdout), copy(process.stderr))
            code = await process.wait()
            log.write(f"--- {name}, process {process.pid}, ended with {code}\n".encode())
        if not address.done():
            address.set_exception(ChaosFailed(f"{name} ended with {code} before it listened; see {self.log(name)}"))
