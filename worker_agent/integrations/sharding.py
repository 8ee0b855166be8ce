"""A worker's part of a data set that every worker has whole.  [shell]

Rank r of n takes every n-th sample from r on. What is left at the end, fewer than n samples, is left out, so that all
ranks make as many steps. Data sets are known by what they can do: those of the `datasets` package (`select`), those
with a length and samples by number, and plain iterables.

A stream of the `datasets` package is divided by that package, which need not read what is another rank's: whole shards
where their number is a multiple of n, else every n-th sample. Nothing is left out, so parts may differ in length.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, Subset


class _EveryNth(IterableDataset[Any]):
    """Every n-th sample of an iterable."""

    def __init__(self, samples: Iterable[Any], rank: int, world_size: int) -> None:
        self._samples, self._rank, self._world_size = samples, rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Tells the iterable which pass begins, where it wants to know: it may shuffle anew."""
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        mine: Any = None
        for index, sample in enumerate(self._samples):
            place = index % self._world_size
            mine = sample if place == self._rank else mine
            if place == self._world_size - 1:
                yield mine


def shard(dataset: Any, rank: int, world_size: int) -> Any:
    """Returns one worker's part.

    Args:
        dataset: of the `datasets` package, with `__len__` and `__getitem__`, or any iterable. An iterator that can be
            gone through once gives its samples once.
        rank: the worker's number, 0 to world_size - 1.
        world_size: all workers.

    Raises:
        TypeError: it is none of these, such as several data sets by name.
        ValueError: there is no such rank, or fewer samples than workers.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with {world_size} workers it must be in [0, {world_size})")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        names = ", ".join(map(str, dataset))[:100]
        raise TypeError(f"a {type(dataset).__name__} is no data set but has several by name: give one of {names}")
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        count = len(dataset) // world_size * world_size
        if not count:
            raise ValueError(f"the data set has {len(dataset)} samples for {world_size} workers; each needs one")
        mine = range(rank, count, world_size)
        return dataset.select(mine) if hasattr(dataset, "select") else Subset(dataset, mine)
    if _is_stream(dataset):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=rank, world_size=world_size)
    if isinstance(dataset, Iterable):
        return _EveryNth(dataset, rank, world_size)
    raise TypeError(f"a {type(dataset).__name__} is no data set: give one with a length and samples, or an iterable")


def _is_stream(dataset: Any) -> bool:
    """Whether it is a stream of the `datasets` package, without importing that for others."""
    package = sys.modules.get("datasets")
    return package is not None and isinstance(dataset, package.IterableDataset)
