"""What a reduction refuses, in sentences.  [core]"""

from collections.abc import Mapping

import numpy as np

from ayni.errors import BadChunk, Duplicate, NonFinite
from ayni.tensors import Floats, first_non_finite

SUM_OF_ALL = "(sum of all)"
"""Stands for the worker's name where contributions, each finite, have a sum that is not."""


def not_finite(label: str, worker: str, offset: int, values_C: Floats) -> NonFinite:
    """Refuses values, the first of which is element `offset` of the bucket."""
    bad = first_non_finite(values_C) or 0
    return NonFinite(
        f"{label}: worker {worker} contributes {values_C[bad]} at element {offset + bad}",
        worker=worker,
        bucket=label,
        element=offset + bad,
        value=values_C[bad],
    )


def overflow(label: str, element: int, value: np.float32) -> NonFinite:
    """Refuses a sum."""
    return NonFinite(
        f"{label}: the workers' gradients, each finite, add up to {value} at element {element}: "
        "their sum is beyond float32",
        worker=SUM_OF_ALL,
        bucket=label,
        element=element,
        value=value,
    )


def bad_chunk(label: str, worker: str, field: str, expected: object, received: object) -> BadChunk:
    """Refuses a chunk that is not the one that is due."""
    return BadChunk(
        f"{label}: worker {worker} sends a chunk with {field} {received}; expected {expected}",
        field=field,
        expected=expected,
        received=received,
        bucket=label,
    )


def duplicate(label: str, worker: str, weights: Mapping[int, int]) -> Duplicate:
    """Refuses micro-batches, with their weights, that have come before."""
    span = f"[{min(weights)}, {max(weights) + 1})" if weights else "(none)"
    sentence = f"{label}: worker {worker} contributes micro-batches {span} a second time"
    return Duplicate(sentence, bucket=label, contributed=span)
