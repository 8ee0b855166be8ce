"""Turns calls about stored objects into jobs, and what becomes of their keys into what becomes of blocks.  [shell]"""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LocalLayout
from ayni.blocks.objects import KeyOutcome
from ayni.blocks.transfers import Failure, ObjectKeys, TransferOptions
from ayni.errors import BadRequest, UnknownObject, Unsupported
from worker_agent.blocks.engine import MoveResult, Ticket
from worker_agent.blocks.holds import Held, Holds
from worker_agent.blocks.moves import refuse
from worker_agent.blocks.object_half import ObjectHalf
from worker_agent.blocks.objects.batch import Batch
from worker_agent.blocks.objects.tier import ObjectTier
from worker_agent.blocks.registry import Entry, Registry
from worker_agent.blocks.running import Job
from worker_agent.blocks.validation import check_range, check_unique

_WHOLE_BLOCKS_ONLY = ("layers", "bounce", "source_axis_order", "destination_axis_order", "write_notification")


class ObjectJobs:
    """Makes jobs that load and store objects, for one worker."""

    def __init__(self, registry: Registry, holds: Holds, objects: ObjectHalf) -> None:
        """Takes the worker's parts."""
        self._registry, self._holds, self._objects = registry, holds, objects
        self.rank = 0

    def load(self, source: ObjectKeys, place: LocalLayout, blocks: Ids, options: TransferOptions) -> Job:
        """Returns the job that loads stored objects into blocks; raises what is wrong with it."""
        destination = self._registry.at(place)
        check_load(destination, source.keys, blocks)
        tier = self._tier(destination, options)

        async def begin(deadline: float) -> Sequence[Ticket]:
            return [_ticket(tier.get(source.keys, destination.memory, blocks, deadline), source.keys, destination)]

        held: list[Held] = [(destination, blocks)]
        what = f"load of stored objects into the {place}"
        return self._job(what, destination, blocks, begin, reads=[], writes=held)

    def store(self, place: LocalLayout, blocks: Ids, to: ObjectKeys, options: TransferOptions) -> Job:
        """Returns the job that stores blocks as objects; raises what is wrong with it."""
        source = self._registry.at(place)
        check_store(source, to.keys, blocks)
        tier = self._tier(source, options)

        async def begin(deadline: float) -> Sequence[Ticket]:
            return [_ticket(tier.put(source.memory, blocks, to.keys, None, deadline), to.keys, source)]

        what = f"store of blocks of the {place}"
        return self._job(what, source, np.zeros(len(blocks), np.int64), begin, reads=[(source, blocks)], writes=[])

    def _job(
        self,
        what: str,
        entry: Entry,
        destination_blocks: Ids,
        begin: Callable[[float], Awaitable[Sequence[Ticket]]],
        *,
        reads: Sequence[Held],
        writes: Sequence[Held],
    ) -> Job:
        return Job(
            what=what,
            rank=self.rank,
            destination_blocks=destination_blocks,
            block_bytes=entry.descriptor.config.block_bytes,
            engines=("object",),
            route=f"objects to {entry.place}" if writes else f"{entry.place} to objects",
            claim=lambda: self._holds.take(reads, writes),
            begin=begin,
        )

    def _tier(self, entry: Entry, options: TransferOptions) -> ObjectTier:
        for field in _WHOLE_BLOCKS_ONLY:
            refuse(options, field, getattr(options, field) is not None, "for stored objects, which are whole blocks")
        refuse(options, "engine", options.engine not in ("", "object"), "for stored objects")
        tier = self._objects.tier(entry)
        if tier is None:
            raise Unsupported("this worker has no object store; configure one first", field="object_store", detail="")
        return tier


def check_load(destination: Entry, keys: Sequence[bytes], blocks: Ids) -> None:
    """Refuses a load of keys into blocks that is not possible; a key may come twice."""
    _check_lengths(keys, blocks)
    check_range(destination.memory.geometry, blocks, "destination")
    check_unique(blocks, "destination")


def check_store(source: Entry, keys: Sequence[bytes], blocks: Ids) -> None:
    """Refuses a store of blocks under keys that is not possible; a block may come twice."""
    _check_lengths(keys, blocks)
    check_range(source.memory.geometry, blocks, "source")
    if len(set(keys)) != len(keys):
        raise BadRequest("a key is named more than once: each is stored from one block", field="keys")


def _check_lengths(keys: Sequence[bytes], blocks: Ids) -> None:
    if len(keys) != len(blocks):
        message = f"{len(keys)} keys and {len(blocks)} blocks: name as many of the one as of the other"
        raise BadRequest(message, field="keys")


def _ticket(batch: Batch[KeyOutcome], keys: Sequence[bytes], entry: Entry) -> Ticket:
    """Returns a batch of the object tier as a ticket."""
    ticket = Ticket(cancel=batch.cancel)
    block_bytes = entry.descriptor.config.block_bytes
    batch.outcome.add_done_callback(lambda done: ticket.outcome.set_result(_result(done.result(), keys, block_bytes)))
    batch.quiesced.add_done_callback(lambda _: ticket.quiesced.set_result(None))
    return ticket


def _result(outcomes: Sequence[KeyOutcome], keys: Sequence[bytes], block_bytes: int) -> MoveResult:
    failures = tuple(
        (index, outcome.failure or _absent(keys[index]))
        for index, outcome in enumerate(outcomes)
        if not outcome.is_success
    )
    return MoveResult(failures=failures, moved_bytes=(len(outcomes) - len(failures)) * block_bytes)


def _absent(key: bytes) -> Failure:
    return Failure.of(UnknownObject(f"there is no object {key.hex()}", key=key.hex(), detail="absent"))
