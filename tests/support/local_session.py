"""A whole run inside one process: sessions that reduce exactly, without a network.

Workers are threads, but take turns: torch's default generators belong to the process, so only one worker at a time may
be between `receive_shard` and `commit`. A worker may be absent from a step, which makes its micro-batches additional
leases of the others; when it is there again it lags behind, and follows until it says that it does not.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ayni.buckets import Bucket
from ayni.errors import StepVoided
from ayni.run_config import RunConfig
from ayni.schedule import clip_factor, learning_rate
from ayni.step_values import Origin
from tests.support.local_attempt import Attempt, Contribution, Range, cover
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, Vector, Woken
from worker_agent.training.following import State

DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong."""

    voided: Collection[tuple[int, int]] = ()
    """Attempts (step, attempt) that are given up at their end."""
    absent: Callable[[int, int], Collection[int]] = lambda step, attempt: ()
    """Ranks that are not there in an attempt (of training, or of the evaluation after so many steps)."""
    revoked: Collection[tuple[int, int]] = ()
    """Additional leases (step, number within the step) that are taken back when they are done."""
    diverged: Collection[tuple[int, int]] = ()
    """(step, rank): a worker's parameters are said to differ, at the end of the first attempt of a step."""
    largest_extra: int = 1000
    """Most micro-batches of an additional lease."""


