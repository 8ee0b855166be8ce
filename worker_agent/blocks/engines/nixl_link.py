"""One peer through NIXL: an agent of its own, which knows that peer only.  [shell]

One agent for each peer, so that metadata that NIXL chokes on, a peer that is lost and one that is forgotten concern no
other: whatever happened to an agent, it is dropped, and the next link gets a new one.

A request that has begun can't be called back. A move that is given up, or reaches its deadline, stays unquiesced until
its requests have ended, or until the link is closed and the agent with all its connections is gone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ayni.blocks.layouts import LayoutDescriptor
from ayni.errors import PeerLost, Unsupported
from worker_agent.blocks.engine import Move, Ticket
from worker_agent.blocks.engines.nixl_agent import NixlAgent, NixlThread
from worker_agent.blocks.engines.nixl_batches import Buffered, Straight, orders_of
from worker_agent.blocks.engines.nixl_envelope import Envelope, Regions
from worker_agent.blocks.engines.nixl_memory import addressed
from worker_agent.blocks.engines.nixl_messages import write_message
from worker_agent.blocks.engines.nixl_requests import Batches, Requests, Way
from worker_agent.blocks.engines.under_way import MovesUnderWay, Progress
from worker_agent.blocks.memory import Memory

_log = logging.getLogger(__name__)

NAME = "nixl"
READ, WRITE = "READ", "WRITE"

CLOSE_S = 1.0
"""How long requests may go on after their link was closed, before the agent is dropped with them."""

DROP_S = 10.0
"""How long that may take."""

_T = TypeVar("_T")


class NixlLink:
    """Moves blocks with one peer; see `worker_agent.blocks.engine.Link`."""

    engine = NAME

    def __init__(self, library: Any, envelope: Envelope, peer: str) -> None:
        """Knows the peer; `open` makes the agent."""
        self._library, self._envelope, self._peer = library, envelope, peer
        self._layouts = dict(envelope.layouts)
        self._thread = NixlThread(f"nixl-{envelope.agent}")
        self._moves = MovesUnderWay(peer)
        self._agent: NixlAgent | None = None
        self._remote_agent = ""
        self._is_closed = False
        self._registered: dict[int, _Registered] = {}
        self._under_way: set[Requests] = set()

    async def open(self, name: str) -> None:
        """Makes the agent, and makes the peer known to it.

        Raises:
            Unsupported: there can be no agent here, or NIXL does not take what the peer exported.
        """
        await self._call(lambda: self._open(name))

    def abandon(self) -> None:
        """Gives up a link whose thread may hang; leaves it to end when it can."""
        self._thread.call(self._drop)
        self._thread.stop()

    def reaches(self, layout: LayoutDescriptor) -> bool:
        """Says whether the peer lends a layout through NIXL."""
        return layout.handle in self._layouts

    def pull(self, move: Move) -> Ticket:
        """Copies the peer's blocks into local ones."""
        return self._start(move, READ)

    def push(self, move: Move) -> Ticket:
        """Copies local blocks into the peer's."""
        if move.write_notification is not None and not self._envelope.hears:
            raise _unsupported("write_notification", f"{self._peer} hears no notifications through engine nixl")
        return self._start(move, WRITE)

    def forget_memory(self, memory: Memory) -> None:
        """Drops a local layout; its memory is held until that is done."""
        self._thread.call(lambda: self._deregister(memory))

    async def close(self) -> None:
        """Forgets the peer: what is in flight fails with PEER_LOST. Returns once no byte can land. Once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        ending = asyncio.ensure_future(self._moves.end())
        await asyncio.wait({ending}, timeout=CLOSE_S)
        if not ending.done():
            _log.warning("%s does not answer: its connection is cut with requests under way", self._peer)
        dropping = asyncio.ensure_future(self._call(self._drop))
        _, stuck = await asyncio.wait({dropping, ending}, timeout=DROP_S)
        if stuck:
            _log.error("NIXL does not return from a call for %s; its thread is left alone", self._peer)
        self._thread.stop()

    def _start(self, move: Move, operation: str) -> Ticket:
        if move.checksum:
            raise _unsupported("checksum", "blocks are written in place, and nobody sees them on their way")
        if not self.reaches(move.remote):
            raise _unsupported("engine", f"{self._peer} does not lend its {move.remote.place} through it")
        remote = self._layouts[move.remote.handle]
        message = b"" if move.write_notification is None else write_message(move.write_notification)

        way = Way(remote_agent=self._remote_agent, peer=self._peer, operation=operation, message=message)
        return self._moves.start(move, lambda progress: self._carry_out(move, remote, way, progress))

    async def _carry_out(self, move: Move, remote: Regions, way: Way, progress: Progress) -> None:
        if self._is_closed or self._agent is None:
            raise _closed(self._peer)
        if not len(move.local_blocks):
            return
        loop = asyncio.get_running_loop()
        requests = Requests(
            self._agent,
            way,
            lambda: self._batches(move, remote, way),
            lambda places: _tell(loop, lambda: progress.is_done.__setitem__(places, True)),
        )
        self._under_way.add(requests)
        self._thread.repeat(requests.step)
        ended = asyncio.wrap_future(requests.ended)
        try:
            error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._thread.call(requests.stop)
            await finished(ended)
            raise
        finally:
            self._under_way.discard(requests)
            self._thread.call(lambda: self._end(requests))
        progress.fail(0, requests.failures)
        if error:
            raise error

    def _open(self, name: str) -> None:
        self._agent = NixlAgent(self._library, name)
        try:
            self._remote_agent = self._agent.load(self._envelope.metadata)
        except Exception as error:
            raise _unsupported("engines", f"NIXL does not take what {self._peer} exported: {error}") from error
        if self._remote_agent != self._envelope.agent:
            raise _unsupported("engines", f"{self._peer} exported an agent with two names")

    def _batches(self, move: Move, remote: Regions, way: Way) -> Batches:
        memory, (one, other) = addressed(move.local), orders_of(move)
        if memory is not None and one is other:
            self._register(move.local, memory.regions, memory)
            return Straight(move, remote, memory.regions)
        buffered = Buffered(move, remote, way.operation == READ)
        self._register(buffered, buffered.local, buffered.buffer)
        return buffered

    def _register(self, owner: object, regions: Regions, keep: object) -> None:
        assert self._agent
        if id(owner) not in self._registered:
            self._registered[id(owner)] = _Registered(owner, keep, self._agent.register(regions))

    def _deregister(self, owner: object) -> None:
        registered = self._registered.pop(id(owner), None)
        if registered is not None and self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.deregister(registered.token)

    def _end(self, requests: Requests) -> None:
        if isinstance(requests.batches, Buffered):
            self._deregister(requests.batches)

    def _drop(self) -> None:
        """Drops the agent, and with it all connections: afterwards no byte can land."""
        for requests in list(self._under_way):
            requests.abandon(_closed(self._peer))
        self._registered.clear()
        self._agent = None

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._thread.call(function))


@dataclass(frozen=True, slots=True)
class _Registered:
    owner: object
    """Held, so that its id stays its own."""
    keep: object
    """Held, so that the memory stays where it is."""
    token: Any


async def finished(future: "asyncio.Future[Any]") -> None:
    """Waits for a future, however often the waiting task is cancelled."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future})


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # The loop may be closed before the last request of a peer that answers no more has ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _closed(peer: str) -> PeerLost:
    return PeerLost(f"the link to {peer} was closed", peer=peer, detail="closed")


def _unsupported(field: str, detail: str) -> Unsupported:
    return Unsupported(f"not through engine nixl: {detail}", field=field, detail=detail)
