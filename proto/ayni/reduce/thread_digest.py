"""A digest of a mean that another thread makes beside the sums.  [shell]"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

from ayni.reduce.digest import MeanDigest
from ayni.tensors import Floats

THREAD_FROM = 1 << 20
"""Elements of a mean from which on a thread digests it; below, handing over costs more."""


class ThreadDigest(MeanDigest):
    """A digest that another thread makes; whoever reads it waits for that."""

    looks_at_once = False

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()
        self._pending: list[Future[None]] = []

    def add(self, mean_C: Floats, square_sums: Sequence[float] = ()) -> None:
        """Has the next chunk taken; it must not change afterwards."""
        self._pending.append(_thread().submit(super().add, mean_C, square_sums))

    @property
    def num_elements(self) -> int:
        """See `MeanDigest.num_elements`."""
        self._join()
        return super().num_elements

    def digests(self) -> list[bytes]:
        """See `MeanDigest.digests`."""
        self._join()
        return super().digests()

    def square_sum(self) -> float:
        """See `MeanDigest.square_sum`."""
        self._join()
        return super().square_sum()

    def square_expansion(self) -> list[float]:
        """See `MeanDigest.square_expansion`."""
        self._join()
        return super().square_expansion()

    def _join(self) -> None:
        while self._pending:
            self._pending.pop(0).result()


def digest_for(num_elements: int) -> type[MeanDigest]:
    """Returns what a mean of so many elements is taken down in."""
    return ThreadDigest if num_elements >= THREAD_FROM else MeanDigest


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ayni-digest")
