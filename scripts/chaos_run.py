"""One run: processes, what happens to them at which step, and what the run left behind."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from scripts.chaos_fleet import ChaosFailed, Child, Fleet
from scripts.chaos_job import Job
from scripts.chaos_result import Happened
from scripts.chaos_schedule import COORDINATOR, Event
from scripts.chaos_watch import Watch
from scripts.chaos_ways import Proxies, Way, Ways

_LONGEST_STALL_S = 120.0
_GOODBYE_S = 60.0
_MOST_RESTARTS = 20
"""Ends that nobody asked for, after which something is wrong with the run itself."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run left behind."""

    commits: list[CommitRecord]
    superseded: list[CommitRecord]
    parameters_sha256: str
    happened: list[Happened]
    left_over: list[Event]
    """Events for which there was no room before the run's end."""
    restarts: int
    """Processes that ended without being told, and were started again."""
    bad_ends: list[str]
    """Members of the run to its last step whose process did not end well, and with which exit code."""
    listened: list[float]
    """Times when a coordinator that was started again began to listen."""

    @property
    def times(self) -> list[float]:
        """Returns when training steps were committed, in order."""
        return sorted(commit.unix_time for commit in (*self.commits, *self.superseded) if commit.kind == "train")


@dataclass
class Chaos:
    """One run, with events."""

    job: Job
    workers: int
    folder: Path
    token: str = field(repr=False)
    events: Sequence[Event] = ()
    survivors: int = 1
    """Workers that are up to date and unharmed that every event leaves."""
    ways: Ways = field(default_factory=Proxies)
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._woken = asyncio.Event()
        self._pending = [event for event in self.events if event.kind != "nan"]
        self._spoilt = [event for event in self.events if event.kind == "nan"]
        self._happened: list[Happened] = []
        self._under_way: set[asyncio.Task] = set()
        self._restarts = 0
        self._listened: list[float] = []
        self._bad_ends: list[str] = []
        self._port = _free_port(self.ways.host)
        self._fleet = Fleet(self.folder, self.token, self._woken.set, {"OMP_NUM_THREADS": "1"})
        address = f"{self.ways.host}:{self._port}"
        self._watch = Watch(address, self.token, self.ways.insecure, self._woken.set)
        self._known: dict[str, Way] = {}

    async def run(self) -> Record:
        """Runs it to its last step.

        Raises:
            ChaosFailed: it did not get there.
        """
        (self.folder / "run.yaml").write_text(yaml.safe_dump(dict(self.job.values)))
        following = asyncio.create_task(self._watch.follow())
        try:
            await self._start_coordinator("--fresh")
            for number in range(self.workers):
                await self._start_worker(f"worker-{number}")
            while not self._over:
                await self._wait()
                self._look_after_ends()
                self._begin_events()
                self._raise_failures()
            await self._end()
        finally:
            for task in (following, *self._under_way):
                task.cancel()
            await asyncio.gather(following, *self._under_way, return_exceptions=True)
            await self._fleet.close()
            await self.ways.close()
        return self._record()

    @property
    def _over(self) -> bool:
        coordinator = self._fleet.children[COORDINATOR].process
        return self._watch.ended or coordinator.returncode == 0

    async def _wait(self) -> None:
        """Waits until something has changed."""
        left = _LONGEST_STALL_S - (time.monotonic() - self._watch.changed)
        try:
            async with asyncio.timeout(max(left, 0)):
                await self._woken.wait()
        except TimeoutError:
            raise ChaosFailed(
                f"no step was committed for {_LONGEST_STALL_S:g} s after {self._watch.committed} steps; the "
                f"coordinator says: {self._watch.waiting or 'nothing'}; see {self._fleet.log(COORDINATOR)}"
            ) from None
        self._woken.clear()

    def _look_after_ends(self) -> None:
        """Starts again what ended by itself, as a supervisor would."""
        while self._fleet.ended:
            child = self._fleet.ended.pop()
            code = child.process.returncode
            if child.meant_to_end or code == 0 or self._over or self._fleet.children[child.name] is not child:
                continue
            self._restarts += 1
            self.say(f"step {self._watch.committed}: {child.name} ended with {code}; it is started again")
            if self._restarts > _MOST_RESTARTS:
                raise ChaosFailed(f"{child.name} ends again and again; see {self._fleet.log(child.name)}")
            again = self._start_coordinator() if child.name == COORDINATOR else self._start_worker(child.name)
            self._spawn(again)

    def _begin_events(self) -> None:
        committed = self._watch.committed
        while self._spoilt and self._spoilt[0].step < committed:
            self._note(self._spoilt.pop(0))
        for event in tuple(self._pending):
            if event.step > committed or committed >= self.job.steps:
                return
            if self._may_happen(event):
                self._pending.remove(event)
                self._note(event)
                self._spawn(self._perform(event))
                # One at a time: what it does must show before the next is weighed.
                return

    def _may_happen(self, event: Event) -> bool:
        """Returns whether enough workers stay unharmed that have what the run needs to go on."""
        if event.kind == "join":
            return True
        child = self._fleet.running(event.target)
        if child is None or child.disturbed:
            return False
        if event.target == COORDINATOR:
            return True
        unharmed = [name for name in self._watch.up_to_date if name != event.target and self._is_unharmed(name)]
        return len(unharmed) >= self.survivors

    def _is_unharmed(self, name: str) -> bool:
        child = self._fleet.running(name)
        return bool(child and not child.disturbed and self._known[name].whole)

    def _note(self, event: Event) -> None:
        self._happened.append(Happened(event=event, step=self._watch.committed, unix_time=time.time()))
        lasting = f" for {event.seconds:g} s" if event.seconds else ""
        self.say(f"step {self._watch.committed}: {event.kind} {event.mode} {event.target}{lasting}".replace("  ", " "))

    async def _perform(self, event: Event) -> None:
        """Makes an event come about, to its end."""
        if event.kind == "join":
            return await self._start_worker(event.target)
        child = self._fleet.running(event.target)
        if child is None:
            return
        if event.kind == "coordinator":
            await self._end_child(child, signal.SIGKILL)
            await self._start_coordinator()
        elif event.kind in ("kill", "restart"):
            await self._end_child(child, signal.SIGKILL if event.kind == "kill" else signal.SIGTERM)
            await self._start_worker(event.target)
        elif event.kind == "leave":
            await self._end_child(child, signal.SIGTERM)
        else:
            await self._disturb(event, child)

    async def _disturb(self, event: Event, child: Child) -> None:
        """Lets something be the matter for some seconds."""
        way = self._known.get(event.target)
        if event.kind == "stop":
            child.stop()
        elif event.kind == "disk":
            child.fill_disk(True)
        elif way:
            way.disturb(event.mode)
        try:
            await asyncio.sleep(event.seconds)
        finally:
            if event.kind == "stop":
                child.go_on()
            elif event.kind == "disk":
                child.fill_disk(False)
            elif way:
                way.mend()
            self._woken.set()

    async def _end_child(self, child: Child, number: signal.Signals) -> None:
        child.end(number)
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await asyncio.shield(child.copying)
        except TimeoutError:
            raise ChaosFailed(
                f"{child.name} did not end within {_GOODBYE_S:g} s of {number.name}; see {self._fleet.log(child.name)}"
            ) from None

    async def _start_coordinator(self, *flags: str) -> None:
        await self._fleet.start(
            COORDINATOR,
            "coordinator_service",
            *("--config", str(self.folder / "run.yaml"), "--state-dir", str(self.folder / "state")),
            *("--listen", f"{self.ways.host}:{self._port}", *(["--insecure"] if self.ways.insecure else []), *flags),
        )
        self._listened.append(time.time())

    async def _start_worker(self, name: str) -> None:
        self._watch.forget(name)
        way = self._known[name] = await self.ways.add(name, self._port)
        await self._fleet.start(
            name,
            "worker_agent",
            *("--coordinator", way.address, "--name", name, "--backend", "cpu", "--listen", way.listen),
            *("--output-dir", str(self.folder / name), "--cache-dir", str(self.folder / "cache"), "--no-tensorboard"),
            *("--blocks-root", str(self.folder / "blocks"), *(["--insecure"] if self.ways.insecure else [])),
            # Half of them through shared memory, the others over links that can be cut.
            *("--gradients", "grpc" if name[-1] in "13579" else "auto"),
            prefix=way.prefix,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(lambda _: self._woken.set())

    def _raise_failures(self) -> None:
        for task in [task for task in self._under_way if task.done()]:
            self._under_way.discard(task)
            task.result()

    async def _end(self) -> None:
        """Lets the processes end by themselves; those that never got into the run are told to."""
        for task in tuple(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for way in self._known.values():
            way.mend()
        for name, child in self._fleet.children.items():
            if name not in self._watch.up_to_date and name != COORDINATOR:
                child.end(signal.SIGTERM)
        await self._fleet.settle()
        self._bad_ends = [
            f"{name} ({child.process.returncode})"
            for name, child in self._fleet.children.items()
            if child.process.returncode and not child.meant_to_end and name != COORDINATOR
        ]
        code = self._fleet.children[COORDINATOR].process.returncode
        if code:
            raise ChaosFailed(
                f"the coordinator ended with {code}: {self._watch.waiting or 'no reason was heard'}; "
                f"see {self._fleet.log(COORDINATOR)}"
            )

    def _record(self) -> Record:
        with contextlib.closing(open_folder(self.folder / "state" / self.job.run_id, to_read=True)) as store:
            return Record(
                commits=store.commits(),
                superseded=store.superseded(),
                parameters_sha256=store.facts().get("final_parameters_sha256", ""),
                happened=self._happened,
                left_over=self._pending,
                restarts=self._restarts,
                bad_ends=self._bad_ends,
                listened=self._listened[1:],
            )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
