"""Checks the run's commits: every step once, every micro-batch once, every sample once in each pass.  [core]

Theory of operation. A step takes the `batch.samples` positions after those of the step before it, and a position is a
sample of a pass (`ayni.order`). So the commits say which samples were used, to the sample: each contribution covers
micro-batches, these cover positions, and these are samples. The checks trust none of it: steps are counted,
contributions are laid beside one another, and the samples of each pass are counted one by one.

What is ugly: counting takes memory for one number for each sample of the data set.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ayni import order
from ayni.run_config import RunConfig
from ayni.settings import SettingsError, from_mapping
from coordinator_service.store_records import CommitRecord

Positions = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What the run's settings say of its samples.

    Attributes:
        first_step: step that the run began with; more than 0 where it went on from a stored state.
        num_samples: training samples; 0 where they are not known: then positions are counted, as one endless pass.
    """

    seed: int
    batch_samples: int
    first_step: int = 0
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong."""

    name: str
    step: int
    kind: str
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What the checks found.

    Attributes:
        steps: training steps that are committed.
        passes: passes over the data that are complete.
        samples: uses of samples, all together.
        samples_missing: samples of the committed steps that nobody contributed.
        samples_duplicated: uses of samples beyond the first in a pass.
        samples_skipped: samples in micro-batches that were left out because their values were not finite.
    """

    steps: int
    evaluations: int
    passes: int
    samples: int
    samples_missing: int
    samples_duplicated: int
    samples_skipped: int
    problems: tuple[Problem, ...]


def data_from(facts: Mapping[str, str]) -> Data:
    """Returns what a run's facts say of its samples.

    Raises:
        SettingsError: the facts lack the run's settings, or these are of another version.
    """
    if "config" not in facts:
        raise SettingsError("the run's settings are not kept yet")
    config = from_mapping(RunConfig, json.loads(facts["config"]))
    return Data(
        seed=config.seed,
        batch_samples=config.batch.samples,
        first_step=config.state.resume_step,
        num_samples=int(facts.get("num_training_samples") or 0),
    )


def check(records: Sequence[CommitRecord], data: Data) -> Checked:
    """Checks the commits that count, in the order in which they were made."""
    training = [record for record in records if record.kind == "train"]
    stop = max((record.step + 1 for record in training), default=data.first_step)
    expected = (data.first_step * data.batch_samples, stop * data.batch_samples)
    samples, missing, duplicated = _count_samples(training, expected, data)
    return Checked(
        steps=len(training),
        evaluations=len(records) - len(training),
        passes=_whole_passes(expected, data.num_samples),
        samples=samples,
        samples_missing=missing,
        samples_duplicated=duplicated,
        samples_skipped=sum(_length(_positions(record, m, m + 1)) for record in training for m in record.skipped),
        problems=(*_order_problems(records, data.first_step), *_problems(records, data)),
    )


def _order_problems(records: Sequence[CommitRecord], first_step: int) -> Iterator[Problem]:
    step, epoch = first_step, 0
    for record in records:
        if record.step != step:
            text = f"is where step {step} was due" if record.kind == "train" else f"is there after {step} steps"
            yield _problem("step", record, text)
        if record.epoch < epoch:
            yield _problem("epoch", record, f"was made in epoch {record.epoch}, after one of epoch {epoch}")
        step = record.step + 1 if record.kind == "train" else step
        epoch = max(epoch, record.epoch)


def _problems(records: Iterable[CommitRecord], data: Data) -> Iterator[Problem]:
    for record in records:
        yield from _data_problems(record, data)
        yield from _cover_problems(record)
        weight = sum(contribution.weight for contribution in record.contributions)
        if weight != record.total_weight:
            yield _problem("weight", record, f"has weight {record.total_weight}, its contributions {weight} together")
        if outside := [m for m in record.skipped if not 0 <= m < record.num_microbatches]:
            text = f"skipped micro-batches {outside}, and has {record.num_microbatches}"
            yield _problem("skipped", record, text)


