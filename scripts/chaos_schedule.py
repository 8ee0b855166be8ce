"""What happens to a run, and when: a pure function of a seed.

Events happen at steps, `every` steps apart on average. Which workers there are follows from the events before: `join`
adds one, `leave` takes one away, and all other kinds give back what they take. Samples that spoil a micro-batch belong
to the run and not to the seed of the events, because the undisturbed run has to leave out the same ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ayni import order

KINDS = {
    "kill": "kill -9 of a worker; a new process takes its place",
    "stop": "SIGSTOP of a worker, and SIGCONT some seconds later",
    "restart": "SIGTERM to a worker, then a new process of the same name",
    "join": "one worker more",
    "leave": "SIGTERM to a worker that nobody replaces",
    "coordinator": "kill -9 of the coordinator; a new process has the same state and address",
    "link": "the connection of a worker to the coordinator is cut, stands still, or is slow",
    "disk": "every write to a file fails, of a worker or of the coordinator, as on a full disk",
    "nan": "a sample whose loss is not a number",
}
"""What can happen."""

COORDINATOR = "coordinator"
LINK_MODES = ("cut", "stall", "slow", "delay")
SHORTEST_STOP_S, LONGEST_STOP_S = 1.0, 8.0
LONGEST_LINK_S = 5.0
LONGEST_DISK_S = 3.0
_STEPS_TO_A_NAN = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happens once a step is committed."""

    step: int
    """Committed steps after which it happens."""
    kind: str
    target: str
    """Name of a worker, "coordinator", or for "nan" the sample."""
    mode: str = ""
    """What happens to a link."""
    seconds: float = 0.0
    """How long it lasts; 0 for what does not last."""


def schedule(seed: int, steps: int, workers: int, every: int, kinds: Sequence[str]) -> tuple[Event, ...]:
    """Returns the events of a run, in the order of their steps.

    Args:
        seed: the same one gives the same events.
        steps: of the run; nothing is begun in the last `every` ones.
        workers: that the run begins with, named worker-0 and so on. There are one fewer to one more at any time, but at
            least one.
        every: steps from one event to the next, on average.
        kinds: which of KINDS.
    """
    draw = random.Random(f"ayni chaos {seed}")
    crew, joined = [f"worker-{number}" for number in range(workers)], workers
    events, step = [], 0
    drawn = [kind for kind in kinds if kind != "nan"]
    while drawn and (step := step + draw.randint(1, 2 * every - 1)) <= steps - every:
        possible = [
            kind
            for kind in drawn
            if not (kind == "join" and len(crew) > workers)
            and not (kind == "leave" and len(crew) <= max(1, workers - 1))
        ]
        if not possible:
            continue
        kind = draw.choice(possible)
        event = _event(draw, step, kind, crew, joined)
        events.append(event)
        if kind == "join":
            crew.append(event.target)
            joined += 1
        elif kind == "leave":
            crew.remove(event.target)
    return tuple(events)


def _event(draw: random.Random, step: int, kind: str, crew: Sequence[str], joined: int) -> Event:
    if kind == "join":
        return Event(step=step, kind=kind, target=f"worker-{joined}")
    if kind == "coordinator":
        return Event(step=step, kind=kind, target=COORDINATOR)
    target = draw.choice(crew)
    if kind == "stop":
        return Event(step=step, kind=kind, target=target, seconds=_seconds(draw, SHORTEST_STOP_S, LONGEST_STOP_S))
    if kind == "link":
        mode = draw.choice(LINK_MODES)
        return Event(step=step, kind=kind, target=target, mode=mode, seconds=_seconds(draw, 0.2, LONGEST_LINK_S))
    if kind == "disk":
        target = draw.choice((target, COORDINATOR))
        return Event(step=step, kind=kind, target=target, seconds=_seconds(draw, 0.5, LONGEST_DISK_S))
    return Event(step=step, kind=kind, target=target)


def _seconds(draw: random.Random, shortest: float, longest: float) -> float:
    return round(draw.uniform(shortest, longest), 2)


def spoilt_samples(run_seed: int, steps: int, batch: int, num_samples: int) -> tuple[Event, ...]:
    """Returns the samples whose loss is not a number, one in some 25 steps, as events.

    Args:
        run_seed: seed of the run.
        steps: of the run.
        batch: samples of a step.
        num_samples: samples of the data set; at least `steps * batch`, so that each is used once.
    """
    draw = random.Random(f"ayni chaos nan {run_seed}")
    events, step = [], 0
    while (step := step + draw.randint(1, 2 * _STEPS_TO_A_NAN - 1)) < steps:
        position = step * batch + draw.randrange(batch)
        sample = int(order.samples_at(run_seed, position, position + 1, num_samples)[0])
        events.append(Event(step=step, kind="nan", target=str(sample)))
    return tuple(events)
