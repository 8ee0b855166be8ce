"""Checkpoints: whole, or not there.  [shell]

A checkpoint is a folder: `state.safetensors` (trainable parameters, the optimizer's arrays, the step, and a hash of the
parameters) and `model/` (the task's natural format). It is written beside its place, flushed to the disk, and renamed;
the one before stays until then. A crash between the two renames leaves the one before under a hidden name, from which
it is put back. No pickle.

`begin` takes everything from the replica that is needed; what it returns is written later, while training goes on.
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ayni import failpoints
from worker_agent.training.fingerprint import arrays_sha256
from worker_agent.training.task import Task, host_copy
from worker_agent.training.update import Update

log = logging.getLogger(__name__)

STATE_FILE = "state.safetensors"
FORMAT = "ayni-checkpoint-1"
_PARAMETER, _OPTIMIZER = "parameter/", "optimizer/"


class CheckpointFolder:
    """The checkpoints of one run on one worker."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder that holds "best" and "last"; it is made when first written to."""
        self._folder = folder

    def save(self, name: str, task: Task, update: Update | None, completed_steps: int) -> Path:
        """Writes a checkpoint, replacing one of the same name; returns its folder.

        Raises:
            OSError: the disk is full or can't be written to. What was there before is whole, and no part of the new
                one is left.
        """
        return self.begin(name, task, update, completed_steps).write()

    def begin(self, name: str, task: Task, update: Update | None, completed_steps: int) -> "UnwrittenCheckpoint":
        """Copies a replica's state to host memory, and has the task save its model without waiting for the disk.

        No other checkpoint of the same name may be unwritten.

        Raises:
            OSError: as in `save`.
        """
        target = self._folder / name
        partial = self._folder / f".{name}.partial"
        with _cleaned(partial, target):
            self._folder.mkdir(parents=True, exist_ok=True)
            _put_back(target)
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)
            tensors, metadata = state_of(task, update, completed_steps)
            task.save(partial / "model")
        return UnwrittenCheckpoint(partial=partial, target=target, tensors=tensors, metadata=metadata)

    def load(self, name: str, task: Task, update: Update | None = None) -> int:
        """Puts a checkpoint's parameters into the task, and its optimizer state into `update`; returns completed steps.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, or belongs to another task or optimizer. The task is unchanged.
        """
        path = self._folder / name / STATE_FILE
        _put_back(path.parent)
        tensors, metadata = _read(path)
        return restore(f"checkpoint {path}", tensors, metadata, task, update)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnwrittenCheckpoint:
    """A checkpoint that is in memory, and its model in part on the disk."""

    partial: Path
    target: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def write(self) -> Path:
        """Writes it to the disk and puts it in its place; returns its folder.

        Raises:
            OSError: as in `CheckpointFolder.save`.
        """
        with _cleaned(self.partial, self.target):
            save_file(self.tensors, self.partial / STATE_FILE, self.metadata)
            _sync_tree(self.partial)
            failpoints.hit("worker.checkpoint.written")
            _replace(self.partial, self.target)
        return self.target


def restore(
    what: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], task: Task, update: Update | None
) -> int:
    """Puts what `state_of` returned into a task and its update; returns completed steps.

    Raises:
        ValueError: it is damaged, or belongs to another task or optimizer. The task is unchanged.
    """
    parameters = _part(tensors, _PARAMETER)
    _check(what, metadata, parameters, task)
    with torch.no_grad():
        for parameter_name, parameter in task.trainable():
            parameter.copy_(parameters[parameter_name])
    if update is not None:
        update.load_state(_part(tensors, _OPTIMIZER))
    return int(metadata["completed_steps"])


def state_of(task: Task, update: Update | None, completed_steps: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns copies of everything that training goes on from, by name, and facts about it."""
    parameters = host_copy(task.trainable())
    optimizer = update.state() if update is not None else {}
    tensors = {
        **{_PARAMETER + name: value for name, value in parameters.items()},
        **{_OPTIMIZER + name: value for name, value in optimizer.items()},
    }
    metadata = {
        "format": FORMAT,
        "completed_steps": str(completed_steps),
        "task": task.summary(),
        "task_fingerprint": task.fingerprint(),
        "parameters_sha256": _hash(parameters),
        "update": update.kind if update is not None else "",
    }
    return tensors, metadata


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path} can't be read: {error}") from error


def _check(what: str, metadata: Mapping[str, str], parameters: Mapping[str, Tensor], task: Task) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{what} has format {metadata.get('format')!r}; this program reads {FORMAT!r}")
    if metadata.get("task_fingerprint") != task.fingerprint():
        raise ValueError(
            f"{what} belongs to another task: {metadata.get('task')} ({metadata.get('task_fingerprint', '')[:12]}); "
            f"this worker has {task.summary()} ({task.fingerprint()[:12]})"
        )
    found = _hash(parameters)
    said = metadata.get("parameters_sha256", "")
    if found != said:
        raise ValueError(f"{what} is damaged: its parameters hash to {found[:12]}, it says {said[:12] or 'nothing'}")


def _hash(parameters: Mapping[str, Tensor]) -> str:
    return arrays_sha256((name, parameters[name].float().numpy()) for name in sorted(parameters))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@contextmanager
def _cleaned(partial: Path, target: Path) -> Iterator[None]:
    """Removes what a failed write left, and says where it failed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) if partial.exists() else 0
        shutil.rmtree(partial, ignore_errors=True)
        cause = error if isinstance(error, OSError) else _os_error(error)
        raise OSError(cause.errno, _failure(cause, target, written)) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _os_error(error: SafetensorError) -> OSError:
    # The library reports a full disk as an error of its own, with the number in its text.
    return OSError(errno.ENOSPC if "os error 28" in str(error) else errno.EIO, str(error))


def _failure(error: OSError, target: Path, written: int) -> str:
    reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    kept = "the checkpoint before it is kept" if target.exists() else "there is none before it"
    free = _free_bytes(target)
    return (
        f"checkpoint {target} was not written on this worker: {reason} after {written:,} bytes ({free}); {kept}. "
        "Free some space or choose another checkpoint folder"
    )


def _free_bytes(target: Path) -> str:
    existing = next((path for path in target.parents if path.exists()), None)
    return f"{shutil.disk_usage(existing).free:,} bytes free" if existing else "free space unknown"


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(partial: Path, target: Path) -> None:
    """Puts a folder in another's place. A crash between the renames leaves the old one for `_put_back`."""
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
        failpoints.hit("worker.checkpoint.moved")
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _put_back(target: Path) -> None:
    """Puts a checkpoint back that a crash left out of its place."""
    old = _old(target)
    if old.is_dir() and not target.exists():
        log.warning("checkpoint %s was being replaced when this worker was ended: the one before is put back", target)
        old.rename(target)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")
