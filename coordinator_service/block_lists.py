"""What a leader checks of block ids and keys before it asks anybody.  [core]

Ranges, tiers and shapes are left to the workers, who know their layouts; they check them in every build.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ayni.blocks.ids import Ids
from ayni.errors import BadRequest

_SHOWN = 8


def check_pairs(num_sources: int, destination_blocks: Ids) -> None:
    """Refuses lists that are not pairs, and destinations that would be written twice.

    Raises:
        BadRequest: lengths differ, or a destination block comes twice.
    """
    check_lengths("source blocks", num_sources, "destination blocks", len(destination_blocks))
    ids, counts = np.unique(destination_blocks, return_counts=True)
    if len(twice := ids[counts > 1]):
        message = f"destination blocks {_some(twice.tolist())} come more than once; each block can be written once"
        raise BadRequest(message, field="destination_blocks")


def check_lengths(one: str, num_one: int, other: str, num_other: int) -> None:
    """Refuses lists of different lengths.

    Raises:
        BadRequest: they differ.
    """
    if num_one != num_other:
        message = f"{num_one} {one} and {num_other} {other} were given; they are paired, so there must be as many"
        raise BadRequest(message, field=other.replace(" ", "_"))


def check_keys(keys: Sequence[bytes]) -> None:
    """Refuses keys that would be stored twice.

    Raises:
        BadRequest: a key comes twice.
    """
    if twice := [key.hex() for key, count in Counter(keys).items() if count > 1]:
        raise BadRequest(f"keys {_some(twice)} come more than once; each key can be stored once", field="keys")


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(str(value) for value in values[:_SHOWN]) + more
