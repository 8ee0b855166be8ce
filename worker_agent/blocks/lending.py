"""What peers may do with this worker's blocks: the owner's side of ReadBlocks and WriteBlocks.  [shell]"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LayoutHandle
from ayni.errors import StaleEpoch
from worker_agent.blocks.holds import Holds
from worker_agent.blocks.memory import Memory
from worker_agent.blocks.registry import Registry
from worker_agent.blocks.validation import check_range, check_unique

OnNotify = Callable[[int], None]


class Lending:
    """Lends blocks for the time of one stream."""

    def __init__(self, registry: Registry, holds: Holds, incarnation: int) -> None:
        """Lends what a registry has."""
        self._registry, self._holds, self._incarnation = registry, holds, incarnation
        self.on_notify: list[OnNotify] = []
        """Called with the number that came with a peer's finished write."""

    @contextmanager
    def lend(self, handle: LayoutHandle, incarnation: int, ids: Ids, write: bool) -> Iterator[Memory]:
        """Holds blocks until the context is left; see `streams.Lender`."""
        if incarnation != self._incarnation:
            raise StaleEpoch(
                f"layout {handle} was exported by process start {incarnation:016x}, but this worker was started again "
                f"({self._incarnation:016x}); ask it for its metadata and connect again",
                epoch=f"{incarnation:016x}",
                current_epoch=f"{self._incarnation:016x}",
            )
        entry = self._registry.named(handle)
        check_range(entry.memory.geometry, ids, "destination" if write else "source")
        if write:
            check_unique(ids, "destination")
        held = [(entry, ids)]
        with self._holds.held([] if write else held, held if write else []):
            yield entry.memory

    def notify(self, number: int) -> None:
        """Tells whoever listens that a peer's write has ended."""
        for listener in self.on_notify:
            listener(number)
