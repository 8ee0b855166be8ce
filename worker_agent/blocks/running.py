"""Transfers under way: from the claim of their blocks to the moment when no byte can land any more.  [shell]

A transfer claims its blocks at once, so that the next call sees them taken; then tickets move the bytes; when every
ticket has its outcome the result is told; when every ticket is quiesced the blocks are free again. Whatever goes wrong
on the way becomes a result.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ayni.blocks.ids import Ids
from ayni.blocks.notifications import Event, TransferCompleteNotification
from ayni.blocks.transfers import (
    AllFailed,
    BlockFailure,
    Failure,
    TransferOptions,
    TransferOutcome,
    TransferResult,
    refused,
)
from ayni.errors import AyniError, Cancelled, Deadline, Fault
from worker_agent.blocks.engine import Ticket

_log = logging.getLogger(__name__)

Release = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One transfer, ready to start."""

    what: str
    """As it begins "... failed"."""
    rank: int
    destination_blocks: Ids
    """What the outcome names; zeros when the destination is objects."""
    block_bytes: int
    """Bytes that each block moves."""
    engines: tuple[str, ...]
    route: str
    """Label under which the transfer is counted."""
    claim: Callable[[], Release]
    """Takes the blocks, or raises BlockBusy; returns what gives them back."""
    begin: Callable[[float], Awaitable[Sequence[Ticket]]]
    """Starts the copies, given the moment at which the last one must have its outcome."""


@dataclass(slots=True)
class Traffic:
    """What went over one route so far."""

    num_transfers: int = 0
    num_blocks: int = 0
    """Blocks that are done."""
    num_failed: int = 0
    """Blocks that are not."""
    num_bytes: int = 0
    """Bytes of the blocks that are done."""

    def count(self, outcome: TransferOutcome) -> None:
        """Adds one transfer."""
        self.num_transfers += 1
        self.num_blocks += outcome.num_done
        self.num_failed += len(outcome.failures)
        self.num_bytes += outcome.transferred_bytes


class Transfers:
    """Runs jobs on the event loop."""

    def __init__(self) -> None:
        """Starts with none."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.traffic: dict[str, Traffic] = {}
        """By route; what was refused at once is not counted."""

    def start(self, job: Job, options: TransferOptions) -> TransferCompleteNotification:
        """Starts a job; the notification tells how it ended."""
        event = Event(job.what)
        try:
            release = job.claim()
        except AyniError as error:
            return self.refuse(job.what, job.rank, job.destination_blocks, error)
        traffic = self.traffic.setdefault(options.route or job.route, Traffic())
        run = _Run(job, options, event, release, traffic)
        task = asyncio.get_running_loop().create_task(run.live())
        event.notification.on_cancel = run.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return event.notification

    def refuse(self, what: str, rank: int, blocks: Ids, error: AyniError) -> TransferCompleteNotification:
        """Returns the notification of a transfer that did not start."""
        _log.debug("%s refused: %s", what, error)
        event = Event(what)
        event.trigger(TransferResult(outcomes=(refused(rank, blocks, error),)))
        return event.notification

    async def drain(self) -> None:
        """Waits until all transfers are quiesced; each ends by its own deadline."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


