"""NIXL agents, each called by one thread of its own.  [shell]

Theory of operation. NIXL's own progress thread would use most of a core even while nothing moves, and halves the rate
of what does. So it is off, and the thread that owns an agent calls it: at once when it is asked to, and again and
again, at an interval that it names, for everything that is under way.

The thread is a daemon: a call into NIXL can hang, and must then keep nobody from ending.

Ugly: UCX is configured by variables of the environment; what is set there already stays as it is.
"""

import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ayni.errors import Unsupported
from worker_agent.blocks.engines.nixl_descriptors import Descriptors
from worker_agent.blocks.engines.nixl_envelope import Regions

_log = logging.getLogger(__name__)

POLL_S = 0.0002
"""Time between two looks at what is under way. A busy loop is slower: it takes the core that the other side needs."""

BACKEND = "UCX"

_EITHER = "nixl"
_LIBRARIES = ("nixl_cu13", "nixl_cu12")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class NixlSettings:
    """How NIXL's transport, UCX, is set up. A variable that the environment has already is left as it is."""

    segment: str = "256k"
    """Size of UCX's TCP segments, both ways. With UCX's own, reading over TCP has a third of the rate."""
    devices: str = ""
    """Network devices, such as "mlx5_0:1,eth0"; empty: all of them, and UCX listens on each."""
    transports: str = ""
    """Transports, such as "rc,cuda"; empty: UCX chooses. TCP is added, since nothing starts without it."""

    def apply(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Sets UCX's variables; to be called before the first agent is made."""
        values = {
            "UCX_TCP_TX_SEG_SIZE": self.segment,
            "UCX_TCP_RX_SEG_SIZE": self.segment,
            "UCX_NET_DEVICES": self.devices,
            "UCX_TLS": with_tcp(self.transports),
        }
        for name, value in values.items():
            if value:
                environ.setdefault(name, value)


def with_tcp(transports: str) -> str:
    """Returns a list of transports that has TCP in it; an empty list, and one of exclusions, stay as they are."""
    names = transports.split(",") if transports else []
    is_enough = not names or transports.startswith("^") or {"tcp", "all"} & set(names)
    return transports if is_enough else f"{transports},tcp"


def load_library() -> Any:
    """Returns NIXL's Python module.

    Raises:
        Unsupported: it is not installed, or does not work here.
    """
    problems = []
    installed = [name for name in _LIBRARIES if importlib.util.find_spec(name)]
    # Where there are several, NIXL's own package knows which one the machine needs. It loads torch to find out.
    for name in installed if len(installed) == 1 else [_EITHER, *installed]:
        try:
            library = importlib.import_module(name)
            _quiet()
            return library if hasattr(library, "nixl_agent_config") else importlib.import_module(f"{name}._api")
        except ImportError as error:
            problems.append(str(error))
    why = "; ".join(problems)
    raise Unsupported(
        f"engine nixl needs the extra nixl-cu12 or nixl-cu13: {why}", field="engines", detail="nixl is not installed"
    )


def _quiet() -> None:
    """Has NIXL's log go where all others do: it writes to standard output by itself."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


class NixlThread:
    """A thread that calls one agent."""

    def __init__(self, name: str) -> None:
        """Starts the thread."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._due: dict[Callable[[], float | None], float] = {}
        self._is_stopped = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Has the thread call a function; returns what will have its result. From any thread."""
        future: Future[_T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def repeat(self, step: Callable[[], float | None]) -> None:
        """Has the thread call a step until it returns None; else it returns the seconds to the next time."""
        self._calls.put(lambda: self._due.__setitem__(step, 0.0))

    def stop(self) -> None:
        """Ends the thread after the calls that were asked for before, and a last time of every step."""
        self._calls.put(self._end)

    def _end(self) -> None:
        self._is_stopped = True

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self._calls.get(timeout=self._patience())()
            except queue.Empty:
                pass
            now = time.monotonic()
            for step in [step for step, due in self._due.items() if due <= now]:
                self._take(step)
        for step in self._due:
            step()

    def _patience(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _take(self, step: Callable[[], float | None]) -> None:
        seconds = step()
        if seconds is None:
            del self._due[step]
        else:
            self._due[step] = time.monotonic() + seconds


class NixlAgent:
    """One agent. Made and used on its thread only; gone for good when the last reference to it is dropped."""

    def __init__(self, library: Any, name: str) -> None:
        """Makes an agent.

        Raises:
            Unsupported: its transport does not start here.
        """
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            backends=[BACKEND],
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        try:
            self._agent = library.nixl_agent(name, config)
        except Exception as error:
            raise _unusable(str(error)) from error
        if BACKEND not in self._agent.backends:
            raise _unusable("it has no UCX backend here")
        self.name = name

    @property
    def metadata(self) -> bytes:
        """What others must be told to reach the agent's memory."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, regions: Regions) -> Any:
        """Registers memory; returns what `deregister` takes."""
        rows = [(address, size, regions.ordinal, "") for address, size in regions.allocations]
        return self._agent.register_memory(rows, kind_of(regions))

    def deregister(self, registered: Any) -> None:
        """Takes a registration back."""
        self._agent.deregister_memory(registered)

    def load(self, metadata: bytes) -> str:
        """Makes a peer known; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, operation: str, local: Any, remote: Any, peer: str, message: bytes) -> Any:
        """Returns a request that has not started."""
        return self._agent.initialize_xfer(operation, local, remote, peer, message)

    def descriptors(self, rows: Descriptors, regions: Regions) -> Any:
        """Returns a list of descriptors."""
        return self._agent.get_xfer_descs(rows, kind_of(regions))

    def post(self, request: Any) -> str:
        """Starts a request: "DONE", "PROC" or "ERR". Where memory is copied directly, it is done on return."""
        return str(self._agent.transfer(request))

    def state(self, request: Any) -> str:
        """Says how far a request is, and moves it on."""
        return str(self._agent.check_xfer_state(request))

    def messages(self) -> list[bytes]:
        """Returns the messages that came with pushes, and serves who reads and writes this agent's memory."""
        return [bytes(one) for those in self._agent.get_new_notifs().values() for one in those]


def kind_of(regions: Regions) -> str:
    """Returns NIXL's word for a kind of memory."""
    return "VRAM" if regions.is_device else "DRAM"


def _unusable(why: str) -> Unsupported:
    return Unsupported(f"engine nixl can't be used here: {why}", field="engines", detail=why)
