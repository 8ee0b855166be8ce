"""A Trainer with data of the `datasets` package, as a worker of a run. Argument: file for which samples it used."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from worker_agent.integrations import join
from worker_agent.integrations.huggingface import AyniCallback

LENGTHS = {"whole shards": (5, 7), "samples of shards": (4, 3, 5)}


class Noting(nn.Module):
    """A linear model that remembers which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.used: list[int] = []

    def forward(self, x: Tensor, number: Tensor) -> dict[str, Tensor]:
        self.used += number.tolist()
        return {"loss": (self.inner(x) ** 2).mean()}


def row(number: int) -> dict[str, Any]:
    return {"x": [float(number) / 10], "number": number, "not for the model": "text"}


def rows(shards: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for first, length in shards:
        yield from (row(first + place) for place in range(length))


def stream(lengths: tuple[int, ...]) -> IterableDataset:
    shards = [(sum(lengths[:place]), length) for place, length in enumerate(lengths)]
    return IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})


def main(output: str) -> None:
    model = Noting()
    run = join(model)

    def used(data: Any, **options: Any) -> list[int]:
        """Trains on this worker's part; returns which samples that used, in turn."""
        model.used = []
        arguments: dict[str, Any] = {
            **{"output_dir": f"{output}.trainer", "per_device_train_batch_size": 2, "use_cpu": True},
            **{"save_strategy": "no", "report_to": "none", "seed": 5},
        }
        callback = AyniCallback(run, leave_at_end=False)
        Trainer(
            model, TrainingArguments(**arguments, **options), train_dataset=run.shard(data), callbacks=[callback]
        ).train()
        return model.used

    def loaded(data: Any) -> list[int]:
        """What a loader with two processes of its own gives of this worker's part."""
        parts = DataLoader(run.shard(data).select_columns("number"), batch_size=2, num_workers=2)
        return [number for batch in parts for number in batch["number"].tolist()]

    streams = {name: stream(lengths) for name, lengths in LENGTHS.items()}
    found: dict[str, Any] = {f"loaded, {name}": loaded(data) for name, data in streams.items()}
    whole = Dataset.from_list([row(number) for number in range(13)])
    found["loaded, table"] = loaded(whole)
    found["trained, table"] = used(whole, num_train_epochs=2)
    for name, data in streams.items():
        found[f"trained, {name}"] = used(data, max_steps=6)
    found["parameters"] = torch.cat([one.detach().reshape(-1) for one in model.parameters()]).tolist()
    run.close()
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
