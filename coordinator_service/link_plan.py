"""Whether the exchange takes too much of a step, and what would make it take less.  [core]

Legend: t seconds in which a worker computes a step, T seconds in which it exchanges gradients, e the share of a step
that the exchange may take, H inner steps.

Theory of operation. A worker's exchange time contains the wait for whoever came last, so the shortest one of a step is
the exchange alone; the medians over the last steps are compared. A wire type scales T by the bytes that it leaves. With
local updates one exchange serves H inner steps, and its share is T / (T + H t), at most e from H = T (1 - e) / (e t).
Workers count as many inner steps as their micro-batches, so H is micro-batches of a step for each worker. In a run that
makes local updates already, t is the time of all of them, and what is advised is a larger number of micro-batches.

Says something after a few steps, and again when the advice changes; nothing while all is well. Where medians said too
much in enough steps one after the other, a narrower wire type is a choice. After a change the medians begin anew; where
it did not make the exchange shorter, bytes are not what takes the time, and there is no further choice.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ayni.step_values import StepTimes
from coordinator_service.wire_types import NARROWER

_STEPS = 10
"""Steps that medians are over; the first advice comes after as many."""
_PATIENCE = 10
"""Steps one after the other in which the medians have to say too much before the wire type changes."""
_HELPED = 0.9
"""Of the exchange before a change, what may be left of it after one that helped."""

_LEFT = {
    "float32": {"bfloat16": 0.5, "int8": 0.377},
    "bfloat16": {"int8": 0.754},
    "float16": {"int8": 0.754},
}
"""Of a wire type's bytes, what another one leaves, both ways together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What was seen, and what would help.

    Attributes:
        share: part of a step that the exchange takes, 0 to 1.
        exchange_s: T.
        compute_s: t.
        rate: bytes a second and direction that one worker's link carries.
        wire_shares: share with each other wire type.
        inner_steps: smallest H with which the share is kept.
        is_local: whether the run makes local updates already; `inner_steps` is of all workers together then.
    """

    share: float
    exchange_s: float
    compute_s: float
    rate: float
    wire_shares: dict[str, float]
    inner_steps: int
    is_local: bool = False

    @property
    def seen(self) -> str:
        """What was seen, for people."""
        return (
            f"the exchange takes {self.share:.0%} of a step ({self.exchange_s:.3g} s beside {self.compute_s:.3g} s, "
            f"{self.rate * 8 / 1e6:,.0f} Mbit/s each way)"
        )

    def sentence(self, limit: float) -> str:
        """Returns it for people; `limit` is the share that was asked for."""
        if self.is_local:
            return (
                f"{self.seen}; batch.microbatches of {self.inner_steps} or more, the inner steps of all workers "
                f"together, keep it below {limit:.0%}"
            )
        wires = [f"wire_type {wire} would make it {share:.0%}" for wire, share in self.wire_shares.items()]
        inner = f"local updates with {self.inner_steps} or more inner steps keep it below {limit:.0%}"
        return f"{self.seen}; {', '.join([*wires, inner])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A narrower wire type, and why, for people."""

    wire_type: str
    sentence: str
    exchange_s: float
    """Of a step before the change."""


def advise(
    exchange_s: float, compute_s: float, num_bytes: int, wire_type: str, limit: float, microbatches: int = 0
) -> Advice | None:
    """Returns what would help, or None when the exchange takes no more of a step than it may.

    Args:
        exchange_s: T, above 0.
        compute_s: t, above 0.
        num_bytes: gradients of a step on the wire, one way.
        wire_type: of the run.
        limit: e, above 0 and below 1.
        microbatches: inner steps of all workers together, in a run that makes local updates; 0 in any other.
    """
    share = exchange_s / (exchange_s + compute_s)
    if share <= limit:
        return None
    left = {wire: exchange_s * part for wire, part in _LEFT.get(wire_type, {}).items()}
    return Advice(
        share=share,
        exchange_s=exchange_s,
        compute_s=compute_s,
        rate=num_bytes / exchange_s,
        wire_shares={wire: seconds / (seconds + compute_s) for wire, seconds in left.items()},
        inner_steps=math.ceil((microbatches or 1) * exchange_s * (1 - limit) / (limit * compute_s)),
        is_local=bool(microbatches),
    )


class LinkPlan:
    """Watches a run's steps."""

    def __init__(self, wire_type: str, limit: float, microbatches: int = 0, before_s: float = math.inf) -> None:
        """Watches for the exchange to take more than `limit` of a step; 0 for not at all.

        Args:
            wire_type: of the next step.
            limit: see `advise`.
            microbatches: see `advise`.
            before_s: exchange of a step before the type became this one; infinite for not known.
        """
        self.wire_type, self._limit, self._microbatches = wire_type, limit, microbatches
        self._exchange: deque[float] = deque(maxlen=_STEPS)
        self._compute: deque[float] = deque(maxlen=_STEPS)
        self._told = 0
        self._advice: Advice | None = None
        self._in_a_row = 0
        self._before_s = before_s
        """Exchange before the last change."""

    def observe(self, times: Sequence[StepTimes], num_bytes: int) -> str:
        """Takes where the workers' time went in a step; returns advice that is new, or nothing.

        Args:
            times: of the workers that computed something.
            num_bytes: gradients of the step on the wire, one way.
        """
        said = [time for time in times if time.compute > 0 and time.exchange > 0]
        if not self._limit or not num_bytes or not said:
            return ""
        self._exchange.append(min(time.exchange for time in said))
        self._compute.append(median(time.compute for time in said))
        if len(self._exchange) < _STEPS:
            return ""
        medians = median(self._exchange), median(self._compute)
        advice = self._advice = advise(*medians, num_bytes, self.wire_type, self._limit, self._microbatches)
        self._in_a_row = self._in_a_row + 1 if advice else 0
        step = round(math.log2(advice.inner_steps)) + 1 if advice else 0
        is_new, self._told = step > self._told, step
        return advice.sentence(self._limit) if advice and is_new else ""

    def choice(self) -> Choice | None:
        """Returns the narrower wire type that the steps so far ask for; None for none.

        With local updates there is none: rounding how far a worker went is no better than going further.
        """
        advice, wire_type = self._advice, NARROWER.get(self.wire_type, "")
        if not (advice and wire_type) or self._in_a_row < _PATIENCE or advice.is_local:
            return None
        if advice.exchange_s > _HELPED * self._before_s:
            return None
        sentence = (
            f"gradients travel in {wire_type}, not {self.wire_type}: {advice.seen}, more than {self._limit:.0%} in "
            f"{self._in_a_row} steps one after the other, and {wire_type} would make it "
            f"{advice.wire_shares[wire_type]:.0%}"
        )
        return Choice(wire_type=wire_type, sentence=sentence, exchange_s=advice.exchange_s)

    def changed(self, wire_type: str) -> None:
        """Notes that gradients travel in another type from now on."""
        self._before_s = self._advice.exchange_s if self._advice else math.inf
        self.wire_type, self._advice, self._in_a_row, self._told = wire_type, None, 0, 0
        self._exchange.clear()
        self._compute.clear()