class LocalRun:
    """Plays the coordinator. `shares` are micro-batches per worker; `shares_of(step, attempt)` may change them."""

    def __init__(
        self,
        config: RunConfig,
        num_evaluation_samples: int = 0,
        shares: Sequence[int] = (),
        update: str = "host",
        voided: Sequence[tuple[int, int]] = (),
        shares_of: Callable[[int, int], Sequence[int]] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.config, self.update = config, update
        self.faults = faults or Faults(voided=set(voided))
        self.num_evaluation_samples = num_evaluation_samples
        self.num_microbatches = config.batch.microbatches or 1
        self.shares = list(shares) or [self.num_microbatches]
        self.shares_of = shares_of or (lambda step, attempt: self.shares)
        self.world_size = len(self.shares)
        self.commits: list[Commit] = []
        self.evaluations: list[Commit] = []
        self.gradient_hashes: list[dict[Bucket, str]] = []
        self.means: list[dict[Bucket, Vector]] = []
        self.parameter_hashes: list[dict[int, str]] = []
        self.stats: list[dict[int, MicrobatchStats]] = []
        self.train_reports: list[list[tuple[int, Report]]] = []
        self.reports: list[tuple[int, str]] = []
        self.completed = [0] * self.world_size
        """Updates that each worker's parameters have had, as far as is known."""
        self.caught_up: list[tuple[int, int]] = []
        self.writer = -1
        """Rank that writes checkpoints, as the last commit said."""
        self._woken: set[int] = set()
        self._tainted: set[int] = set()
        self._condition = threading.Condition()
        self._failed: BaseException | None = None
        self._best = math.inf
        self._plan = self._steps()
        self._last_lease = 0
        self._attempt: Attempt | None = self._next(None)

    def session(self, rank: int) -> "LocalSession":
        return LocalSession(self, rank)

    def run(self, worker: Callable[["LocalSession"], object]) -> list[object]:
        """Runs `worker` once for each rank, in threads, and returns what each returned."""
        results: list[object] = [None] * self.world_size

        def body(rank: int) -> None:
            try:
                results[rank] = worker(self.session(rank))
            except BaseException as error:
                with self._condition:
                    self._failed = self._failed or error
                    self._condition.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        if self._failed is not None:
            raise self._failed
        assert not any(thread.is_alive() for thread in threads), "a worker did not end"
        return results

    def receive(self, rank: int) -> ShardAssignment | None:
        with self._condition:
            self._wait(lambda: rank in self._woken or self._attempt is None or self._turn_of(self._attempt) == rank)
            if rank in self._woken:
                self._woken.remove(rank)
                raise Woken
            if self._attempt is None:
                return None
            return self._lease(self._attempt, rank, self._attempt.range_of(rank))

    def wake(self, rank: int) -> None:
        with self._condition:
            self._woken.add(rank)
            self._condition.notify_all()

    def note_caught_up(self, rank: int, completed_steps: int) -> None:
        with self._condition:
            self.completed[rank] = completed_steps
            self.caught_up.append((rank, completed_steps))

    def contribute(self, entry: Contribution, bucket: Bucket, stats: Sequence[MicrobatchStats]) -> "Future[Vector]":
        with self._condition:
            assert self._attempt is not None
            self._attempt.contribute(entry, bucket, stats)
            return entry.future

    def commit(self, rank: int, lease: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        with self._condition:
            attempt = self._attempt
            assert attempt is not None
            assert (lease.step, lease.attempt) == (attempt.step, attempt.attempt)
            if lease.extra and (lease.step, attempt.num_extras - 1) in self.faults.revoked:
                last = max(each for each in attempt.ranks if attempt.counts(each))
                attempt.orphans[last].append((lease.microbatch_start, lease.microbatch_stop))
                # Its number is passed, so that the same range can be done when it is leased again.
                attempt.num_extras += 1
                raise attempt.revoke(lease)
            attempt.commit(rank, lease, report)
            if attempt.orphans.get(rank):
                return self._extra(attempt, rank)
            attempt.turn += 1
            if attempt.turn == len(attempt.ranks):
                self._finish(attempt)
            self._condition.notify_all()
            self._wait(lambda: attempt.outcome is not None)
            if isinstance(attempt.outcome, Commit):
                return attempt.outcome
            assert attempt.outcome is not None
            raise attempt.outcome

    def _extra(self, attempt: Attempt, rank: int) -> ShardAssignment:
        start, stop = attempt.orphans[rank].pop(0)
        attempt.num_extras += 1
        return self._lease(attempt, rank, (start, stop), extra=True)

    def _steps(self) -> list[tuple[str, int]]:
        plan = []
        every = self.config.evaluation.every_steps
        for step in range(self.config.num_steps):
            plan.append(("train", step))
            last = step + 1 == self.config.num_steps
            if self.num_evaluation_samples and (last or (every and (step + 1) % every == 0)):
                plan.append(("evaluate", step + 1))
        return plan

    def _next(self, before: Attempt | None) -> Attempt | None:
        if before is not None and not isinstance(before.outcome, Commit):
            kind, step, number = before.kind, before.step, before.attempt + 1
        elif not self._plan:
            return None
        else:
            (kind, step), number = self._plan.pop(0), 0
        shares = self.shares_of(step, number)
        if kind == "evaluate":
            total = -(-self.num_evaluation_samples // self.config.batch.evaluation_samples)
            shares = [(rank + 1) * total // len(shares) - rank * total // len(shares) for rank in range(len(shares))]
        absent = self.faults.absent(step, number)
        ranks = [rank for rank in range(self.world_size) if rank not in absent]
        following = frozenset(rank for rank in ranks if self.completed[rank] != step)
        if len(following) == len(ranks):
            # Nobody is known to be where the run is, as when a run goes on from a state.
            following = frozenset()
        attempt = Attempt(kind, step, number, shares, ranks, following, {})
        attempt.orphans = self._orphans(attempt)
        return attempt

    def _orphans(self, attempt: Attempt) -> dict[int, list[Range]]:
        takers = [rank for rank in attempt.ranks if attempt.counts(rank)]
        given: dict[int, list[Range]] = {rank: [] for rank in takers}
        turn = 0
        for rank, share in enumerate(attempt.shares):
            start = sum(attempt.shares[:rank])
            for piece in range(start, 0 if attempt.counts(rank) else start + share, self.faults.largest_extra):
                given[takers[turn % len(takers)]].append((piece, min(piece + self.faults.largest_extra, start + share)))
                turn += 1
        return given

    def _turn_of(self, attempt: Attempt) -> int:
        return attempt.ranks[attempt.turn] if attempt.turn < len(attempt.ranks) else -1

    def _lease(self, attempt: Attempt, rank: int, span: Range, extra: bool = False) -> ShardAssignment:
        train = attempt.kind == "train"
        total = attempt.num_microbatches
        start, stop = span
        samples = self.config.batch.samples if train else self.num_evaluation_samples
        position = attempt.step * samples if train else 0
        self._last_lease += 1
        return ShardAssignment(
            step=attempt.step,
            attempt=attempt.attempt,
            epoch=1,
            kind=attempt.kind,
            lease_id=self._last_lease,
            microbatch_start=start,
            microbatch_stop=stop,
            num_microbatches=total,
            position=position,
            num_samples=samples,
            shard_start=position + start * samples // total,
            shard_end=position + stop * samples // total,
            rank=rank,
            world_size=self.world_size,
            update=self.update,
            extra=extra,
            discard_state=rank in self._tainted,
        )

    def _finish(self, attempt: Attempt) -> None:
        assert not any(attempt.orphans.values()), f"nobody took {attempt.orphans}"
        is_first = attempt.attempt == 0
        diverged = [rank for step, rank in self.faults.diverged if step == attempt.step and is_first]
        self._tainted -= {rank for rank, report in attempt.reports.values() if report.following}
        for rank in diverged:
            self.completed[rank] = -1
            self._tainted.add(rank)
        if attempt.kind == "train" and (diverged or (attempt.step, attempt.attempt) in self.faults.voided):
            attempt.void(StepVoided("a worker left"))
        else:
            self.writer = next((rank for rank in attempt.ranks if attempt.counts(rank)), -1)
            attempt.finish(self._commit_of(attempt))
            for rank, report in attempt.reports.values():
                if not report.following:
                    self.completed[rank] = attempt.step + (attempt.kind == "train")
        self._attempt = self._next(attempt)

    def _commit_of(self, attempt: Attempt) -> Commit:
        stats = [attempt.stats[index] for index in sorted(attempt.stats)]
        assert [item.microbatch for item in stats] == list(range(attempt.num_microbatches)), "micro-batches are missing"
        weight = sum(item.weight for item in stats)
        loss = math.fsum(item.loss_sum or 0.0 for item in stats) / weight if weight else 0.0
        means = attempt.reduce(weight)
        norm = math.sqrt(
            sum(float(np.vdot(mean.astype(np.float64), mean.astype(np.float64))) for mean in means.values())
        )
        train = attempt.kind == "train"
        best = not train and loss < self._best
        self._best = min(self._best, loss) if not train else self._best
        commit = Commit(
            step=attempt.step,
            attempt=attempt.attempt,
            total_weight=weight,
            global_loss=loss,
            gradient_norm=norm,
            num_correct=sum(item.num_correct for item in stats),
            num_predictions=sum(item.num_predictions for item in stats),
            learning_rate=learning_rate(self.config.optimizer, attempt.step, self.config.num_steps),
            clip_factor=clip_factor(self.config.optimizer, norm),
            best=best,
        )
        (self.commits if train else self.evaluations).append(commit)
        if train:
            self.stats.append(dict(attempt.stats))
            self.means.append(means)
            self.gradient_hashes.append({b: hashlib.sha256(mean.tobytes()).hexdigest() for b, mean in means.items()})
            self.parameter_hashes.append(attempt.hashes)
            self.train_reports.append(list(attempt.reports.values()))
        return commit

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not self._condition.wait_for(lambda: ready() or self._failed is not None, DEADLINE_S):
            raise TimeoutError("no other worker moved")
        if self._failed is not None:
            raise RuntimeError("another worker failed") from self._failed


class LocalSession:
    """One worker's Session."""

    def __init__(self, run: LocalRun, rank: int) -> None:
        self._run, self._rank = run, rank

    @property
    def worker_id(self) -> int:
        return self._rank

    @property
    def total_workers(self) -> int:
        return self._run.world_size

    @property
    def writes_checkpoints(self) -> bool:
        return self._run.writer == self._rank

    def receive_shard(self) -> ShardAssignment | None:
        return self._run.receive(self._rank)

    def wake(self) -> None:
        self._run.wake(self._rank)

    def new_vector(self, num_elements: int) -> Vector:
        return np.empty(num_elements, np.float32)

    def caught_up(self, completed_steps: int, origin: Origin | None = None) -> None:
        self._run.note_caught_up(self._rank, completed_steps)

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        nodes = dict(zip(cover(assignment), parts, strict=True))
        entry = Contribution(assignment, nodes, out, tuple(component_sizes))
        return self._run.contribute(entry, bucket, microbatches)

    def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        return self._run.commit(self._rank, assignment, report)

    def report(self, activity: str) -> None:
        self._run.reports.append((self._rank, activity))


@dataclass
class LocalSource:
    """A StateSource that is given its states by a test."""

    session: LocalSession | None = None
    """Woken when a state comes."""
    wanted: list[int] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    _state: State | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def deliver(self, state: State) -> None:
        with self._lock:
            self._state = state
        if self.session is not None:
            self.session.wake()

    def poll(self) -> State | None:
        with self._lock:
            state, self._state = self._state, None
            return state

    def want(self, from_step: int) -> None:
        self.wanted.append(from_step)
        with self._lock:
            if self._state is not None and self._state.completed_steps < from_step:
                self._state = None

    def reject(self, reason: str) -> None:
        self.rejected.append(reason)
