"""Makes commits of a run without making the run."""

from collections.abc import Sequence
from typing import Any

from coordinator_service.store_records import CommitRecord, Contribution


def commit(
    step: int = 0, *, kind: str = "train", batch: int = 8, microbatches: int = 4, **changes: Any
) -> CommitRecord:
    """A commit that fits the ones before it; every sample weighs 1."""
    samples = batch if kind == "train" else 12
    contributions = changes.pop("contributions", None) or shared(microbatches, samples)
    fields: dict[str, Any] = {
        "kind": kind,
        "step": step,
        "attempt": 0,
        "epoch": 1,
        "position": step * batch if kind == "train" else 0,
        "num_samples": samples,
        "num_microbatches": microbatches,
        "total_weight": sum(contribution.weight for contribution in contributions),
        "loss": 1.0 / (step + 3),
        "gradient_norm": 0.1 * (step + 1),
        "learning_rate": 0.05,
        "clip_factor": 1.0,
        "best": False,
        "num_correct": 3,
        "num_predictions": 8,
        "seed": 5,
        "gradient_hash": f"{step:032x}",
        "parameters_sha256": f"{step:064x}",
        "contributions": contributions,
        "skipped": (),
        "left_behind": (),
        "unix_time": 1.5e9 + step,
    }
    return CommitRecord(**{**fields, **changes})


def shared(microbatches: int, samples: int, cuts: Sequence[int] = (1,)) -> tuple[Contribution, ...]:
    """Contributions of workers ant, bee, cat... whose shards end at the cuts and at the end."""
    ends = [0, *cuts, microbatches]
    edges = [m * samples // microbatches for m in ends]
    return tuple(
        Contribution(worker_name=name, start=ends[i], stop=ends[i + 1], weight=edges[i + 1] - edges[i])
        for i, name in enumerate(("ant", "bee", "cat", "dog")[: len(ends) - 1])
    )
