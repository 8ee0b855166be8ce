"""Makes steps of a run again and compares them with its ledger: what to make, and what came of it.  [core]

The bytes of a reduction are a function of the micro-batches alone, so one worker that computes all of them makes the
steps that many workers made. Settings under which that does not hold are said, not refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ayni.run_config import LARGEST_STEPS, RunConfig
from ayni.settings import SettingsError, from_mapping, to_mapping
from coordinator_service.store_records import CommitRecord

FINAL_PARAMETERS, FINAL_STEPS = "final_parameters_sha256", "final_parameters_steps"
"""Facts of the store: hash of the parameters that workers left a run with, and how many updates these had had."""

_VALUES = ("position", "total_weight", "loss", "gradient_norm", "gradient_hash", "parameters_sha256")
_UNKNOWN = ("", None)
_LONGEST_ID = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is made again.

    Attributes:
        asked: the steps that are to be compared.
        first_step: step that the replay begins with: where the newest stored state at or before the first is.
        stop_step: one past the last step that is made; it is one more than was asked for where the run has one, for the
            parameters' hash is of those that a step begins with.
        run: run file of the replay.
        caveats: why the replay may differ although nothing is wrong, a sentence each.
    """

    asked: range
    first_step: int
    stop_step: int
    run: Mapping[str, Any]
    caveats: tuple[str, ...]

    @property
    def is_to_the_end(self) -> bool:
        """Whether the run's last step is made too."""
        return bool(self.stop_step == self.run["num_steps"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first step that differs, and each value that does: in the ledger, in the replay."""

    step: int
    values: Mapping[str, tuple[object, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What came of it.

    Attributes:
        equal: whether every known value of every step is the same, and every gradient is known.
        steps_compared: steps that were there on both sides.
        unknown: for each value, the steps for which one side does not say it.
    """

    equal: bool
    steps_compared: int
    first_difference: Difference | None
    unknown: Mapping[str, int]


def plan_replay(facts: Mapping[str, str], commits: Sequence[CommitRecord], asked: range, source: str) -> Plan:
    """Returns what to make.

    Args:
        facts: of the run.
        commits: of the run, those that count.
        asked: steps to compare.
        source: "stored", "start", or the steps behind the stored state to begin with.

    Raises:
        SettingsError: the run has not committed these steps, or has no task, or has nothing to begin with.
    """
    if "config" not in facts:
        raise SettingsError("the run's settings are not kept yet, so no step of it can be made again")
    config = from_mapping(RunConfig, json.loads(facts["config"]))
    if not config.task.name:
        raise SettingsError("the run names no task: its workers were scripts of their own, which only they can start")
    training = [record for record in commits if record.kind == "train"]
    asked = _within(asked, config.state.resume_step, max((record.step + 1 for record in training), default=0))
    first, run_id = _beginning(config, facts, asked.start, source)
    stop = max(record.step + 1 for record in training if record.step <= asked.stop)
    made = [record for record in training if first <= record.step < stop]
    counts = {record.num_microbatches for record in made}
    values = _run_file(config, facts, counts, made)
    state = {**to_mapping(config.state), "publish_every": 0, "store_every": 0, "resume_step": first}
    values["state"] = {**state, "resume_run_id": run_id}
    return Plan(
        asked=asked,
        first_step=first,
        stop_step=stop,
        run=values,
        caveats=tuple(_caveats(config, facts, made, counts)),
    )


def compare(plan: Plan, ledger: Sequence[CommitRecord], replay: Sequence[CommitRecord]) -> Compared:
    """Compares the training steps that were made with those of the ledger."""
    ours, theirs = _by_step(replay), _by_step(ledger)
    asked = plan.asked
    there = [step for step in range(plan.first_step, asked.stop) if step in ours and step in theirs]
    differing = [found for step in there if (found := _differing(theirs[step], ours[step]))]
    if asked.stop in ours and asked.stop in theirs:
        differing += _differing_after(theirs[asked.stop], ours[asked.stop])
    compared = [step for step in there if step in asked]
    unknown = {name: _count_unknown(name, [(theirs[s], ours[s]) for s in compared]) for name in _VALUES}
    return Compared(
        equal=not differing and len(compared) == len(asked) and not unknown["gradient_hash"],
        steps_compared=len(compared),
        first_difference=differing[0] if differing else None,
        unknown={name: count for name, count in unknown.items() if count},
    )


def final_equal(plan: Plan, facts: Mapping[str, str], ours: str) -> bool | None:
    """Returns whether the replay's last parameters are those that the run's workers left with.

    Args:
        plan: what was made again.
        facts: of the run; what they say of another step than the last, as of a run that has grown since, is no answer.
        ours: hash of the replay's last parameters.

    Returns:
        None where one of the two is not known.
    """
    theirs = facts.get(FINAL_PARAMETERS, "") if facts.get(FINAL_STEPS) == str(plan.stop_step) else ""
    return ours == theirs if ours and theirs and plan.is_to_the_end else None


def _within(asked: range, first: int, committed: int) -> range:
    start = max(asked.start, first)
    stop = committed if asked.stop > LARGEST_STEPS else asked.stop
    if not start < stop <= committed:
        raise SettingsError(
            f"steps {asked.start}:{stop} are not all there: the run has committed steps {first}:{committed}"
        )
    return range(start, stop)


def _beginning(config: RunConfig, facts: Mapping[str, str], before: int, source: str) -> tuple[int, str]:
    """Returns the steps behind the state to begin with, and the run that stored it; 0 for the initial weights."""
    start = config.state.resume_step
    origin = (config.state.resume_run_id or config.run_id) if start else ""
    if source == "start":
        return start, origin
    if source != "stored":
        steps = int(source) if source.isdecimal() else 0
        if not start < steps <= before:
            raise SettingsError(f"--from {source} must be stored, start, or steps behind a stored state up to {before}")
        return steps, config.run_id
    known = map(int, json.loads(facts.get("stored_states", "{}")))
    stored = max((steps for steps in known if steps <= before), default=0)
    return (stored, config.run_id) if stored > start else (start, origin)


def _run_file(
    config: RunConfig, facts: Mapping[str, str], counts: set[int], made: Sequence[CommitRecord]
) -> dict[str, Any]:
    values = to_mapping(config)
    batch = {**to_mapping(config.batch), "microbatches": config.batch.microbatches}
    if len(counts) == 1:
        batch["microbatches"] = min(counts)
    values |= {
        "run_id": f"replay-{config.run_id}"[:_LONGEST_ID],
        "min_workers": 1,
        "start_workers": 0,
        "topology": "star",
        "audit_every": 1,
        "batch": batch,
        "evaluation": {**to_mapping(config.evaluation), "every_steps": 0},
        "optimizer": {**to_mapping(config.optimizer), "update": _update(config, facts)},
    }
    values |= _wire_types(config, made)
    if samples := int(facts.get("num_training_samples") or 0):
        values["num_training_samples"] = samples
    return values


def _wire_types(config: RunConfig, made: Sequence[CommitRecord]) -> dict[str, Any]:
    """Returns the wire type of the first step, and where others follow, as run files say it."""
    used = [(record.step, record.wire_type or config.wire_type) for record in made]
    changes = {str(step): wire for (_, before), (step, wire) in pairwise(used) if wire != before}
    return {"wire_type": used[0][1], **({"wire_changes": changes} if changes else {})}


def _update(config: RunConfig, facts: Mapping[str, str]) -> str:
    return config.optimizer.update if config.optimizer.update != "auto" else facts.get("update") or "auto"


def _caveats(
    config: RunConfig, facts: Mapping[str, str], made: Sequence[CommitRecord], counts: set[int]
) -> Iterator[str]:
    wires = dict.fromkeys(record.wire_type or config.wire_type for record in made)
    if set(wires) != {"float32"}:
        yield f"wire_type is {', then '.join(wires)}: what workers send is rounded, and depends on who computed what"
    if config.topology == "torch":
        yield "topology is torch: sums were formed in an order that depends on who computed what"
    if len(counts) > 1:
        yield "batch.microbatches is 0 and the number of workers changed, so steps were cut in different ways"
    if config.local_update.enabled:
        yield "local_update is enabled: a worker's inner steps follow one another, so results depend on who made which"
    if config.precision != "float32":
        yield f"precision is {config.precision}: equal only on the same kind of device"
    if _update(config, facts) != "host":
        yield "the optimizer ran on the workers' devices: equal only on the same kind of device"
    if skipped := [record.step for record in made if record.skipped]:
        yield f"micro-batches that were not finite were left out of steps {', '.join(map(str, skipped))}"


def _by_step(records: Sequence[CommitRecord]) -> dict[int, CommitRecord]:
    return {record.step: record for record in records if record.kind == "train"}


def _differing(ledger: CommitRecord, replay: CommitRecord) -> Difference | None:
    pairs = {name: (getattr(ledger, name), getattr(replay, name)) for name in _VALUES}
    values = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not _is_unknown(pair)}
    return Difference(step=ledger.step, values=values) if values else None


def _differing_after(ledger: CommitRecord, replay: CommitRecord) -> list[Difference]:
    """Returns whether the parameters behind the last step differ: those that the step after it begins with."""
    pair = (ledger.parameters_sha256, replay.parameters_sha256)
    if pair[0] == pair[1] or _is_unknown(pair):
        return []
    return [Difference(step=ledger.step - 1, values={"parameters_sha256_after": pair})]


def _count_unknown(name: str, pairs: Sequence[tuple[CommitRecord, CommitRecord]]) -> int:
    return sum(_is_unknown((getattr(ledger, name), getattr(replay, name))) for ledger, replay in pairs)


def _is_unknown(pair: tuple[object, object]) -> bool:
    return pair[0] in _UNKNOWN or pair[1] in _UNKNOWN