class _Run:
    def __init__(self, job: Job, options: TransferOptions, event: Event, release: Release, traffic: Traffic) -> None:
        self._job, self._event, self._release, self._traffic = job, event, release, traffic
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._stop_at = self._began + options.timeout_s - options.drain_s
        self._deadline = self._began + options.timeout_s
        self._beginning: asyncio.Task[Sequence[Ticket]] | None = None
        self._tickets: Sequence[Ticket] = ()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._beginning:
            self._beginning.cancel()
        for ticket in self._tickets:
            ticket.cancel()

    async def live(self) -> None:
        """Lives from the claim to the release. Blocks are free before anybody is told that the transfer has ended."""
        try:
            await self._begin()
            failures = await self._outcome()
            # Whoever was cut off may stay unquiesced for long; the outcome does not wait for that.
            soon = self._loop.time() + self._options.drain_s
            await _wait([ticket.quiesced for ticket in self._tickets], min(self._deadline, soon))
            self._tell(self._ended(failures))
        except AyniError as error:
            self._tell(refused(self._job.rank, self._job.destination_blocks, error))
        except Exception as error:
            _log.exception("%s", self._job.what)
            self._tell(self._ended(self._all(Fault(f"{self._job.what}: {error!r}", detail=repr(error)))))
        finally:
            if landing := [ticket.quiesced for ticket in self._tickets if not ticket.quiesced.done()]:
                await asyncio.wait(landing)
            self._give_back()
            self._event.quiesce()

    async def _begin(self) -> None:
        """Starts the copies; none is started once the transfer was given up."""
        self._beginning = self._loop.create_task(_begun(self._job, self._stop_at))
        if self._cancelled:
            self._beginning.cancel()
        await _wait([self._beginning], self._stop_at)
        self._beginning.cancel()
        await asyncio.wait([self._beginning])
        if self._beginning.cancelled():
            what = f"{self._job.what} was given up before it began"
            raise Cancelled(what) if self._cancelled else self._late()
        self._tickets = self._beginning.result()
        if self._cancelled:
            self.cancel()

    async def _outcome(self) -> Sequence[BlockFailure]:
        await _wait([ticket.outcome for ticket in self._tickets], self._deadline)
        failures: dict[int, Failure] = {}
        for ticket in self._tickets:
            if ticket.outcome.done():
                for index, failure in ticket.outcome.result().failures:
                    failures.setdefault(index, failure)
        if any(not ticket.outcome.done() for ticket in self._tickets):
            late = self._all(self._late())
            failures = {**dict.fromkeys(late.indices, late.failure), **failures} if failures else {}
            return self._named(failures) if failures else late
        return self._named(failures)

    def _tell(self, outcome: TransferOutcome) -> None:
        if outcome.quiesced:
            self._give_back()
        self._traffic.count(outcome)
        self._event.trigger(TransferResult(outcomes=(outcome,)))

    def _give_back(self) -> None:
        release, self._release = self._release, _nothing
        release()

    def _ended(self, failures: Sequence[BlockFailure]) -> TransferOutcome:
        job = self._job
        num_done = len(job.destination_blocks) - len(failures)
        return TransferOutcome(
            rank=job.rank,
            num_done=num_done,
            failures=failures,
            transferred_bytes=num_done * job.block_bytes,
            elapsed_s=self._loop.time() - self._began,
            engines=job.engines,
            quiesced=all(ticket.quiesced.done() for ticket in self._tickets),
        )

    def _all(self, error: AyniError) -> AllFailed:
        return AllFailed(self._job.destination_blocks, Failure.of(error))

    def _named(self, failures: Mapping[int, Failure]) -> Sequence[BlockFailure]:
        """Returns failures in order of index; many with one reason cost no more than one."""
        blocks = self._job.destination_blocks
        if 0 < len(failures) == len(blocks) and len(set(map(id, failures.values()))) == 1:
            return AllFailed(blocks, next(iter(failures.values())))
        return tuple(
            BlockFailure(index=index, block=int(blocks[index]), failure=failures[index]) for index in sorted(failures)
        )

    def _late(self) -> Deadline:
        seconds = self._deadline - self._began
        return Deadline(
            f"{self._job.what} did not end within {seconds:g} s", waiting_for=self._job.what, timeout=seconds
        )


def _nothing() -> None:
    """Gives back what was given back before."""


async def _begun(job: Job, deadline: float) -> Sequence[Ticket]:
    return await job.begin(deadline)


async def _wait(futures: "Sequence[asyncio.Future[Any]]", until: float) -> None:
    """Waits for all futures, at most until a moment."""
    if late := [future for future in futures if not future.done()]:
        await asyncio.wait(late, timeout=max(0.0, until - asyncio.get_running_loop().time()))
