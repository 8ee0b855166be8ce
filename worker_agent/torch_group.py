"""One generation of a torch group: a thread of its own, which builds the group and takes turn after turn.  [shell]

A collective blocks, and a member can't leave one that others are in. So each generation has a thread that nobody waits
for: to give the generation up fails all its turns at once and ends its collectives (`Collectives.abort`); the thread
ends by itself, at the latest when the time of what it waits for is up. Nothing that it still writes to is anybody
else's.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from ayni.errors import AyniError, RoundRestarted
from worker_agent.torch_collectives import Collectives, GroupPlan
from worker_agent.torch_store import StoreClients

_log = logging.getLogger(__name__)

Turn = Callable[[Collectives], None]
"""Work on the group's thread; all members do the same turns in the same order."""


class TorchGroup:
    """The group of one generation, as its members build it, use it and give it up."""

    def __init__(
        self,
        plan: GroupPlan,
        clients: StoreClients,
        on_broken: Callable[[], object],
        inherited: Collectives | None = None,
    ) -> None:
        """Begins to build it, in the background.

        Args:
            plan: what to build.
            clients: connect to the group's store.
            on_broken: is called, on some thread, when it ends in another way than by `abort` or `hand_over`.
            inherited: of the generation before, if its members were the same; used where all members have it still.
        """
        self.plan = plan
        self._clients = clients
        self._on_broken = on_broken
        self._inherited = inherited
        self._lock = threading.Lock()
        self._why: Exception | None = None
        self._collectives: Collectives | None = None
        self._turns: queue.SimpleQueue[tuple[Turn, Future[None]] | None] = queue.SimpleQueue()
        self._open: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._live, name=f"ayni-torch-{plan.generation}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended, and with it everything that the group had."""
        return not self._thread.is_alive()

    @property
    def why_ended(self) -> Exception | None:
        """Why no turn is taken any more; None while turns are."""
        return self._why

    def check(self) -> None:
        """Confirms that the group was not given up.

        Raises:
            RoundRestarted: it was.
        """
        if self._why:
            raise RoundRestarted(str(self._why))

    def submit(self, turn: Turn) -> "Future[None]":
        """Has a turn taken after those before it. Its future fails with what broke, or ended, the group."""
        future: Future[None] = Future()
        with self._lock:
            if self._why is None:
                self._open.add(future)
                self._turns.put((turn, future))
                return future
        future.set_exception(self._why)
        return future

    def fail(self, why: Exception) -> None:
        """Ends the group because it broke, from any thread and without a wait."""
        if self.abort(why):
            self._on_broken()

    def abort(self, why: Exception) -> bool:
        """Gives the group up, from any thread and without a wait: what it has not done it never does.

        Returns:
            Whether it was not given up before.
        """
        with self._lock:
            if self._why:
                return False
            self._why = why
            waiting, self._open = self._open, set()
            self._turns.put(None)
            collectives = self._collectives
        for future in waiting:
            _fail(future, why)
        if collectives:
            collectives.abort()
        return True

    def hand_over(self) -> Collectives | None:
        """Ends the generation and returns what it was built of, for the next one; None where that can't go on."""
        with self._lock:
            if self._why or self._open or self._collectives is None:
                return None
            self._why = RoundRestarted(f"generation {self.plan.generation} of the torch group has ended")
            collectives, self._collectives = self._collectives, None
            self._turns.put(None)
        return collectives

    def join(self, seconds: float) -> bool:
        """Waits until its thread has ended; returns whether it has."""
        self._thread.join(seconds)
        return self.is_over

    def _live(self) -> None:
        try:
            collectives = self._obtain()
            with self._lock:
                self._collectives = collectives
            while (item := self._turns.get()) and not self._why:
                self._take(collectives, *item)
        except Exception as error:  # Whatever it is, it is the end of this generation, and every turn says why.
            _log.debug("the group of generation %d broke", self.plan.generation, exc_info=True)
            # Without its traceback, which would keep the group's connections open.
            self.fail(error.with_traceback(None) if isinstance(error, AyniError) else self._broken(error))
        finally:
            with self._lock:
                self._collectives = None

    def _obtain(self) -> Collectives:
        """Goes on with what the generation before was built of, if all members do; builds anew otherwise."""
        store = self._clients.below(self.plan.prefix, "building")
        old, self._inherited = self._inherited, None
        store.set(f"has/{self.plan.rank}", old.name if old else "nothing")
        held = set(store.multi_get([f"has/{rank}" for rank in range(self.plan.size)]))
        if old and held == {old.name.encode()}:
            return old
        # Its connections end here, before there are new ones.
        del old
        return Collectives(self.plan, store)

    def _take(self, collectives: Collectives, turn: Turn, future: "Future[None]") -> None:
        turn(collectives)
        with self._lock:
            is_open = future in self._open
            self._open.discard(future)
        if is_open:
            future.set_result(None)

    def _broken(self, error: Exception) -> RoundRestarted:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return RoundRestarted(
            f"the torch group of generation {self.plan.generation} ({self.plan.size} workers) broke at rank "
            f"{self.plan.rank}: {first}; the coordinator makes a new one"
        )


def _fail(future: "Future[None]", why: Exception) -> None:
    try:
        future.set_exception(why)
    except InvalidStateError:
        # Cancelled by who waited.
        return
