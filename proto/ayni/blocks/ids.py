"""Block ids as runs, the way they travel: run i is counts[i] ids from starts[i] upwards.  [core]"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni.errors import BadRequest, TooLarge

MAX_BLOCK_IDS = 1 << 22
"""Ids of one call; a declared number above it is refused before a list is made."""

_SHORT = 16
"""Ids up to which a plain loop is faster than arrays."""
_TOP = 1 << 63
_NO_IDS = "block ids must be integers from 0 to 2**63 - 1"

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
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= _TOP):
        raise BadRequest(_NO_IDS, field="blocks")
    return values.astype(np.int64).reshape(-1)


def to_runs(ids: Ids) -> Runs:
    """Returns the fewest runs that give these ids in this order."""
    if len(ids) <= _SHORT:
        return _short_runs(ids.tolist())
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = tuple(np.diff(firsts, append=len(ids)).tolist())
    return Runs(starts=tuple(ids[firsts].tolist()), counts=() if len(firsts) == len(ids) else counts)


def from_runs(starts: Sequence[int], counts: Sequence[int]) -> Ids:
    """Returns the ids that runs stand for.

    Raises:
        BadRequest: the lists' lengths differ, or a count is 0.
        TooLarge: there are more than MAX_BLOCK_IDS ids.
    """
    if counts and len(counts) != len(starts):
        raise BadRequest(f"block ids have {len(starts)} starts and {len(counts)} counts", field="blocks")
    if len(starts) > MAX_BLOCK_IDS:
        raise _too_many(len(starts))
    sizes = _unsigned(counts) if counts else np.ones(len(starts), np.uint64)
    # No sum of so few and small counts overflows.
    is_small = not len(sizes) or sizes.max() <= MAX_BLOCK_IDS
    if not is_small or (total := int(sizes.sum())) > MAX_BLOCK_IDS:
        raise _too_many(sum(counts))
    firsts = _unsigned(starts)
    if not sizes.all():
        raise BadRequest("a run of block ids must have at least one id", field="blocks")
    if len(firsts) and (firsts.max() >= _TOP or (firsts + sizes).max() > _TOP):
        raise BadRequest(_NO_IDS, field="blocks")
    return _expanded(firsts.astype(np.int64), sizes.astype(np.int64), total)


def _expanded(starts: Ids, counts: Ids, total: int) -> Ids:
    if total == len(starts):
        return starts
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(total, dtype=np.int64)


def _short_runs(ids: list[int]) -> Runs:
    starts, counts = list[int](), list[int]()
    for place, block in enumerate(ids):
        if place and block == ids[place - 1] + 1:
            counts[-1] += 1
        else:
            starts.append(block)
            counts.append(1)
    return Runs(starts=tuple(starts), counts=() if len(starts) == len(ids) else tuple(counts))


def _unsigned(values: Sequence[int]) -> npt.NDArray[np.uint64]:
    try:
        return np.fromiter(values, np.uint64, len(values))
    except OverflowError:
        raise BadRequest(_NO_IDS, field="blocks") from None


def _too_many(total: int) -> TooLarge:
    return TooLarge(f"{total} block ids in one call; at most {MAX_BLOCK_IDS}", field="blocks", limit=MAX_BLOCK_IDS)
