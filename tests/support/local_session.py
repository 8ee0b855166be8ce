"""A whole run inside one process: sessions that reduce exactly, without a network.

Workers are threads, but take turns: torch's default generators belong to the process, so only one worker at a time may
be between `receive_shard` and `commit`. The reduction is written down again here, recursively, so that it shares no
code with the coordinator's.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ayni import tree
from ayni.buckets import Bucket
from ayni.errors import StepVoided
from ayni.run_config import RunConfig
from ayni.tree import Node
from coordinator_service import schedule
from worker_agent.session import Commit, MicrobatchStats, ShardAssignment, StepTimes, Vector

DEADLINE_S = 120.0


@dataclass
class _Contribution:
    parts: dict[Node, Vector | None]
    out: Vector
    future: "Future[Vector]"
    component_sizes: tuple[int, ...]


@dataclass
class _Attempt:
    kind: str
    step: int
    attempt: int
    shares: Sequence[int]
    turn: int = 0
    contributions: dict[Bucket, dict[int, _Contribution]] = field(default_factory=dict)
    stats: dict[int, MicrobatchStats] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    times: dict[int, StepTimes] = field(default_factory=dict)
    outcome: Commit | StepVoided | None = None


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
    ) -> None:
        self.config, self.update, self.voided = config, update, set(voided)
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
        self.reports: list[tuple[int, str]] = []
        self._condition = threading.Condition()
        self._failed: BaseException | None = None
        self._best = math.inf
        self._plan = self._steps()
        self._attempt: _Attempt | None = self._next(None)

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

    def _steps(self) -> list[tuple[str, int]]:
        plan = []
        every = self.config.evaluation.every_steps
        for step in range(self.config.num_steps):
            plan.append(("train", step))
            last = step + 1 == self.config.num_steps
            if self.num_evaluation_samples and (last or (every and (step + 1) % every == 0)):
                plan.append(("evaluate", step + 1))
        return plan

    def _next(self, before: _Attempt | None) -> _Attempt | None:
        if before is not None and isinstance(before.outcome, StepVoided):
            kind, step, attempt = before.kind, before.step, before.attempt + 1
        elif not self._plan:
            return None
        else:
            (kind, step), attempt = self._plan.pop(0), 0
        shares = self.shares_of(step, attempt)
        if kind == "evaluate":
            total = -(-self.num_evaluation_samples // self.config.batch.evaluation_samples)
            shares = [(rank + 1) * total // len(shares) - rank * total // len(shares) for rank in range(len(shares))]
        return _Attempt(kind, step, attempt, shares)

    def receive(self, rank: int) -> ShardAssignment | None:
        with self._condition:
            self._wait(lambda: self._attempt is None or self._attempt.turn == rank)
            if self._attempt is None:
                return None
            return self._assignment(self._attempt, rank)

    def _assignment(self, attempt: _Attempt, rank: int) -> ShardAssignment:
        train = attempt.kind == "train"
        total = sum(attempt.shares)
        start = sum(attempt.shares[:rank])
        samples = self.config.batch.samples if train else self.num_evaluation_samples
        position = attempt.step * samples if train else 0
        return ShardAssignment(
            step=attempt.step,
            attempt=attempt.attempt,
            epoch=1,
            kind=attempt.kind,
            lease_id=rank + 1,
            microbatch_start=start,
            microbatch_stop=start + attempt.shares[rank],
            num_microbatches=total,
            position=position,
            num_samples=samples,
            shard_start=position + start * samples // total,
            shard_end=position + (start + attempt.shares[rank]) * samples // total,
            rank=rank,
            world_size=self.world_size,
            update=self.update,
        )

    def contribute(
        self,
        rank: int,
        lease: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        stats: Sequence[MicrobatchStats],
        out: Vector,
        component_sizes: Sequence[int],
    ) -> "Future[Vector]":
        nodes = tree.cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        assert [item.microbatch for item in stats] == list(lease.microbatches), (
            "stats must list the leased micro-batches"
        )
        weights = {item.microbatch: item.weight for item in stats}
        for node, part in zip(nodes, parts, strict=True):
            weight = sum(weights[microbatch] for microbatch in range(node.start, node.stop))
            assert (part is None) == (weight == 0), f"{node} has weight {weight}"
            assert part is None or (part.dtype == np.float32 and part.shape == out.shape)
        with self._condition:
            assert self._attempt is not None
            entry = _Contribution(dict(zip(nodes, parts, strict=True)), out, Future(), tuple(component_sizes))
            ranks = self._attempt.contributions.setdefault(bucket, {})
            assert rank not in ranks, f"rank {rank} contributed {bucket} twice"
            ranks[rank] = entry
            return entry.future

    def commit(
        self,
        rank: int,
        lease: ShardAssignment,
        num_buckets: int,
        stats: Sequence[MicrobatchStats],
        sha256: str,
        times: StepTimes,
    ) -> Commit:
        with self._condition:
            attempt = self._attempt
            assert attempt is not None
            assert (lease.step, lease.attempt) == (attempt.step, attempt.attempt)
            assert num_buckets == sum(rank in ranks for ranks in attempt.contributions.values())
            attempt.stats |= {item.microbatch: item for item in stats}
            attempt.hashes[rank], attempt.times[rank] = sha256, times
            attempt.turn += 1
            if attempt.turn == self.world_size:
                self._finish(attempt)
            self._condition.notify_all()
            self._wait(lambda: attempt.outcome is not None)
            if isinstance(attempt.outcome, StepVoided):
                raise attempt.outcome
            assert attempt.outcome is not None
            return attempt.outcome

    def _finish(self, attempt: _Attempt) -> None:
        contributions = [entry for ranks in attempt.contributions.values() for entry in ranks.values()]
        if (attempt.step, attempt.attempt) in self.voided and attempt.kind == "train":
            attempt.outcome = StepVoided("a worker left")
            for entry in contributions:
                entry.future.set_exception(attempt.outcome)
        else:
            attempt.outcome = self._commit_of(attempt)
            for entry in contributions:
                entry.future.set_result(entry.out)
        self._attempt = self._next(attempt)

    def _commit_of(self, attempt: _Attempt) -> Commit:
        stats = [attempt.stats[index] for index in sorted(attempt.stats)]
        assert [item.microbatch for item in stats] == list(range(sum(attempt.shares))), "micro-batches are missing"
        weight = sum(item.weight for item in stats)
        loss = math.fsum(item.loss_sum or 0.0 for item in stats) / weight if weight else 0.0
        means = {bucket: self._reduce(attempt, ranks, weight) for bucket, ranks in attempt.contributions.items()}
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
            learning_rate=schedule.learning_rate(self.config.optimizer, attempt.step, self.config.num_steps),
            clip_factor=schedule.clip_factor(self.config.optimizer, norm),
            best=best,
        )
        (self.commits if train else self.evaluations).append(commit)
        if train:
            self.stats.append(dict(attempt.stats))
            self.means.append(means)
            self.gradient_hashes.append({b: hashlib.sha256(mean.tobytes()).hexdigest() for b, mean in means.items()})
            self.parameter_hashes.append(dict(attempt.hashes))
        return commit

    def _reduce(self, attempt: _Attempt, ranks: dict[int, _Contribution], weight: int) -> Vector:
        assert sorted(ranks) == list(range(self.world_size)), f"only ranks {sorted(ranks)} contributed"
        assert len({(entry.out.shape, entry.component_sizes) for entry in ranks.values()}) == 1
        given = {node: part for entry in ranks.values() for node, part in entry.parts.items()}

        def total(start: int, stop: int) -> Vector | None:
            if (node := Node(start=start, stop=stop)) in given:
                return given[node]
            half = 1 << ((stop - start - 1).bit_length() - 1)
            left, right = total(start, start + half), total(start + half, stop)
            return left + right if left is not None and right is not None else (right if left is None else left)

        root = total(0, sum(attempt.shares))
        out = next(iter(ranks.values())).out
        mean = np.zeros_like(out) if root is None else root / np.float32(weight)
        for entry in ranks.values():
            entry.out[...] = mean
        return mean

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

    def receive_shard(self) -> ShardAssignment | None:
        return self._run.receive(self._rank)

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
        return self._run.contribute(self._rank, assignment, bucket, parts, microbatches, out, component_sizes)

    def commit(
        self,
        assignment: ShardAssignment,
        *,
        num_buckets: int,
        microbatches: Sequence[MicrobatchStats],
        parameters_sha256: str = "",
        times: StepTimes = StepTimes(),
    ) -> Commit:
        return self._run.commit(self._rank, assignment, num_buckets, microbatches, parameters_sha256, times)

    def report(self, activity: str) -> None:
        self._run.reports.append((self._rank, activity))
