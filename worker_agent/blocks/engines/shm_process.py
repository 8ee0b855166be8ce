"""The process whose memory is read: whether it lives, and being told when it ends.  [shell]"""

import asyncio
import os
import select
from collections.abc import Callable

from ayni.errors import PeerLost


class PeerProcess:
    """A process of this host, by descriptor: its number may mean another process later, this does not.

    Who got the number from a socket has to hear from the process once more after this was made; then it is the one.
    """

    def __init__(self, pid: int, peer: str) -> None:
        """Opens a process; `peer` names it in errors.

        Raises:
            PeerLost: it is gone.
        """
        self._peer = peer
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Refuses a process that has ended. May be called from any thread.

        Raises:
            PeerLost: it has ended.
        """
        # One of its own each time: threads can't share one.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(0):
            raise self._lost("its process has ended")

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls a function on the running loop when the process ends, once."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended, on_end)

    def close(self) -> None:
        """Watches no more; nobody uses the process any more."""
        self._unwatch()
        os.close(self._fd)

    def _ended(self, on_end: Callable[[], None]) -> None:
        self._unwatch()
        on_end()

    def _unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._fd)

    def _lost(self, detail: str) -> PeerLost:
        message = f"{self._peer} was lost: {detail}; connect to it again once it was started again"
        return PeerLost(message, peer=self._peer, detail=detail)
