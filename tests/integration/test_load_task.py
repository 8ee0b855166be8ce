"""Tasks by name: in tree, your own, and everything that can be wrong."""

import sys
from pathlib import Path

import pytest
import torch

from ayni.run_config import TaskConfig
from worker_agent.training.load import load_task

OWN = """
from dataclasses import dataclass
import torch
from worker_agent.training.task import LossSums, TaskBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    width: int = 2

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be at least 1")


class Line(TaskBase):
    Options = Options
    num_samples = 4

    def __init__(self, options, context):
        self.model = torch.nn.Linear(options.width, 1)

    def batch(self, indices, split):
        return torch.ones(len(indices), 2)

    def loss(self, batch):
        return LossSums(loss_sum=self.model(batch).sum(), weight=len(batch))


class Frozen(Line):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.model.requires_grad_(False)


class Empty(Line):
    num_samples = 0


class NoLoss:
    Options = Options
    num_samples = 4

    def __init__(self, options, context):
        pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tasks.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)
    return "own_tasks"


def load(name: str, **options: object) -> object:
    return load_task(TaskConfig(name=name, options=options), {}, 0, "cpu")


def test_a_task_of_your_own_needs_a_model_a_batch_a_loss_and_a_count(own_module: str, tmp_path: Path) -> None:
    task = load_task(TaskConfig(name=f"{own_module}:Line", options={"width": 2}), {}, 0, torch.device("cpu"))
    assert task.loss(task.batch([0, 1], "train")).weight == 2
    assert [spec.num_elements for spec in task.buckets] == [3]
    assert task.summary() == "Linear, 3 of 3 parameters trainable"
    assert len(task.fingerprint()) == 64
    assert task.num_evaluation_samples == 0
    task.save(tmp_path)
    assert (tmp_path / "trainable.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora_clasification", "did you mean 'lora_classification'"),
        ("", "is none of lora_classification, causal_lm, causal_lm_lora"),
        ("own_tasks:", 'nor a "module:Class" of your own'),
        ("no_such_module:Task", "there is no module 'no_such_module' on this worker's Python path"),
        ("own_tasks.inner:Task", "there is no module 'own_tasks.inner'"),
        ("needs_more:Task", "needs package 'a_package_that_is_not_there', which is not installed here"),
        ("own_tasks:Lime", "module 'own_tasks' has no class 'Lime'; did you mean 'Line'"),
        ("own_tasks:torch", "module 'own_tasks' has no class 'torch'"),
        ("own_tasks:Frozen", "task 'own_tasks:Frozen': bucket layout: there are no trainable parameters"),
        ("own_tasks:Empty", "has no training samples"),
        ("own_tasks:NoLoss", "lacks model, num_evaluation_samples, buckets, trainable, batch, loss, save"),
    ],
)
def test_a_name_that_can_not_be_loaded_says_why(own_module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        load(name)


def test_options_are_checked_as_a_whole(own_module: str) -> None:
    with pytest.raises(ValueError, match=r"task.options: widht is not a known name; did you mean width\?"):
        load("own_tasks:Line", widht=3)
    with pytest.raises(ValueError, match=r"task.options: width must be at least 1"):
        load("own_tasks:Line", width=0)
    with pytest.raises(ValueError, match=r"task.options: width must be a whole number"):
        load("own_tasks:Line", width="wide")
    with pytest.raises(ValueError, match=r"task.options: contxt is not a known name; did you mean context"):
        load("causal_lm", contxt=3)


def test_missing_data_is_named(own_module: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"the run has no file 'train.txt'; it has no files at all"):
        load("causal_lm")
    with pytest.raises(FileNotFoundError, match=r"the run has no file 'train.jsonl'"):
        load("lora_classification")
