"""Which blocks are being read or written now, so that no two transfers meet in one block.  [core]

Theory of operation. A transfer claims all its blocks before it starts, or none, and gives them back when no byte of it
can land any more. A block may be read by many or written by one. Per block one number is kept: 0 free, n > 0 read by
n claims, -1 being written.

Not safe to share between threads; call it from one. It does not know layouts, only names and numbers of blocks.

Legend: B blocks of a layout, N ids.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.errors import BlockBusy, UnknownLayout

_WRITTEN = -1

Key = Hashable
"""Names a layout; how it reads as text is what errors say."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Blocks that one transfer reads and writes, by layout."""

    reads: tuple[tuple[Key, Ids], ...]
    writes: tuple[tuple[Key, Ids], ...]


class Occupancy:
    """The blocks of some layouts, and who uses them."""

    def __init__(self) -> None:
        """Knows no layouts."""
        self._states: dict[Key, npt.NDArray[np.int32]] = {}
        self._claims: set[Claim] = set()

    def add(self, key: Key, num_blocks: int) -> None:
        """Takes a layout in; all its blocks are free."""
        assert key not in self._states, f"{key} was added twice"
        self._states[key] = np.zeros(num_blocks, dtype=np.int32)

    def remove(self, key: Key) -> None:
        """Forgets a layout.

        Raises:
            BlockBusy: some of its blocks are in use.
        """
        busy = np.flatnonzero(self._state(key))
        if len(busy):
            raise _busy(key, int(busy[0]), f"in use, with {len(busy) - 1} others; the layout can't be given up")
        del self._states[key]

    def is_idle(self, key: Key) -> bool:
        """Says whether no block of a layout is in use."""
        return not self._state(key).any()

    def claim(self, reads: Sequence[tuple[Key, Ids]] = (), writes: Sequence[tuple[Key, Ids]] = ()) -> Claim:
        """Takes blocks, all or none.

        Args:
            reads: ids by layout, in range; repeated ids count once.
            writes: as `reads`; shares no block with them.

        Raises:
            BlockBusy: a block to write is in use, or a block to read is being written; names the first.
            UnknownLayout: a layout was not added, or was removed.
        """
        claim = Claim(reads=_joined(reads), writes=_joined(writes))
        for key, ids in claim.writes:
            self._refuse(key, ids, self._state(key)[ids] != 0)
        for key, ids in claim.reads:
            self._refuse(key, ids, self._state(key)[ids] == _WRITTEN)
        self._apply(claim, written=_WRITTEN)
        meets = any((self._states[key][ids] == _WRITTEN).any() for key, ids in claim.reads)
        if meets:
            self._apply(claim, written=-_WRITTEN)
        assert not meets, "a transfer reads and writes one block; that is refused before"
        self._apply(claim, read=1)
        self._claims.add(claim)
        return claim

    def release(self, claim: Claim) -> None:
        """Gives the blocks of a claim back; once."""
        assert claim in self._claims, "a claim was given back twice"
        self._claims.remove(claim)
        self._apply(claim, read=-1, written=-_WRITTEN)

    def _apply(self, claim: Claim, read: int = 0, written: int = 0) -> None:
        for key, ids in claim.reads:
            self._states[key][ids] += read
        for key, ids in claim.writes:
            self._states[key][ids] += written

    def _state(self, key: Key) -> npt.NDArray[np.int32]:
        state = self._states.get(key)
        if state is None:
            raise UnknownLayout(f"there is no layout {key} here (any more)", layout=key)
        return state

    def _refuse(self, key: Key, ids: Ids, is_busy: npt.NDArray[np.bool_]) -> None:
        if is_busy.any():
            block = int(ids[is_busy.argmax()])
            how = "written" if self._state(key)[block] == _WRITTEN else "read"
            raise _busy(key, block, f"being {how} by another transfer; ask again when that has ended")


def _joined(sides: Iterable[tuple[Key, Ids]]) -> tuple[tuple[Key, Ids], ...]:
    """Joins the ids of each layout. Repeated ids stay: adding to a state by index counts each once."""
    by_key: dict[Key, list[Ids]] = {}
    for key, ids in sides:
        by_key.setdefault(key, []).append(ids)
    return tuple((key, np.concatenate(lists)) for key, lists in by_key.items())


def _busy(key: Key, block: int, why: str) -> BlockBusy:
    return BlockBusy(f"block {block} of {key} is {why}", layout=key, block=block)