def _data_problems(record: CommitRecord, data: Data) -> Iterator[Problem]:
    if record.seed != data.seed:
        yield _problem("seed", record, f"has seed {record.seed}, the run {data.seed}")
    if record.kind == "train" and record.num_samples != data.batch_samples:
        yield _problem("samples", record, f"has {record.num_samples} samples, batch.samples is {data.batch_samples}")
    position = record.step * data.batch_samples if record.kind == "train" else 0
    if record.position != position:
        yield _problem("position", record, f"begins at position {record.position}, it must be {position}")


def _cover_problems(record: CommitRecord) -> Iterator[Problem]:
    """Yields where contributions leave out a micro-batch, have one twice, or have one that there is not."""
    reached = 0
    for contribution in record.contributions:
        if contribution.start > reached:
            yield _problem("cover", record, f"lacks micro-batches [{reached}, {contribution.start})")
        if contribution.start < reached:
            twice = f"[{contribution.start}, {min(reached, contribution.stop)})"
            yield _problem("cover", record, f"has micro-batches {twice} twice or out of order")
        reached = max(reached, contribution.stop)
    if reached < record.num_microbatches:
        yield _problem("cover", record, f"lacks micro-batches [{reached}, {record.num_microbatches})")
    if reached > record.num_microbatches:
        yield _problem("cover", record, f"has {record.num_microbatches} micro-batches, and contributions to {reached}")


def _count_samples(training: Iterable[CommitRecord], expected: Positions, data: Data) -> tuple[int, int, int]:
    """Returns how many uses of samples there are, how many samples are missing, and how many uses are too many."""
    size = data.num_samples or max(expected[1], 1)
    used = _by_pass((_positions(r, c.start, c.stop) for r in training for c in r.contributions), size)
    due = _by_pass([expected], size)
    uses, missing, duplicated = 0, 0, 0
    for dataset_pass in used.keys() | due.keys():
        samples = _samples(data, dataset_pass, size)
        counts, wanted = (_counts(samples, pieces.get(dataset_pass, []), dataset_pass * size) for pieces in (used, due))
        uses += int(counts.sum())
        missing += int(np.count_nonzero((counts == 0) & (wanted > 0)))
        duplicated += int(np.maximum(counts - 1, 0).sum())
    return uses, missing, duplicated


def _samples(data: Data, dataset_pass: int, size: int) -> npt.NDArray[np.int64]:
    """Returns the sample at each position of a pass, shape [size]."""
    if not data.num_samples:
        return np.arange(size, dtype=np.int64)
    return order.samples_at(data.seed, dataset_pass * size, (dataset_pass + 1) * size, size)


def _counts(samples: npt.NDArray[np.int64], pieces: Iterable[Positions], start: int) -> npt.NDArray[np.int64]:
    """Returns how often each sample is used, shape [size], by pieces of the pass that begins at `start`."""
    counts = np.zeros(len(samples), np.int64)
    for first, stop in pieces:
        counts[samples[first - start : stop - start]] += 1  # Within a piece of one pass no sample is there twice.
    return counts


def _by_pass(pieces: Iterable[Positions], size: int) -> Mapping[int, list[Positions]]:
    """Returns pieces of the endless order, cut where passes end."""
    cut: dict[int, list[Positions]] = {}
    for start, stop in pieces:
        while start < stop:
            dataset_pass = start // size
            end = min(stop, (dataset_pass + 1) * size)
            cut.setdefault(dataset_pass, []).append((start, end))
            start = end
    return cut


def _whole_passes(expected: Positions, num_samples: int) -> int:
    if not num_samples:
        return 0
    return max(0, expected[1] // num_samples - -(-expected[0] // num_samples))


def _positions(record: CommitRecord, start: int, stop: int) -> Positions:
    """Returns the positions of micro-batches [start, stop); none where the record makes no sense."""
    if record.num_microbatches < 1 or record.position < 0 or not 0 <= start <= stop:
        return 0, 0

    def first(microbatch: int) -> int:
        layout = (record.position, record.num_samples, record.num_microbatches)
        return order.microbatch_positions(*layout, microbatch)[0]

    return first(start), first(stop)


def _length(positions: Positions) -> int:
    return positions[1] - positions[0]


def _problem(name: str, record: CommitRecord, sentence: str) -> Problem:
    label = f"step {record.step}" if record.kind == "train" else f"the evaluation after {record.step} steps"
    return Problem(name=name, step=record.step, kind=record.kind, sentence=f"{label} {sentence}")
