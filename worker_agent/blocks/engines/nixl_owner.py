"""The agent that owns this worker's lent memory.  [shell]

It serves peers and starts nothing by itself. Memory that is lent no more takes the agent with it: NIXL goes on reading
memory that was deregistered for whoever has old metadata, and where it is unmapped, UCX ends this process. The next
export makes a new agent, so peers that know the old one must import the new one. On one host the kernel lets whoever
has old metadata read what is still mapped; nothing here can stop that.

Over TCP a peer's reads are served by this agent's thread, so it looks often while there is something to do.
"""

import time
from collections.abc import Callable
from typing import Any

from ayni.blocks.layouts import LayoutHandle
from worker_agent.blocks.engines.nixl_agent import POLL_S, NixlAgent, NixlThread
from worker_agent.blocks.engines.nixl_envelope import Envelope
from worker_agent.blocks.engines.nixl_memory import Addressed
from worker_agent.blocks.engines.nixl_messages import read_message

_IDLE_S = 0.002
"""Longest time between two looks."""
_WORK_S = 0.00005
"""A look that takes longer has found something to do."""
_EXPORT_S = 10.0
"""Longest time to make an agent."""


class NixlOwner:
    """Lends memory. Methods may be called from any thread; the work is done on the agent's."""

    def __init__(self, library: Any, incarnation: int, on_notify: Callable[[int], None]) -> None:
        """Owns nothing yet; `on_notify` is called on the agent's thread."""
        self._library, self._incarnation, self._on_notify = library, incarnation, on_notify
        self._thread = NixlThread("nixl-owner")
        self._lent: dict[LayoutHandle, Addressed] = {}
        self._registered: set[LayoutHandle] = set()
        self._agent: NixlAgent | None = None
        self._num_agents = 0
        self._pause = POLL_S

    def lend(self, handle: LayoutHandle, memory: Addressed) -> None:
        """Lends a layout from the next export on."""
        self._thread.call(lambda: self._lent.__setitem__(handle, memory))

    def withdraw(self, handle: LayoutHandle) -> None:
        """Lends a layout no more; its memory is held until no peer can reach it."""
        self._thread.call(lambda: self._withdraw(handle))

    def envelope(self, hears: bool) -> Envelope | None:
        """Returns what peers must know; None when nothing is lent. Makes the agent, so it takes a while at first.

        Raises:
            Unsupported: there can be no agent here.
        """
        return self._thread.call(lambda: self._envelope(hears)).result(_EXPORT_S)

    def close(self) -> None:
        """Ends the agent."""
        self._thread.call(self._drop)
        self._thread.stop()

    def _withdraw(self, handle: LayoutHandle) -> None:
        if self._lent.pop(handle, None) is not None and handle in self._registered:
            self._drop()

    def _drop(self) -> None:
        self._agent = None
        self._registered.clear()

    def _envelope(self, hears: bool) -> Envelope | None:
        if not self._lent:
            return None
        agent = self._agent or self._new_agent()
        for handle, memory in self._lent.items():
            if handle not in self._registered:
                agent.register(memory.regions)
                self._registered.add(handle)
        return Envelope(
            incarnation=self._incarnation,
            agent=agent.name,
            metadata=agent.metadata,
            hears=hears,
            layouts=tuple((handle, memory.regions) for handle, memory in self._lent.items()),
        )

    def _new_agent(self) -> NixlAgent:
        self._num_agents += 1
        self._agent = NixlAgent(self._library, f"ayni-{self._incarnation:016x}-{self._num_agents}")
        if self._num_agents == 1:
            self._thread.repeat(self._look)
        return self._agent

    def _look(self) -> float:
        if self._agent is None:
            return _IDLE_S
        began = time.perf_counter()
        for message in self._agent.messages():
            if (number := read_message(message)) is not None:
                self._on_notify(number)
        is_busy = time.perf_counter() - began > _WORK_S
        self._pause = POLL_S if is_busy else min(2 * self._pause, _IDLE_S)
        return self._pause
