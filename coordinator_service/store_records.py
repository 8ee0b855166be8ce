"""What the store keeps.  [core]"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """What is kept of a commit.

    Attributes:
        parameters_sha256: hash of the parameters that the step started from; empty when no worker said it.
        shards: micro-batches of each worker, as (worker name, start, stop).
    """

    kind: str
    step: int
    attempt: int
    epoch: int
    position: int
    num_samples: int
    total_weight: int
    loss: float | None
    gradient_norm: float
    learning_rate: float
    num_correct: int
    num_predictions: int
    parameters_sha256: str
    shards: tuple[tuple[str, int, int], ...]
    unix_time: float
