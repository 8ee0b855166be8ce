"""What the store keeps: the ledger of the run's commits.  [core]"""

import math
from dataclasses import dataclass

from ayni.step_values import Commit


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """Micro-batches [start, stop) of a step that one worker contributed, and what they weigh."""

    worker_name: str
    start: int
    stop: int
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """One line of the ledger: everything that a commit said, and what it was made of.

    Attributes:
        position: first sample position of the step; with `seed` it names every sample of every micro-batch.
        gradient_hash: XXH3-128 in hex over the bytes of the mean of every bucket; empty when evaluating.
        parameters_sha256: hash of the parameters that the step started from; empty when no worker said it.
        contributions: what was summed, in the order of micro-batches; together all micro-batches, each once.
        skipped: micro-batches that were left out because their values were not finite.
        left_behind: names of the members that the step was committed without.
        checkpoint_writer: name of the worker that writes checkpoints; empty where nobody can.
        wire_type: element type that contributions travelled in; empty in records of before it could change: the run's.
    """

    kind: str
    step: int
    attempt: int
    epoch: int
    position: int
    num_samples: int
    num_microbatches: int
    total_weight: int
    loss: float | None
    gradient_norm: float
    learning_rate: float
    clip_factor: float
    best: bool
    num_correct: int
    num_predictions: int
    seed: int
    gradient_hash: str
    parameters_sha256: str
    contributions: tuple[Contribution, ...]
    skipped: tuple[int, ...]
    left_behind: tuple[str, ...]
    unix_time: float
    checkpoint_writer: str = ""
    wire_type: str = ""

    def skipped_of(self) -> dict[int, str]:
        """Returns the micro-batches that were left out, and the name of the worker that computed each."""
        return {m: c.worker_name for c in self.contributions for m in self.skipped if c.start <= m < c.stop}

    def told(self) -> Commit:
        """Returns what workers are told of this commit, to the bit."""
        return Commit(
            step=self.step,
            attempt=self.attempt,
            total_weight=self.total_weight,
            global_loss=math.nan if self.loss is None else self.loss,
            gradient_norm=self.gradient_norm,
            num_correct=self.num_correct,
            num_predictions=self.num_predictions,
            learning_rate=self.learning_rate,
            clip_factor=self.clip_factor,
            best=self.best,
            checkpoint_writer=self.checkpoint_writer,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord:
    """One membership that was in force."""

    number: int
    worker_names: tuple[str, ...]
    """By rank."""
    committed_steps: int
    """When it was formed."""
    unix_time: float
