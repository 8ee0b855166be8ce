"""Copies blocks between byte tensors, pair by pair, on whatever device they are.  [shell]

As `array_copy`, with torch: a copy on an accelerator has to be started, which costs more than an assignment, so only
long runs are copied one by one.
"""

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, TypeAlias

from ayni.blocks.ids import Ids
from worker_agent.blocks.pairs import Pair, Place
from worker_agent.blocks.plan import runs

if TYPE_CHECKING:
    # Loaded by whoever has tensors: workers without an accelerator start without it.
    import torch

INDEXED_BELOW_BYTES = 1 << 20
"""Runs shorter than this are copied by index."""

_LANES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Buffers: TypeAlias = "Sequence[torch.Tensor]"
"""The allocations of one side, each a flat tensor of bytes; all on one device."""


def copy_blocks(
    pairs: Sequence[Pair], source: Buffers, destination: Buffers, source_blocks: Ids, destination_blocks: Ids
) -> None:
    """Copies what the pairs say, of source block i to destination block i for each i. Does not wait for the device."""
    todo = runs(source_blocks, destination_blocks)
    if not todo:
        return
    num_blocks = int(source_blocks.max()) + 1, int(destination_blocks.max()) + 1
    for pair in pairs:
        lane = _lane(pair, source, destination)
        sources = _tensor(pair, pair.source, source, num_blocks[0], lane)
        destinations = _tensor(pair, pair.destination, destination, num_blocks[1], lane)
        if len(todo) == 1 or pair.block_bytes * len(source_blocks) >= INDEXED_BELOW_BYTES * len(todo):
            for first, target, count in todo:
                destinations[target : target + count].copy_(sources[first : first + count])
        else:
            picked = sources.index_select(0, _index(source_blocks, sources))
            destinations.index_copy_(0, _index(destination_blocks, destinations), picked.to(destinations.device))


def wait(device: "torch.device") -> None:
    """Waits until what this thread started on a device is done."""
    import torch

    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _index(blocks: Ids, like: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.tensor(blocks, device=like.device)


def _lane(pair: Pair, source: Buffers, destination: Buffers) -> int:
    starts = source[pair.source.allocation], destination[pair.destination.allocation]
    return gcd(8, pair.lane_bytes, *(start for t in starts for start in (t.storage_offset(), t.data_ptr())))


def _tensor(pair: Pair, place: Place, buffers: Buffers, num_blocks: int, lane: int) -> "torch.Tensor":
    """Returns one side of a pair, shape [B, ...], with just as many blocks as are needed; the last axis counts lanes.

    torch refuses blocks that end beyond the buffer's storage.
    """
    import torch

    buffer = buffers[place.allocation]
    lanes = buffer[: len(buffer) // lane * lane].view(getattr(torch, _LANES[lane]))
    strides = [stride // lane for stride in (place.block_stride, *place.strides[:-1])]
    shape = (num_blocks, *pair.shape[:-1], pair.shape[-1] // lane)
    return lanes.as_strided(shape, (*strides, 1), lanes.storage_offset() + place.offset // lane)
