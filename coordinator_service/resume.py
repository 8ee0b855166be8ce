"""Whether a run that was stopped can go on with another run file.  [core]

A run's bytes follow from its settings, so those that take part in them stay as they were when it was started. What only
says who may take part, what is watched and where states are stored may be changed between a stop and the next start.
"""

from collections.abc import Iterator, Mapping

from ayni.run_config import RunConfig
from ayni.settings import to_mapping

_FIXED = (
    "run_id",
    "seed",
    "num_steps",
    "precision",
    "wire_type",
    "topology",
    "task",
    "batch",
    "optimizer",
    "evaluation.metric",
    "state.resume_step",
    "state.resume_run_id",
    "state.block_bytes",
    "local_update",
)
"""Keys, and sections with all their keys, that take part in the run's bytes or name what is there of it."""

_SAME_BYTES = "star, sharded or auto"
"""Topologies that give the same bytes."""


def resumable(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Returns what keeps a run from going on with new settings, a sentence for each key; nothing if it can.

    Args:
        old: the run file's values with which the run was started, as `ayni.settings.to_mapping` gives them.
        new: those with which it is to go on.
    """
    before, after = _fixed_values(old), _fixed_values(new)
    differing = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    return [
        f"{path} {_shown(after.get(path))}, the run was started {_started(before.get(path))}{_why(path, after)}"
        for path in differing
        if not (path == "num_steps" and _may_grow(before, after))
    ]


def _fixed_values(config: Mapping[str, object]) -> dict[str, object]:
    values = {**dict(_leaves(to_mapping(RunConfig()))), **dict(_leaves(config))}
    if values["topology"] in ("star", "sharded", "auto"):
        values["topology"] = _SAME_BYTES
    return {path: value for path, value in values.items() if _is_fixed(path)}


def _is_fixed(path: str) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in _FIXED)


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _may_grow(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    return before.get("optimizer.schedule") == "constant" and _end(after) > _end(before)


def _end(values: Mapping[str, object]) -> float:
    steps = values["num_steps"]
    assert isinstance(steps, int)
    return steps or float("inf")


def _why(path: str, after: Mapping[str, object]) -> str:
    if path != "num_steps":
        return ""
    if after.get("optimizer.schedule") == "constant":
        return ": it may only grow"
    return ": the learning rate's schedule depends on it; it may only grow, and only with a constant schedule"


def _shown(value: object) -> str:
    return "is not given" if value is None else f"is {value}"


def _started(value: object) -> str:
    return "without it" if value is None else f"with {value}"
