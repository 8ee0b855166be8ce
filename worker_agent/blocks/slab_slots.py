"""What is known of each block of a slab: whether it was written, and its checksum; see `slab_header`.  [shell]

The table is in memory and in the file; whoever changes the one writes the other when the bytes of the blocks are
written. Threads may work on different blocks at the same time.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ayni.blocks.ids import Ids
from ayni.errors import Checksum, StorageFailed
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.slab_file import SlabFile
from worker_agent.blocks.slab_header import NEVER, PAGE_BYTES, PARTS, SLOT, TORN, WHOLE, checksums_of

_SLOTS_OF_PAGE = PAGE_BYTES // SLOT.itemsize


class SlabSlots:
    """The slots of an open slab."""

    def __init__(self, file: SlabFile) -> None:
        """Reads them. What was in parts when the last owner was killed counts as torn."""
        self._file = file
        self._slots = file.read_slots()
        self._states, self._checksums = self._slots["state"], self._slots["checksum"]
        self._lock = threading.Lock()
        if not file.was_clean:
            parts = self._in_parts()
            self._states[parts] = TORN
            self.save(parts)

    def written(self) -> Ids:
        """Returns the ids of all blocks that were written and are not known to be torn, ascending."""
        return np.flatnonzero((self._states == WHOLE) | (self._states == PARTS)).astype(np.int64)

    def begin_write(self, ids: Ids) -> None:
        """Says that blocks are torn unless `end_write` follows."""
        self._states[ids] = TORN

    def end_write(self, ids: Ids, checksums: Sequence[int] | None) -> None:
        """Says that blocks were written: whole, with these checksums, or, with None, in parts."""
        self._checksums[ids] = 0 if checksums is None else np.array(checksums, np.uint64)
        self._states[ids] = PARTS if checksums is None else WHOLE

    def save(self, ids: Ids) -> None:
        """Writes the slots of blocks to the file; raises StorageFailed."""
        # By whole pages, which others may share: one thread at a time, so that the newest state is written last.
        with self._lock:
            for page in np.unique(ids // _SLOTS_OF_PAGE).tolist():
                slots = self._slots[page * _SLOTS_OF_PAGE : (page + 1) * _SLOTS_OF_PAGE]
                self._file.write(PAGE_BYTES * (page + 1), [slots.view(np.uint8)])

    def complete(self, read_block: Callable[[int], Bytes]) -> None:
        """Gives blocks in parts their checksums.

        Args:
            read_block: returns one block, shape [1, block_bytes]; may raise StorageFailed.
        """
        for block in self._in_parts().tolist():
            ids = np.array([block])
            self.end_write(ids, checksums_of([block], read_block(block)))
            self.save(ids)

    def check_written(self, ids: Ids) -> None:
        """Refuses blocks that can't be read.

        Raises:
            Checksum: one is torn.
            StorageFailed: the slab was recovered, and one was never written.
        """
        states = self._states[ids]
        if (states == TORN).any():
            raise self._damaged(int(ids[np.argmax(states == TORN)]), "it was torn: its last write did not end", "", "")
        if self._file.recovered and (states == NEVER).any():
            detail = f"block {ids[np.argmax(states == NEVER)]} was never written"
            message = f"{detail} to the slab file {self._file.path}; write it before it is read"
            raise StorageFailed(message, place=self._file.path, detail=detail)

    def verify(self, ids: Ids, checksums: Sequence[int]) -> None:
        """Compares the checksums of blocks that were read with those of what was written; raises Checksum."""
        found = np.array(checksums, np.uint64)
        wrong = (found != self._checksums[ids]) & (self._states[ids] == WHOLE)
        if wrong.any():
            i = int(np.argmax(wrong))
            what = "its bytes are not those that were written"
            raise self._damaged(int(ids[i]), what, f"{self._checksums[ids[i]]:016x}", f"{found[i]:016x}")

    def _in_parts(self) -> Ids:
        return np.flatnonzero(self._states == PARTS).astype(np.int64)

    def _damaged(self, block: int, what: str, expected: str, received: str) -> Checksum:
        message = f"block {block} of the slab file {self._file.path} is damaged: {what}; write it again"
        return Checksum(message, name=f"{self._file.path} block {block}", expected=expected, received=received)
