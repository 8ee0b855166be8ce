"""What the owner of a shared pool tells its readers: a control page, and one version for each block.  [core]

    page 0       magic, format version, incarnation of the owner, epoch, whether it is open; 64 bits each
    from 4096    versions, 64 bits for each block; odd while the block is being written

Only the owner writes; readers map it read-only. The epoch counts how often the pool was lent: a reader that knows
another one has to connect again. A reader that finds the same even version before and after its copy has the bytes of
one moment. Every value is one aligned store. Between a copy and the look at its version lie many instructions and the
interpreter's lock, so that processors that reorder reads don't matter.
"""

import numpy as np
import numpy.typing as npt

from ayni.blocks.ids import Ids
from ayni.errors import StaleEpoch
from worker_agent.blocks.memory import Bytes

_PAGE_BYTES = 4096
_MAGIC = int.from_bytes(b"AYNIPOOL", "little")
_VERSION = 1
_FIELDS = ("magic", "version", "incarnation", "epoch", "is_open")

Versions = npt.NDArray[np.uint64]
"""Shape [N]."""


def control_bytes(num_blocks: int) -> int:
    """Returns the size of a pool's control memory."""
    return _PAGE_BYTES + 8 * num_blocks


class PoolControl:
    """One side's view of a pool's control memory."""

    def __init__(self, memory: Bytes) -> None:
        """Looks at control memory, shape [control_bytes]."""
        words = memory.view(np.uint64)
        self._fields = words[: len(_FIELDS)]
        self._versions = words[_PAGE_BYTES // 8 :]

    def lend(self, incarnation: int) -> int:
        """Opens the pool for readers and returns the new epoch. Owner only."""
        epoch = int(self._fields[3]) + 1
        self._fields[:4] = (_MAGIC, _VERSION, incarnation, epoch)
        self._fields[4] = 1
        return epoch

    def withdraw(self) -> None:
        """Closes the pool: whatever readers copy from now on counts as failed. Owner only."""
        self._fields[4] = 0

    def begin_write(self, blocks: Ids) -> None:
        """Marks blocks as being written; each at most once. Owner only."""
        self._versions[blocks] |= np.uint64(1)

    def end_write(self, blocks: Ids) -> None:
        """Marks blocks as written, with other versions than before `begin_write`. Owner only."""
        self._versions[blocks] = (self._versions[blocks] | np.uint64(1)) + np.uint64(1)

    def versions(self, blocks: Ids) -> Versions:
        """Returns the versions of blocks as they are now."""
        return self._versions[blocks]

    def close(self) -> None:
        """Looks at the memory no more."""
        self._fields = np.zeros(len(_FIELDS), np.uint64)
        self._versions = np.zeros(0, np.uint64)

    def check(self, incarnation: int, epoch: int) -> None:
        """Refuses a pool that was lent no more, or again, since a reader connected.

        Raises:
            StaleEpoch: names both epochs.
        """
        now = tuple(int(value) for value in self._fields)
        if now != (_MAGIC, _VERSION, incarnation, epoch, 1):
            raise StaleEpoch(
                "the peer lends this layout no more, or lent it again, since it was connected; connect to it again",
                epoch=epoch,
                current_epoch=now[3],
            )


def is_being_written(versions: Versions) -> npt.NDArray[np.bool_]:
    """Says of each version whether its block was being written, shape [N]."""
    odd: npt.NDArray[np.bool_] = versions & np.uint64(1) == 1
    return odd
