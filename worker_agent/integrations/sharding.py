"""A worker's part of a data set that every worker has whole.  [shell]

Rank r of n takes every n-th sample from r on. Three kinds of data sets are known by what they can do: those of the
`datasets` package (`shard`, and streams by `split_dataset_by_node`), those with a length and samples by number, and
plain iterables. Ranks of a data set whose length is no multiple of n differ by one sample.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, Subset


class _EveryNth(IterableDataset[Any]):
    """Every n-th sample of an iterable."""

    def __init__(self, samples: Iterable[Any], rank: int, world_size: int) -> None:
        self._samples, self._rank, self._world_size = samples, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._samples), self._rank, None, self._world_size)


def shard(dataset: Any, rank: int, world_size: int) -> Any:
    """Returns one worker's part.

    Args:
        dataset: of the `datasets` package, with `__len__` and `__getitem__`, or any iterable. An iterator that can be
            gone through once gives its samples once.
        rank: the worker's number, 0 to world_size - 1.
        world_size: all workers.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no such rank, or fewer samples than workers.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with {world_size} workers it must be in [0, {world_size})")
    if type(dataset).__module__.partition(".")[0] == "datasets":
        return _shard_of_datasets(dataset, rank, world_size)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if len(dataset) < world_size:
            raise ValueError(f"the data set has {len(dataset)} samples for {world_size} workers; each needs one")
        return Subset(dataset, range(rank, len(dataset), world_size))
    if isinstance(dataset, Iterable):
        return _EveryNth(dataset, rank, world_size)
    raise TypeError(f"a {type(dataset).__name__} is no data set: give one with a length and samples, or an iterable")


def _shard_of_datasets(dataset: Any, rank: int, world_size: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    if hasattr(dataset, "__len__"):
        return dataset.shard(num_shards=world_size, index=rank)
    return split_dataset_by_node(dataset, rank=rank, world_size=world_size)
