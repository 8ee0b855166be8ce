"""The `datasets` package itself, without a network: each sample is used once in a pass, over all workers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from tests.support.coordinator import coordinator
from tests.support.joined_runs import OWN, outputs, programs, settings
from tests.support.tracked_runs import settings as offline
from worker_agent.integrations.sharding import shard


def parts(data: Any, world_size: int) -> list[list[int]]:
    return [[row["number"] for row in shard(data, rank, world_size)] for rank in range(world_size)]


def numbers(shards: list[list[int]]) -> Any:
    for one in shards:
        yield from ({"number": number} for number in one)


def stream(*shards: list[int]) -> IterableDataset:
    return IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(shards)})


def test_tables_are_divided_into_parts_of_equal_length() -> None:
    table = Dataset.from_dict({"number": range(11)})
    assert parts(table, 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert parts(table.with_format("torch"), 3) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert isinstance(shard(table, 0, 2), Dataset)
    assert list(shard(table["number"], 1, 2)) == [1, 3, 5, 7, 9]


def test_streams_are_divided_by_shards_where_that_is_possible_and_by_samples_where_not() -> None:
    assert parts(stream([0, 1, 2], [3, 4, 5, 6, 7]), 2) == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert parts(stream([0, 1, 2, 3, 4]), 2) == [[0, 2, 4], [1, 3]]
    assert parts(stream([0], [1, 2], [3, 4]), 2) == [[0, 2, 4], [1, 3]]
    assert isinstance(shard(stream([0, 1]), 0, 2), IterableDataset)
    assert list(shard(stream([0, 1], [2, 3])["number"], 1, 2)) == [1, 3]


def test_a_shuffled_stream_has_another_order_in_each_pass_and_each_sample_once() -> None:
    shuffled = stream(*([10 * place + index for index in range(5)] for place in range(3))).shuffle(3, buffer_size=20)
    found = []
    for epoch in range(2):
        divided = [shard(shuffled, rank, 2) for rank in range(2)]
        for part in divided:
            part.set_epoch(epoch)
        found.append([row["number"] for part in divided for row in part])
    assert (
        sorted(found[0]) == sorted(found[1]) == sorted(10 * place + index for place in range(3) for index in range(5))
    )
    assert found[0] != found[1]


def test_splits_by_name_are_refused() -> None:
    table = Dataset.from_dict({"number": range(4)})
    with pytest.raises(
        TypeError, match="a DatasetDict is no data set but has several by name: give one of train, test"
    ):
        shard(DatasetDict(train=table, test=table), 0, 2)


def test_two_trainers_use_every_sample_once_in_a_pass(tmp_path: Path) -> None:
    files = [tmp_path / f"worker-{index}.json" for index in range(2)]
    with coordinator(tmp_path / "run", {**OWN, "start_workers": 2}) as server:
        environments = [
            {**offline(tmp_path), **settings(server, f"w{index}"), "HF_HUB_OFFLINE": "1"} for index in range(2)
        ]
        commands = [["tests/support/datasets_worker.py", str(file)] for file in files]
        with programs(commands, environments) as started:
            outputs(started)
    one, other = (json.loads(file.read_text()) for file in files)
    assert one["parameters"] == other["parameters"]
    assert any(one["parameters"])
    for name in ("whole shards", "samples of shards"):
        assert Counter(one[f"loaded, {name}"] + other[f"loaded, {name}"]) == Counter(range(12))
    # The table's 13th sample is left out: parts have equal length. Two passes in another order each.
    assert Counter(one["loaded, table"] + other["loaded, table"]) == Counter(range(12))
    used = [one["trained, table"], other["trained, table"]]
    assert Counter(used[0][:6] + used[1][:6]) == Counter(used[0][6:] + used[1][6:]) == Counter(range(12))
    # 6 steps of 2 samples are two passes over 6 samples, where a worker has that many.
    used = [one["trained, samples of shards"], other["trained, samples of shards"]]
    assert Counter(used[0] + used[1]) == Counter({number: 2 for number in range(12)})
    # Shards of 5 and 7 samples: whoever has less begins anew earlier, and nobody uses what is another's.
    used = [one["trained, whole shards"], other["trained, whole shards"]]
    assert sorted(map(set, used), key=min) == [set(range(5)), set(range(5, 12))]
    for samples in used:
        size = len(set(samples))
        assert len(set(samples[:size])) == size
