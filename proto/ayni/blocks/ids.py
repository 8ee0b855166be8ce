"""Block ids as runs, the way they travel: run i is counts[i] ids from starts[i] upwards.  [core]"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ayni.errors import BadRequest, TooLarge

MAX_BLOCK_IDS = 1 << 24
"""Ids of one call; a declared number above it is refused before a list is made."""

Ids = npt.NDArray[np.int64]
"""Shape [N]; order is that of the caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Ids as runs; empty counts mean one id each."""

    starts: tuple[int, ...]
    counts: tuple[int, ...] = ()


def as_ids(ids: Iterable[int]) -> Ids:
    """Returns ids as an array, in the same order.

    Raises:
        BadRequest: an id is negative, not an integer, or above 63 bits.
    """
    if isinstance(ids, range):
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    values = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids))
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= 1 << 63):
        raise BadRequest("block ids must be integers from 0 to 2**63 - 1", field="blocks")
    return values.astype(np.int64).reshape(-1)


def to_runs(ids: Ids) -> Runs:
    """Returns the fewest runs that give these ids in this order."""
    if not len(ids):
        return Runs(starts=())
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(ids)]
    counts = tuple(stop - start for start, stop in pairwise(bounds))
    starts = tuple(ids[bounds[:-1]].tolist())
    return Runs(starts=starts, counts=() if max(counts) == 1 else counts)


def from_runs(starts: Sequence[int], counts: Sequence[int]) -> Ids:
    """Returns the ids that runs stand for.

    Raises:
        BadRequest: the lists' lengths differ, or a count is 0.
        TooLarge: there are more than MAX_BLOCK_IDS ids.
    """
    if counts and len(counts) != len(starts):
        raise BadRequest(f"block ids have {len(starts)} starts and {len(counts)} counts", field="blocks")
    total = sum(counts) if counts else len(starts)
    if total > MAX_BLOCK_IDS:
        raise TooLarge(f"{total} block ids in one call; at most {MAX_BLOCK_IDS}", field="blocks", limit=MAX_BLOCK_IDS)
    if not counts:
        return as_ids(starts)
    if min(counts) < 1:
        raise BadRequest("a run of block ids must have at least one id", field="blocks")
    if max(start + count for start, count in zip(starts, counts, strict=True)) > 1 << 63:
        raise BadRequest("block ids must be integers from 0 to 2**63 - 1", field="blocks")
    runs = (np.arange(start, start + count, dtype=np.int64) for start, count in zip(starts, counts, strict=True))
    return np.concatenate(list(runs))
