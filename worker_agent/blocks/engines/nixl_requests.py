"""The requests of one move, one after the other, on the thread of a link's agent.  [shell]

A few requests are under way at a time. A move that is stopped posts no more; what is under way can't be called back, so
the move has ended only when the last request has: released ones would still write into their blocks.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ayni.blocks.ids import Ids
from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, Fault, PeerLost
from worker_agent.blocks.engines.nixl_agent import POLL_S, NixlAgent
from worker_agent.blocks.engines.nixl_descriptors import Descriptors
from worker_agent.blocks.engines.nixl_envelope import Regions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one request moves."""

    places: Ids
    """Of its pairs in the move, shape [N]."""
    local: Descriptors
    remote: Descriptors


class Batches(Protocol):
    """What a move consists of. Called on the agent's thread."""

    local: Regions
    remote: Regions
    most_under_way: int
    """Requests at a time."""

    @property
    def failures(self) -> Mapping[int, Failure]:
        """Pairs that local memory failed, by place."""

    def places(self) -> Sequence[Ids]:
        """Returns which pairs go with each request, in order."""

    def begin(self, places: Ids) -> Batch:
        """Returns a request's copies, ready to start."""

    def end(self, batch: Batch) -> Ids:
        """Does what is left to do when they are made; returns the places of the pairs that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Where requests go."""

    remote_agent: str
    peer: str
    """As errors say."""
    operation: str
    """READ or WRITE."""
    message: bytes = b""
    """What the peer is told when all of it has been written."""


class Requests:
    """A move under way; `step` is to be repeated until it has ended. All methods are for the agent's thread."""

    def __init__(
        self,
        agent: NixlAgent,
        way: Way,
        make: Callable[[], Batches],
        tell: Callable[[Ids], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            agent: is held until the move has ended.
            way: where it goes.
            make: returns what the move consists of; called at the first step.
            tell: is given the places of the pairs that are done.
        """
        self._agent: NixlAgent | None = agent
        self._way, self._make, self._tell = way, make, tell
        self.batches: Batches | None = None
        """What the move consists of, from the first step on."""
        self._left: list[Ids] = []
        self._under_way: dict[Any, Batch] = {}
        self._error: AyniError | None = None
        self._is_stopped = False
        self.ended: Future[AyniError | None] = Future()
        """Set when no byte can land any more, with what went wrong."""

    @property
    def failures(self) -> Mapping[int, Failure]:
        """Pairs that local memory failed, by place."""
        return self.batches.failures if self.batches else {}

    def stop(self) -> None:
        """Starts no further request."""
        self._is_stopped = True
        self._left.clear()

    def abandon(self, error: AyniError) -> None:
        """Forgets what is under way and lets go of the agent, which is about to be dropped."""
        self.stop()
        self._under_way.clear()
        self._agent = None
        self._error = self._error or error

    def step(self) -> float | None:
        """Does what can be done now; returns the time until the next step, None when it has ended."""
        if self._agent is not None and not self._is_stopped and self.batches is None:
            self._guarded(self._prepare)
        self._guarded(self._collect)
        self._guarded(self._post)
        if self._under_way:
            return POLL_S
        if self._left:
            return 0.0
        self._agent = None
        if not self.ended.done():
            self.ended.set_result(self._error)
        return None

    def _prepare(self) -> None:
        self.batches = self._make()
        self._left = list(self.batches.places())

    def _collect(self) -> None:
        for request, batch in list(self._under_way.items()):
            if (state := self._state(request)) == "PROC":
                continue
            del self._under_way[request]
            with contextlib.suppress(Exception):
                request.release()
            self._finish(state, batch)

    def _state(self, request: Any) -> str:
        assert self._agent
        try:
            return self._agent.state(request)
        except Exception as error:
            self._fail(error)
            return "ERR"

    def _post(self) -> None:
        batches, agent = self.batches, self._agent
        if not self._left or batches is None or agent is None or len(self._under_way) >= batches.most_under_way:
            return
        is_last = len(self._left) == 1
        if is_last and self._way.message and self._under_way:
            return
        batch = batches.begin(self._left.pop(0))
        if not len(batch.places):
            return
        local, remote = agent.descriptors(batch.local, batches.local), agent.descriptors(batch.remote, batches.remote)
        message = self._way.message if is_last and not batches.failures else b""
        request = agent.prepare(self._way.operation, local, remote, self._way.remote_agent, message)
        if (state := agent.post(request)) == "PROC":
            self._under_way[request] = batch
            return
        request.release()
        self._finish(state, batch)

    def _finish(self, state: str, batch: Batch) -> None:
        if state != "DONE":
            self._fail(RuntimeError(f"a request ended with {state}"))
            return
        assert self.batches
        self._tell(self.batches.end(batch))

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._left.clear()
        self._error = self._error or error_of(error, self._way.peer)


def error_of(error: Exception, peer: str) -> AyniError:
    """Returns what an error of NIXL means."""
    if isinstance(error, AyniError):
        return error
    text = str(error) or type(error).__name__
    if type(error).__name__ in ("nixlRemoteDisconnectError", "nixlBackendError", "RuntimeError"):
        return PeerLost(f"lost {peer}: {text}", peer=peer, detail=text)
    _log.error("a transfer with %s broke", peer, exc_info=error)
    return Fault(f"the transfer with {peer} broke: {error!r}", detail=repr(error))
