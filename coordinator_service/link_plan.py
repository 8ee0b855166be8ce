"""Whether the exchange takes too much of a step, and what would make it take less.  [core]

Legend: t seconds in which a worker computes a step, T seconds in which it exchanges gradients, e the share of a step
that the exchange may take, H inner steps.

Theory of operation. A worker's exchange time contains the wait for whoever came last, so the shortest one of a step is
the exchange alone; the medians over the last steps are compared. A wire type scales T by the bytes that it leaves. With
local updates one exchange serves H inner steps, and its share is T / (T + H t), at most e from H = T (1 - e) / (e t).
Workers count as many inner steps as their micro-batches, so H is micro-batches of a step for each worker.

Says something after a few steps, and again when the advice changes; nothing while all is well.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ayni.step_values import StepTimes

_STEPS = 10
"""Steps that medians are over; the first advice comes after as many."""

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
    """

    share: float
    exchange_s: float
    compute_s: float
    rate: float
    wire_shares: dict[str, float]
    inner_steps: int

    def sentence(self, limit: float) -> str:
        """Returns it for people; `limit` is the share that was asked for."""
        wires = [f"wire_type {wire} would make it {share:.0%}" for wire, share in self.wire_shares.items()]
        inner = f"local updates with {self.inner_steps} or more inner steps keep it below {limit:.0%}"
        return (
            f"the exchange takes {self.share:.0%} of a step ({self.exchange_s:.3g} s beside {self.compute_s:.3g} s, "
            f"{self.rate * 8 / 1e6:,.0f} Mbit/s each way); {', '.join([*wires, inner])}"
        )


def advise(exchange_s: float, compute_s: float, num_bytes: int, wire_type: str, limit: float) -> Advice | None:
    """Returns what would help, or None when the exchange takes no more of a step than it may.

    Args:
        exchange_s: T, above 0.
        compute_s: t, above 0.
        num_bytes: gradients of a step on the wire, one way.
        wire_type: of the run.
        limit: e, above 0 and below 1.
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
        inner_steps=math.ceil(exchange_s * (1 - limit) / (limit * compute_s)),
    )


class LinkPlan:
    """Watches a run's steps."""

    def __init__(self, wire_type: str, limit: float) -> None:
        """Watches for the exchange to take more than `limit` of a step; 0 for not at all."""
        self._wire_type, self._limit = wire_type, limit
        self._exchange: deque[float] = deque(maxlen=_STEPS)
        self._compute: deque[float] = deque(maxlen=_STEPS)
        self._told = 0

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
        advice = advise(median(self._exchange), median(self._compute), num_bytes, self._wire_type, self._limit)
        step = round(math.log2(advice.inner_steps)) + 1 if advice else 0
        is_new, self._told = step > self._told, step
        return advice.sentence(self._limit) if advice and is_new else ""
