"""Whose parameters differ.  [core]"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ayni.errors import Diverged


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What an audit found.

    Attributes:
        majority: hash of the largest group; empty when nobody said one, or with a tie.
        divergent: workers with another hash, in order; empty with a tie, since nobody knows who is right.
        tie: whether two or more groups are the largest.
    """

    majority: str
    divergent: tuple[int, ...] = ()
    tie: bool = False


def judge(hashes: Mapping[int, str]) -> Verdict:
    """Compares workers' parameter hashes, by worker id. Those that said none (empty) are not part of it."""
    said = {worker_id: value for worker_id, value in sorted(hashes.items()) if value}
    groups = Counter(said.values()).most_common(2)
    if not groups:
        return Verdict(majority="")
    if len(groups) == 2 and groups[0][1] == groups[1][1]:
        return Verdict(majority="", tie=True)
    majority = groups[0][0]
    return Verdict(majority=majority, divergent=tuple(worker for worker, value in said.items() if value != majority))


def compare_hashes(label: str, hashes: dict[str, str]) -> None:
    """Checks that all workers that gave a hash gave the same one.

    Args:
        label: which moment this is, for the error.
        hashes: hash for each worker name; empty text means not said.

    Raises:
        Diverged: two differ; names who holds which.
    """
    said = {name: value for name, value in hashes.items() if value}
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{name} has {value[:16]}" for name, value in sorted(said.items()))
        metadata = {f"parameters_{name}": value for name, value in sorted(said.items())}
        raise Diverged(f"{label}: the workers' parameters differ: {listed}", step=label, **metadata)
