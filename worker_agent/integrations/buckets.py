"""Trainable parameters cut into buckets that leave one after another while backward still runs.  [core]

Every worker cuts by names and sizes alone, so all of them cut alike, whatever order their gradients come in. A bucket
travels as one block with one component.
"""

from collections.abc import Mapping

from ayni.buckets import BLOCK_COMPONENTS, Bucket
from worker_agent.training.layout import BucketSpec

BUCKET_ELEMENTS = 25 * (1 << 20) // 4
"""Elements of a bucket, about 25 MiB as torch's own, unless one parameter alone has more."""


def cut(sizes: Mapping[str, int], most: int = BUCKET_ELEMENTS) -> tuple[BucketSpec, ...]:
    """Returns the buckets of parameters, the last parameters first, as backward gives their gradients.

    Args:
        sizes: elements of each parameter, in the model's order.
        most: elements of a bucket.

    Raises:
        ValueError: there are no parameters, or one is empty.
    """
    if empty := [name for name, size in sizes.items() if size < 1]:
        raise ValueError(f"these parameters have no elements: {', '.join(empty)}; freeze them (requires_grad_(False))")
    if not sizes:
        raise ValueError("the model has no trainable parameters: there would be nothing to exchange")
    groups: list[list[str]] = [[]]
    for name in reversed(list(sizes)):
        if groups[-1] and sum(sizes[member] for member in groups[-1]) + sizes[name] > most:
            groups.append([])
        groups[-1].append(name)
    return tuple(_spec(index, names, sizes) for index, names in enumerate(groups))


def _spec(index: int, names: list[str], sizes: Mapping[str, int]) -> BucketSpec:
    total = sum(sizes[name] for name in names)
    return BucketSpec(
        bucket=Bucket("block", index),
        names=tuple(names),
        sizes=tuple(sizes[name] for name in names),
        component_sizes=(total, *(0 for _ in BLOCK_COMPONENTS[1:])),
    )
