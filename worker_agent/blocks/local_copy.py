"""Copies blocks between a worker's own layouts: any two tiers, kinds, and known axis orders.  [shell]

Theory of operation. Pairs of blocks are copied in the order of the lists, a batch at a time; between two batches the
copy can be stopped. `paths` says which way a batch goes. A block that can't be read fails alone. A write that fails
ends the copy, since a disk that is full stays full. What was copied before stays copied.

Blocks the calling thread; nothing here knows the event loop. Whoever calls has validated the two sides, and holds
their blocks.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

from ayni.errors import AyniError, StorageFailed
from worker_agent.blocks.paths import Path, Selection, Unreadable, path_between

BATCH_BYTES = 16 << 20
"""About how much is copied between two looks at whether to stop."""
NUM_THREADS = 2
"""One thread can't use all of a machine's memory bandwidth; copying lets go of the interpreter."""
SHARE_BYTES = 2 * BATCH_BYTES
"""A thread of its own is not worth it for less."""

Failed = tuple[int, AyniError]
"""Place in the lists, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Pairs `start` to `stop` are through: copied, but for the failures among them."""

    start: int
    stop: int
    failures: tuple[Failed, ...] = ()
    ended_by: AyniError | None = None
    """Why this is the last batch before its time; all of its pairs failed."""


def copy_batches(source: Selection, destination: Selection, bounce: Selection | None = None) -> Iterator[Batch]:
    """Copies block after block; stop iterating to stop copying.

    Args:
        source: what to copy.
        destination: where to; as many blocks, equal parts.
        bounce: blocks in host memory to go through where the two can't be copied between directly; None: a buffer.

    Yields:
        Batches in order, without gaps. None is open when one is yielded.

    Raises:
        Unsupported: the bounce blocks are of no use.
    """
    path = path_between(source, destination, bounce)
    step = max(1, BATCH_BYTES // source.part_bytes)
    for start in range(0, len(source.blocks), step):
        stop = min(start + step, len(source.blocks))
        try:
            yield Batch(start=start, stop=stop, failures=tuple(_copy_batch(path, source, destination, start, stop)))
        except StorageFailed as error:
            failures = _all(start, len(source.blocks), error)
            yield Batch(start=start, stop=len(source.blocks), failures=failures, ended_by=error)
            return


def copy(
    source: Selection,
    destination: Selection,
    bounce: Selection | None = None,
    stop: Callable[[], AyniError | None] = lambda: None,
    num_threads: int = NUM_THREADS,
) -> tuple[Failed, ...]:
    """Copies blocks; with several threads where there is much to copy.

    Args:
        source: as in `copy_batches`.
        destination: likewise.
        bounce: likewise.
        stop: asked before each batch, from any of the threads; what it returns is why the other blocks fail.
        num_threads: at most so many, this one among them.

    Returns:
        What was not copied, in order. All others have landed, and nothing is under way any more.

    Raises:
        Unsupported: as `copy_batches`.
    """
    shares = _shares(source, num_threads if bounce is None else 1)
    ending = _Ending(stop)
    if len(shares) == 1:
        return tuple(_copy_share(source, destination, bounce, shares[0], ending))
    with ThreadPoolExecutor(len(shares) - 1, "ayni-copy") as pool:
        others = [pool.submit(_copy_share, source, destination, bounce, share, ending) for share in shares[1:]]
        failures = _copy_share(source, destination, bounce, shares[0], ending)
        for other in others:
            failures += other.result()
    return tuple(failures)


class _Ending:
    """Why a copy ends early; the same for all of its threads."""

    def __init__(self, stop: Callable[[], AyniError | None]) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._error: AyniError | None = None

    def ask(self) -> AyniError | None:
        return self.tell(self._stop())

    def tell(self, error: AyniError | None) -> AyniError | None:
        with self._lock:
            self._error = self._error or error
            return self._error


def _copy_share(
    source: Selection, destination: Selection, bounce: Selection | None, share: tuple[int, int], ending: _Ending
) -> list[Failed]:
    start, stop = share
    ours = replace(source, blocks=source.blocks[start:stop])
    theirs = replace(destination, blocks=destination.blocks[start:stop])
    batches = copy_batches(ours, theirs, bounce)
    failures: list[Failed] = []
    done = start
    while done < stop:
        if error := ending.ask():
            return failures + list(_all(done, stop, error))
        batch = next(batches)
        ending.tell(batch.ended_by)
        failures += [(start + index, error) for index, error in batch.failures]
        done = start + batch.stop
    return failures


def _copy_batch(path: Path, source: Selection, destination: Selection, start: int, stop: int) -> list[Failed]:
    try:
        path.copy(source.blocks[start:stop], destination.blocks[start:stop])
        return []
    except Unreadable as unreadable:
        if stop - start == 1:
            return [(start, unreadable.error)]
    # Something in there can't be read: which of them, only asking for each can tell.
    return [failed for i in range(start, stop) for failed in _copy_batch(path, source, destination, i, i + 1)]


def _all(start: int, stop: int, error: AyniError) -> tuple[Failed, ...]:
    return tuple((index, error) for index in range(start, stop))


def _shares(source: Selection, num_threads: int) -> list[tuple[int, int]]:
    """Cuts the lists into one share for each thread."""
    count = len(source.blocks)
    most = max(1, min(num_threads, count * source.part_bytes // SHARE_BYTES))
    bounds = [count * i // most for i in range(most + 1)]
    return list(pairwise(bounds))
