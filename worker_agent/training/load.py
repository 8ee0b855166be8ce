"""Builds the task that a run file names.  [shell]"""

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ayni import settings
from ayni.run_config import TaskConfig
from worker_agent.training.files import RunFiles
from worker_agent.training.layout import check_layout
from worker_agent.training.task import NoOptions, Task, TaskContext

TASKS = {
    "lora_classification": "worker_agent.tasks.lora_classification:LoraClassification",
    "causal_lm": "worker_agent.tasks.causal_lm:CausalLm",
    "causal_lm_lora": "worker_agent.tasks.causal_lm_lora:CausalLmLora",
}
"""Tasks in tree, by the name that a run file uses."""


def load_task(config: TaskConfig, files: Mapping[str, Path], seed: int, device: torch.device | str) -> Task:
    """Builds the task with its initial weights, on `device`.

    Args:
        config: name and options, from the run file.
        files: local paths of the run's files, by the run's names.
        seed: the run's seed.
        device: where the model goes.

    Raises:
        ValueError: the name, an option or the model doesn't fit.
        FileNotFoundError: the run lacks a file that the task needs.
    """
    task_class = _find_class(config.name)
    options = _options(getattr(task_class, "Options", NoOptions), config.options)
    context = TaskContext(files=RunFiles(files), seed=seed, device=torch.device(device))
    task: Task = task_class(options, context)
    _check(task, config.name)
    return task


def _options(options_class: type[Any], values: Mapping[str, object]) -> Any:
    try:
        return settings.from_mapping(options_class, values)
    except settings.SettingsError as error:
        raise settings.SettingsError(*(f"task.options: {problem}" for problem in error.problems)) from error


def _find_class(name: str) -> type[Any]:
    target = TASKS.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f'task.name {name!r} is none of {", ".join(TASKS)}, nor a "module:Class" of your own{hint}')
    return _class_of(_import(module_name, name), class_name, name)


def _import(module_name: str, task_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(
                f"task.name {task_name!r}: there is no module {error.name!r} on this worker's Python path; "
                "install it on every worker, or add its folder to PYTHONPATH"
            ) from error
        raise ValueError(
            f"task.name {task_name!r}: module {module_name!r} needs package {error.name!r}, which is not installed here"
        ) from error


def _class_of(module: Any, class_name: str, task_name: str) -> type[Any]:
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    near = difflib.get_close_matches(class_name, classes, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"task.name {task_name!r}: module {module.__name__!r} has no class {class_name!r}{hint}")


def _check(task: Task, name: str) -> None:
    missing = [
        member
        for member in (
            "model",
            "num_samples",
            "num_evaluation_samples",
            "buckets",
            "trainable",
            "batch",
            "loss",
            "save",
        )
        if not hasattr(task, member)
    ]
    if missing:
        raise ValueError(f"task {name!r} lacks {', '.join(missing)}; see worker_agent.training.task.Task")
    if task.num_samples < 1:
        raise ValueError(f"task {name!r} has no training samples")
    try:
        check_layout(task.buckets, {name: parameter.numel() for name, parameter in task.trainable()})
    except ValueError as error:
        raise ValueError(f"task {name!r}: {error}") from error
