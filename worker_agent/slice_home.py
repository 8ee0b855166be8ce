"""A slice of this very worker: its contribution is added in place, without a stream.  [shell]

Legend: S elements in a slice, C elements in a chunk.
"""

import asyncio
import time

import numpy as np

from ayni import failpoints, tensors
from ayni.reduce.packed import Values, packed
from ayni.shm.regions import Regions
from ayni.shm.sources import Source
from ayni.tensors import Floats
from worker_agent.chunks import slices
from worker_agent.exchange import Outcome
from worker_agent.session import ExchangeTimes
from worker_agent.slice_contribution import SliceContribution
from worker_agent.slice_work import SliceWork, first_of

_BURST = 4
"""Chunks that are added at a time where they have to be converted."""


async def carry(contribution: SliceContribution, work: SliceWork, regions: Regions | None) -> Outcome:
    """Contributes to a slice of this very worker, and takes its mean."""
    begun = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(_send(contribution, work, regions))
            taking = group.create_task(_take(contribution, work))
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    first, last = taking.result()
    reduction = contribution.live.round
    loss, num_correct, num_predictions = contribution.live.totals()
    return Outcome(
        num_contributors=reduction.num_contributors,
        total_weight=reduction.total_weight,
        global_loss=loss,
        num_correct=num_correct,
        num_predictions=num_predictions,
        times=ExchangeTimes(begun=begun, accepted=begun, sent=sending.result(), first=first, last=last),
    )


async def _send(contribution: SliceContribution, work: SliceWork, regions: Regions | None) -> float:
    """Adds the parts, chunk by chunk; returns when that was done."""
    spec, parts = work.contribution.spec, work.contribution.parts
    if spec.dtype == "float32" and not contribution.is_held:
        return _lend(contribution, work, regions)
    numbers = [] if contribution.is_held else [index for index, part in enumerate(parts) if part is not None]
    pieces = list(slices(spec.num_elements, spec.dtype, contribution.chunk_bytes, numbers))
    for index, piece in enumerate(pieces):
        if index == len(pieces) // 2:
            failpoints.hit("worker.contribution.half")
        if contribution.failed:
            return 0.0
        part_S = parts[piece.part]
        assert part_S is not None
        contribution.add(piece.part, piece.start, _as_received(part_S[piece.start : piece.stop], spec.dtype))
        await contribution.room()
        if index % _BURST == _BURST - 1:
            await asyncio.sleep(0)
    failpoints.hit("worker.contribution.sent")
    work.on_sent()
    return time.perf_counter()


def _lend(contribution: SliceContribution, work: SliceWork, regions: Regions | None) -> float:
    """Has the parts added where they lie; returns when that was said."""
    for part, part_S in enumerate(work.contribution.parts):
        if part_S is not None:
            region, _ = (regions.find(part_S) if regions else None) or (None, 0)
            generation, data = region.generation if region else 0, part_S.view(np.uint8)
            # Or else sums would be formed in it, and it could not be contributed again.
            data.flags.writeable = False
            found = Source(region=region, generation=generation, data=data, dtype="float32")
            contribution.lend(part, 0, found)
    failpoints.hit("worker.contribution.half")
    failpoints.hit("worker.contribution.sent")
    work.on_sent()
    return time.perf_counter()


async def _take(contribution: SliceContribution, work: SliceWork) -> tuple[float, float]:
    """Copies the mean as it is made; returns when that began and ended."""
    out_S, live = work.contribution.out, contribution.live
    first = last = 0.0
    if out_S is not None:
        contribution.take_home(out_S)
    while await contribution.next_chunk(is_run=True) is not None:
        last = time.perf_counter()
        first = first or last
    if out_S is not None and live.round.total_weight == 0:
        out_S.fill(0)
    return first, last


def _as_received(values_C: Floats, dtype: str) -> Values:
    """Returns values as they are after a way over the wire, of a type that rounds them."""
    return packed(np.frombuffer(tensors.encode(values_C, dtype), np.uint8), dtype)
