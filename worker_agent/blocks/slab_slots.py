"""What is known of each block of a slab: whether it was written, and its checksum; see `slab_header`.  [shell]

The table is in memory and in the file; whoever changes the one writes the other when the bytes of the blocks are
written. Threads may work on different blocks at the same time.

A *round* is the parts of a block that were written one after another. Once they cover the block it is whole, whatever
it was before. Rounds are in memory only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ayni.blocks.ids import Ids
from ayni.errors import Checksum, StorageFailed
from worker_agent.blocks.memory import Bytes, Part
from worker_agent.blocks.slab_file import SlabFile
from worker_agent.blocks.slab_header import (
    NEVER,
    PAGE_BYTES,
    PARTS,
    SLOT,
    SOME,
    TORN,
    WHOLE,
    checks_of,
    checksum_of,
    unsound,
)

_SLOTS_OF_PAGE = PAGE_BYTES // SLOT.itemsize
_AFTER_PART = {NEVER: SOME, SOME: SOME, WHOLE: PARTS, PARTS: PARTS, TORN: TORN}
"""State of a block after one more part of it was written, by the state before."""

_ReadBlock = Callable[[int], Bytes]
"""Returns one block, shape [1, block_bytes]; may raise StorageFailed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What blocks were before a write began."""

    ids: list[int]
    states: list[int]
    rounds: list[frozenset[Part]]


class SlabSlots:
    """The slots of an open slab."""

    def __init__(self, file: SlabFile, cover: Callable[[frozenset[Part]], bool]) -> None:
        """Reads them. What was in parts when the last owner ended counts as torn, as does a damaged slot.

        Args:
            file: the slab.
            cover: says whether parts together are a whole block.
        """
        self._file = file
        self._cover = cover
        self._slots = file.read_slots()
        self._states, self._checksums = self._slots["state"], self._slots["checksum"]
        self._rounds: dict[int, frozenset[Part]] = {}
        self._lock = threading.Lock()
        wrong = unsound(self._slots) | (self._states == PARTS) | (self._states == SOME)
        torn = np.flatnonzero(wrong).astype(np.int64)
        self._states[torn] = TORN
        self.save(torn)

    def written(self) -> Ids:
        """Returns the ids of all blocks that were written whole and are not known to be torn, ascending."""
        return np.flatnonzero((self._states == WHOLE) | (self._states == PARTS)).astype(np.int64)

    def whole(self, ids: Ids) -> Ids:
        """Returns those of some blocks that have a checksum."""
        found: Ids = ids[self._states[ids] == WHOLE]
        return found

    def begin_write(self, ids: Ids) -> Begun:
        """Says that blocks are torn, with no round under way, unless `end_whole` or `end_part` follows."""
        rounds = [self._rounds.pop(block, frozenset()) for block in ids.tolist()]
        begun = Begun(ids=ids.tolist(), states=self._states[ids].tolist(), rounds=rounds)
        self._states[ids] = TORN
        return begun

    def end_whole(self, ids: Ids, checksums: Sequence[int]) -> None:
        """Says that blocks were written whole, with these checksums."""
        self._checksums[ids] = np.array(checksums, np.uint64)
        self._states[ids] = WHOLE

    def end_part(self, begun: Begun, part: Part, read_block: _ReadBlock) -> None:
        """Says that a part of blocks was written; those whose rounds cover them now are whole."""
        for block, state, parts in zip(begun.ids, begun.states, begun.rounds, strict=True):
            if self._cover(parts | {part}):
                self._give_checksum(block, read_block)
            else:
                self._rounds[block] = parts | {part}
                self._states[block], self._checksums[block] = _AFTER_PART[state], 0

    def save(self, ids: Ids) -> None:
        """Writes the slots of blocks to the file; raises StorageFailed."""
        # By whole pages, which others may share: one thread at a time, so that the newest state is written last.
        with self._lock:
            for page in np.unique(ids // _SLOTS_OF_PAGE).tolist():
                first = page * _SLOTS_OF_PAGE
                slots = self._slots[first : first + _SLOTS_OF_PAGE].copy()
                of_page = np.arange(first, first + len(slots))
                slots["check"] = np.where(slots["state"] == NEVER, 0, checks_of(of_page, slots))
                self._file.write(PAGE_BYTES * (page + 1), [slots.view(np.uint8)])

    def complete(self, read_block: _ReadBlock) -> None:
        """Gives blocks that are whole, but were written in parts since, their checksums."""
        for block in np.flatnonzero(self._states == PARTS).tolist():
            self._give_checksum(block, read_block)
            self.save(np.array([block]))

    def check_written(self, ids: Ids) -> None:
        """Refuses blocks that can't be read.

        Raises:
            Checksum: one is torn.
            StorageFailed: the slab was recovered, and one was never written, or not all of it.
        """
        states = self._states[ids]
        if (states == TORN).any():
            what = "it was torn: its last write did not end, not all of its parts were written, or its slot is damaged"
            raise self._damaged(int(ids[np.argmax(states == TORN)]), what, "", "")
        for state, how in ((NEVER, "never written"), (SOME, "written only in part")):
            if self._file.recovered and (states == state).any():
                detail = f"block {ids[np.argmax(states == state)]} was {how}"
                message = f"{detail} to the slab file {self._file.path}; write all of it before it is read"
                raise StorageFailed(message, place=self._file.path, detail=detail)

    def verify(self, ids: Ids, checksums: Sequence[int]) -> None:
        """Compares the checksums of blocks that were read with those of what was written; raises Checksum."""
        found = np.array(checksums, np.uint64)
        wrong = (found != self._checksums[ids]) & (self._states[ids] == WHOLE)
        if wrong.any():
            i = int(np.argmax(wrong))
            what = "its bytes are not those that were written"
            raise self._damaged(int(ids[i]), what, f"{self._checksums[ids[i]]:016x}", f"{found[i]:016x}")

    def tear_damaged(self, ids: Ids, read_block: _ReadBlock) -> None:
        """Says that those of some blocks whose bytes are not what their checksums say are torn."""
        for block in self.whole(ids).tolist():
            if checksum_of(block, read_block(block)[0]) != self._checksums[block]:
                self._states[block] = TORN

    def _give_checksum(self, block: int, read_block: _ReadBlock) -> None:
        self.end_whole(np.array([block]), [checksum_of(block, read_block(block)[0])])

    def _damaged(self, block: int, what: str, expected: str, received: str) -> Checksum:
        message = f"block {block} of the slab file {self._file.path} is damaged: {what}; write it again"
        return Checksum(message, name=f"{self._file.path} block {block}", expected=expected, received=received)
