"""What a step consists of, and what its commit says.  [core]"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ayni.run_config import LARGEST_MICROBATCHES
from ayni.step_values import Commit
from coordinator_service import schedule
from coordinator_service.config import RunFile
from coordinator_service.leases import Totals
from coordinator_service.shards import Bid, Share, plan_shards
from coordinator_service.steps import Step
from coordinator_service.store_records import CommitRecord, Contribution

_SMOOTHING = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step's samples are cut.

    Attributes:
        position: first sample position of the step.
        num_samples: samples of the step.
        shares: micro-batches of each rank, and why.
    """

    kind: str
    step: int
    position: int
    num_samples: int
    num_microbatches: int
    shares: tuple[Share, ...]


def lay_out(
    file: RunFile,
    kind: str,
    step: int,
    evaluation_samples: int,
    bids: Sequence[Bid],
    previous: Sequence[tuple[int, int]] | None = None,
) -> Layout:
    """Returns the layout of a step for the given workers, by rank.

    A training step takes the next `batch.samples` positions; an evaluation takes all held-out samples. With
    `batch.microbatches` 0 a training step has one micro-batch for each worker that can compute. `previous` are the
    shares of the same workers in the last step of this kind, which are kept while they are good enough.
    """
    if kind == "evaluate":
        position, num_samples = 0, evaluation_samples
        num_microbatches = min(-(-evaluation_samples // file.batch.evaluation_samples), LARGEST_MICROBATCHES)
    else:
        position, num_samples = step * file.batch.samples, file.batch.samples
        able = sum(not bid.following for bid in bids) or len(bids)
        num_microbatches = file.batch.microbatches or min(able, num_samples)
    if kind == "train" and not file.batch.microbatches:
        bids = [Bid(speed=1.0, following=bid.following) for bid in bids]
    if previous is not None and sum(stop - start for start, stop in previous) != num_microbatches:
        previous = None
    return Layout(
        kind=kind,
        step=step,
        position=position,
        num_samples=num_samples,
        num_microbatches=num_microbatches,
        shares=tuple(plan_shards(num_microbatches, bids, previous)),
    )


def evaluates_after(file: RunFile, committed_steps: int) -> bool:
    """Returns whether the held-out data is evaluated after this many steps: every so often, and at the end."""
    every = file.evaluation.every_steps
    return committed_steps == file.num_steps or (every > 0 and committed_steps % every == 0)


def smoothed(speed: float, num_samples: int, seconds: float) -> float:
    """Returns a worker's samples per second after one more step; unchanged when it computed nothing."""
    if not num_samples or seconds <= 0:
        return speed
    measured = num_samples / seconds
    return measured if speed == 0 else (1 - _SMOOTHING) * speed + _SMOOTHING * measured


def slowed(speed: float, num_samples: int, seconds: float) -> float:
    """Returns a worker's samples per second after it was left behind with work that it had for so many seconds.

    What it is given next must be something that it can do in time, else it would be left behind for ever. Being late
    once says little about one whose speed is known, so that is halved at most.
    """
    if not num_samples or seconds <= 0:
        return speed
    shown = num_samples / (2 * seconds)
    return min(speed, max(shown, speed / 2)) if speed else shown


def is_better(file: RunFile, totals: Totals, best: float | None) -> tuple[bool, float]:
    """Returns whether an evaluation is the best so far, and its score (higher is better)."""
    accuracy = totals.num_correct / totals.num_predictions if totals.num_predictions else 0.0
    loss = math.inf if totals.global_loss is None else totals.global_loss
    score = accuracy if file.evaluation.metric == "accuracy" else -loss
    return best is None or score > best, score


def score_of(file: RunFile, record: CommitRecord) -> float:
    """Returns the score of an evaluation that was committed before (higher is better)."""
    if file.evaluation.metric == "accuracy":
        return record.num_correct / record.num_predictions if record.num_predictions else 0.0
    return -math.inf if record.loss is None else -record.loss


def evaluated(file: RunFile, commits: Iterable[CommitRecord]) -> tuple[int, float | None]:
    """Returns the steps behind the newest evaluation, and the best score of all; 0 and None before the first."""
    evaluations = [record for record in commits if record.kind == "evaluate"]
    newest = max((record.step for record in evaluations), default=0)
    return newest, max((score_of(file, record) for record in evaluations), default=None)


def committed(file: RunFile, step: Step, totals: Totals, best: float | None, writer: str) -> Commit:
    """Returns what the commit of a step says; `writer` is the name of the worker that writes checkpoints."""
    norm = step.gradient_norm()
    return Commit(
        step=step.step,
        attempt=step.attempt,
        total_weight=totals.total_weight,
        global_loss=math.nan if totals.global_loss is None else totals.global_loss,
        gradient_norm=norm,
        num_correct=totals.num_correct,
        num_predictions=totals.num_predictions,
        learning_rate=schedule.learning_rate(file.optimizer, step.step, file.num_steps),
        clip_factor=schedule.clip_factor(file.optimizer, norm),
        best=step.kind == "evaluate" and is_better(file, totals, best)[0],
        checkpoint_writer=writer,
    )


def record(
    file: RunFile, step: Step, layout: Layout, told: Commit, left_behind: Sequence[str], unix_time: float
) -> CommitRecord:
    """Returns what is kept of the commit."""
    return CommitRecord(
        kind=step.kind,
        step=told.step,
        attempt=told.attempt,
        epoch=step.epoch,
        position=layout.position,
        num_samples=layout.num_samples,
        num_microbatches=layout.num_microbatches,
        total_weight=told.total_weight,
        loss=None if math.isnan(told.global_loss) else told.global_loss,
        gradient_norm=told.gradient_norm,
        learning_rate=told.learning_rate,
        clip_factor=told.clip_factor,
        best=told.best,
        num_correct=told.num_correct,
        num_predictions=told.num_predictions,
        seed=file.seed,
        gradient_hash=step.gradient_hash,
        parameters_sha256=next(iter(step.hashes.values()), ""),
        contributions=tuple(
            Contribution(worker_name=lease.worker_name, start=lease.start, stop=lease.stop, weight=weight)
            for lease, weight in step.contributions()
        ),
        skipped=step.totals().skipped,
        left_behind=tuple(left_behind),
        unix_time=unix_time,
        checkpoint_writer=told.checkpoint_writer,
    )


def sentence(step: Step, told: Commit, seconds: float) -> str:
    """Returns the commit as a sentence for the log."""
    loss = "unknown" if math.isnan(told.global_loss) else f"{told.global_loss:.4f}"
    parts = [f"{step.label} committed: loss {loss}"]
    if told.num_predictions:
        parts.append(f"accuracy {told.num_correct / told.num_predictions:.4f}")
    if step.kind == "train":
        parts.append(f"gradient norm {told.gradient_norm:.4g}")
    workers = len({lease.worker_id for lease in step.live})
    parts.append(f"weight {told.total_weight}, {workers} worker{'s' if workers != 1 else ''}, {seconds:.2f} s")
    if skipped := step.totals().skipped:
        parts.append(f"{len(skipped)} micro-batches skipped because they were not finite")
    return ", ".join(parts)
