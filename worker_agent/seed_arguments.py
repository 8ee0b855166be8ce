"""Arguments of the simple calls, checked before anything is sent.  [core]"""

import math
import operator
from typing import Any

LARGEST = 2**63 - 1
"""Largest whole number that travels."""


def whole(name: str, value: Any, largest: int = LARGEST) -> int:
    """Returns a whole number in [0, largest] as an int; numpy's count too, flags and floats don't.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value}; it must be an int")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an int, not {type(value).__name__}") from None
    if number < 0:
        raise ValueError(f"{name} is {number}; it must be at least 0")
    if number > largest:
        raise ValueError(f"{name} is {number}; it must be in [0, {largest}]")
    return number


def loss_sum(mean: Any, weight: int) -> float:
    """Returns a mean loss times what it is a mean over.

    Raises:
        ValueError: the loss, or the product, is no finite number.
    """
    try:
        loss = math.nan if isinstance(mean, str | bytes | bool) else float(mean)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        loss = math.nan
    if not math.isfinite(loss):
        raise ValueError(f"loss is {mean!r}; it must be a finite number, the mean over the shard")
    total = loss * float(weight)
    if not math.isfinite(total):
        raise ValueError(f"loss is {loss:g}; times total ({weight}) it must still be a finite number")
    return total


def check_result(loss: Any, correct: Any, total: Any) -> None:
    """Checks what a shard's result is made of.

    Raises:
        ValueError: total is no count, correct is not in [0, total], or the loss is not finite.
    """
    weight = whole("total", total)
    whole("correct", correct, weight)
    loss_sum(loss, weight)
