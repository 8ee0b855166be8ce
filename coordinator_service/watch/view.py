"""A run as people see it: the one view behind the page, the metrics and the terminal.  [core]

Times are seconds, moments seconds since 1970, sizes bytes, shares and accuracies fractions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

ENDED = ("finished", "halted")
"""States after which no step follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where the time of a step went on one worker."""

    compute: float = 0.0
    send: float = 0.0
    """Gradients out and means in, as far as they were not hidden behind computing."""
    wait: float = 0.0
    """For the others' commits."""
    apply: float = 0.0
    """The update of the parameters."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.send + self.wait + self.apply


PHASES = tuple(field.name for field in fields(Phases))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker."""

    worker_id: int
    name: str
    backend: str
    devices: tuple[str, ...]
    peer: str
    state: str
    """What it does, in one or two words."""
    is_committed: bool
    """Whether it is done with the step in progress."""
    is_draining: bool
    share: float
    share_reason: str
    samples_per_second: float
    lag_steps: int
    """Updates that its parameters lack."""
    silence: float
    """Time since its last sign of life."""
    so_far: Phases
    """Of the step in progress, by the coordinator's clock."""
    last: Phases
    """Of the last step that it was done with, by its own."""
    route: str
    """How its gradients come: "shm", "grpc" or "peers"."""
    is_attached: bool
    received_bytes: int
    sent_bytes: int
    memory_bytes: int
    strikes: int
    cpu_fallbacks: int
    """Operations that its accelerator has given back to its CPU."""
    owns_slices: bool
    """Whether it reduces slices of gradients for the others."""
    published_steps: int
    """Steps behind the train state in its host memory; 0 for none."""
    waiting_for: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One committed step in a curve."""

    step: int
    unix_time: float
    loss: float | None = None
    samples_per_second: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened."""

    unix_time: float
    level: str
    sentence: str
    committed_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One kind of memory, and what of the run's state is in it."""

    name: str
    """"device", "host" or "objects"."""
    holders: int
    """Workers, or stores, that hold it."""
    steps: int
    """Steps behind the newest state there; 0 for none."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Something large that is under way."""

    what: str
    worker: str
    """Name of the worker that it is for; empty for the store."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """One run, at one moment."""

    run_id: str
    unix_time: float
    state: str
    sentence: str
    """What is waited for, or why the run was halted; empty for nothing."""
    epoch: int
    step: int
    attempt: int
    kind: str
    committed_steps: int
    num_steps: int
    """0 for no last step."""
    elapsed: float
    step_elapsed: float | None
    step_took: float
    num_committed: int
    """Workers that are done with the step in progress."""
    loss: float | None
    evaluation_loss: float | None
    evaluation_accuracy: float | None
    samples_per_second: float
    seconds_left: float | None
    """At the speed of the last steps; None where that is not known."""
    wire_type: str
    topology: str
    generation: int
    received_bytes: int
    sent_bytes: int
    reducer_bytes: int
    reducer_peak_bytes: int
    stored_steps: int
    storing_steps: int
    extra_leases: int
    skipped_microbatches: int
    norm_alarms: int
    divergences: int
    regroups: int
    voided_attempts: int
    checkpoint_refusal: str
    workers: tuple[WorkerView, ...]
    tiers: tuple[Tier, ...]
    transfers: tuple[Transfer, ...]
    training: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    events: tuple[Event, ...]

    @property
    def ended(self) -> bool:
        """Whether no step follows."""
        return self.state in ENDED


def plain(value: object) -> object:
    """Returns a view as values that JSON knows: what is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def state_of(*, activity: str, is_committed: bool, is_following: bool, is_draining: bool) -> str:
    """Returns what a worker does, in one or two words."""
    if is_draining:
        return "draining"
    if is_following:
        return "following"
    return "done" if is_committed else activity or "idle"


def seconds_left(points: Sequence[Point], committed_steps: int, num_steps: int) -> float | None:
    """Returns how long the rest takes at the speed of the last twenty points; None where that is not known."""
    recent = points[-20:]
    if not num_steps or len(recent) < 2 or recent[-1].step <= recent[0].step:
        return None
    seconds = (recent[-1].unix_time - recent[0].unix_time) / (recent[-1].step - recent[0].step)
    return max(0.0, seconds * (num_steps - committed_steps))


def tiers_of(workers: Sequence[WorkerView], committed_steps: int, stored_steps: int, refusal: str) -> tuple[Tier, ...]:
    """Returns which tier holds which state of the run."""
    newest = sum(worker.lag_steps == 0 for worker in workers)
    published = [worker.published_steps for worker in workers if worker.published_steps]
    host = max(published, default=0)
    return (
        Tier(
            name="device",
            holders=newest,
            steps=committed_steps if newest else 0,
            sentence=f"{newest} of {_workers(len(workers))} {'has' if newest == 1 else 'have'} the run's parameters",
        ),
        Tier(
            name="host",
            holders=len(published),
            steps=host,
            sentence=f"{_workers(len(published))} {'offers' if len(published) == 1 else 'offer'} a state to others, "
            f"the newest behind step {host}"
            if published
            else "no worker offers a state to others",
        ),
        Tier(
            name="objects",
            holders=int(stored_steps > 0),
            steps=stored_steps,
            sentence=f"the newest stored state is that behind step {stored_steps}"
            if stored_steps
            else refusal or "no state is stored yet",
        ),
    )


def transfers_of(workers: Sequence[WorkerView], storing_steps: int) -> tuple[Transfer, ...]:
    """Returns what large things are under way, in sentences."""
    fetching = [
        Transfer(what="state", worker=worker.name, sentence=f"worker {worker.name} is {worker.waiting_for}")
        for worker in workers
        if worker.waiting_for
    ]
    if not storing_steps:
        return tuple(fetching)
    storing = Transfer(what="checkpoint", worker="", sentence=f"the state behind step {storing_steps} is being stored")
    return (storing, *fetching)


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
