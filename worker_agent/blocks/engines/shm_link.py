"""One peer through shared memory: its pools, mapped, and what is being pulled from them.  [shell]"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from ayni.blocks.layouts import LayoutDescriptor, LayoutHandle
from ayni.errors import AyniError, PeerLost, Unsupported
from ayni.shm.folder import SocketFolder
from worker_agent.blocks.engine import Move, Ticket
from worker_agent.blocks.engines.shm_messages import ShmExport
from worker_agent.blocks.engines.shm_process import PeerProcess
from worker_agent.blocks.engines.shm_pull import Lent, Pull

_log = logging.getLogger(__name__)


class ShmLink:
    """Pulls blocks of one peer; see `worker_agent.blocks.engine.Link`."""

    engine = "shm"

    def __init__(
        self, peer: str, offer: ShmExport, process: PeerProcess, lent: Mapping[LayoutHandle, Lent], executor: Executor
    ) -> None:
        """Takes what `dial` found out, and watches the peer's process."""
        self._peer, self._offer, self._process = peer, offer, process
        self._lent = dict(lent)
        self._executor = executor
        self._pulls: set[Pull] = set()
        self._is_open = True
        process.watch(self._on_death)

    def reaches(self, layout: LayoutDescriptor) -> bool:
        """Says whether the peer lends a layout as shared memory."""
        return layout.handle in self._lent

    def pull(self, move: Move) -> Ticket:
        """Copies the peer's blocks into local ones.

        Raises:
            Unsupported: the peer does not lend this layout, or a checksum is asked for.
            PeerLost: the link is closed.
        """
        if not self._is_open:
            raise PeerLost(f"the link to {self._peer} is closed; connect again", peer=self._peer, detail="closed")
        if move.checksum:
            raise _unsupported("checksum", "blocks in shared memory are read in place and nothing is sent")
        if not self.reaches(move.remote):
            detail = f"{self._peer} does not lend its {move.remote.place} as shared memory"
            raise _unsupported("engine", f"{detail}; use another engine for it")
        pull = Pull(move, self._lent[move.remote.handle], self._executor)
        self._pulls.add(pull)
        pull.ticket.quiesced.add_done_callback(lambda _: self._pulls.discard(pull))
        return pull.ticket

    def push(self, move: Move) -> Ticket:
        """Refuses: a peer's memory can't be written. Let the peer pull instead."""
        raise _unsupported("engine", "shared memory can be read only; let the peer pull, or use another engine")

    async def close(self) -> None:
        """Forgets the peer; returns once no byte can land. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        pulls = list(self._pulls)
        for pull in pulls:
            pull.stop(PeerLost(f"the link to {self._peer} was closed", peer=self._peer, detail="closed"))
        if pulls:
            # Not gathered: who gives up waiting must not cancel what the pulls end with.
            await asyncio.wait([pull.ticket.quiesced for pull in pulls])
        # Whoever still holds a ticket holds its pull; the pools must not wait for that.
        for lent in self._lent.values():
            lent.pool.close()
        self._process.close()

    def _on_death(self) -> None:
        """Removes what the peer's process could not remove itself."""
        _log.info("the process of %s has ended", self._peer)
        with contextlib.suppress(AyniError):
            folder = SocketFolder(Path(self._offer.folder), make=False)
            folder.remove(self._offer.socket_name)
            folder.close()


def _unsupported(field: str, detail: str) -> Unsupported:
    return Unsupported(f"not through shared memory: {detail}", field=field, detail=detail)
