"""Checkpoints are whole or not there, and are checked when they are read."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ayni.run_config import BatchConfig, OptimizerConfig, RunConfig, TaskConfig
from tests.support.local_session import LocalRun
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training.checkpoint import STATE_FILE, CheckpointFolder, UnwrittenCheckpoint
from worker_agent.training.checkpoint_writer import CheckpointWriter
from worker_agent.training.fingerprint import parameters_sha256
from worker_agent.training.loop import TrainingConfig, train
from worker_agent.training.update import make_update


def changed(task: ToyTask, by: float) -> ToyTask:
    with torch.no_grad():
        for _, parameter in task.trainable():
            parameter.add_(by)
    return task


def test_parameters_optimizer_and_step_come_back(tmp_path: Path) -> None:
    task = toy_task(buckets=2)
    update = make_update("host", OptimizerConfig(), task.trainable(), task.buckets)
    means = {spec.bucket: torch.ones(spec.num_elements).numpy() for spec in task.buckets}
    update.step(means, learning_rate=0.1, clip_factor=1.0)
    path = CheckpointFolder(tmp_path).save("last", task, update, 17)
    other = toy_task(seed=8, buckets=2)
    restored = make_update("host", OptimizerConfig(), other.trainable(), other.buckets)
    assert CheckpointFolder(tmp_path).load("last", other, restored) == 17
    assert parameters_sha256(other.trainable()) == parameters_sha256(task.trainable())
    assert {name: value.tolist() for name, value in restored.state().items()} == {
        name: value.tolist() for name, value in update.state().items()
    }
    assert set(load_file(path / "model" / "trainable.safetensors")) == {name for name, _ in task.trainable()}
    with safe_open(path / STATE_FILE, framework="pt") as file:
        assert file.metadata()["completed_steps"] == "17"


def test_a_second_checkpoint_replaces_the_first_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder, task = CheckpointFolder(tmp_path), toy_task()
    folder.save("last", task, None, 1)
    folder.save("last", changed(task, 1.0), None, 2)
    other = toy_task(seed=8)
    assert folder.load("last", other) == 2
    assert torch.equal(other.trainable()[0][1], task.trainable()[0][1])
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


class FailingTask(ToyTask):
    """Fails after a part has been written, as a full disk does."""

    def save(self, folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_and_the_checkpoint_before_is_whole(tmp_path: Path) -> None:
    folder, task = CheckpointFolder(tmp_path), toy_task()
    folder.save("last", task, None, 1)
    failing = changed(toy_task(), 1.0)
    failing.__class__ = FailingTask
    with pytest.raises(
        OSError, match=r"last was not written on this worker: the disk is full after [\d,]+ bytes"
    ) as caught:
        folder.save("last", failing, None, 2)
    assert caught.value.errno == errno.ENOSPC
    assert "the checkpoint before it is kept" in str(caught.value)
    assert "bytes free" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    assert folder.load("last", toy_task(seed=8)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        place = Path("/dev/full")
    yield place
    if place != Path("/dev/full"):
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path) -> None:
    if small_disk == Path("/dev/full"):
        # Without a disk of our own, at least the writer's own failure is a real one.
        with pytest.raises(OSError, match="No space left"):
            small_disk.open("wb", buffering=0).write(b"x")
        return
    folder = CheckpointFolder(small_disk)
    folder.save("last", toy_task(width=64), None, 1)
    with pytest.raises(OSError, match="the disk is full") as caught:
        folder.save("last", toy_task(width=4096), None, 2)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["last"]
    assert folder.load("last", toy_task(seed=8, width=64)) == 1


def test_a_damaged_checkpoint_is_refused_and_the_task_is_unchanged(tmp_path: Path) -> None:
    folder, task = CheckpointFolder(tmp_path), toy_task()
    path = folder.save("last", task, None, 1) / STATE_FILE
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["parameter/0.bias"][0] += 1.0
    save_file(tensors, path, metadata)
    other = toy_task(seed=8)
    before = parameters_sha256(other.trainable())
    with pytest.raises(ValueError, match="is damaged: its parameters hash to"):
        folder.load("last", other)
    assert parameters_sha256(other.trainable()) == before
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="can't be read"):
        folder.load("last", other)


def test_a_checkpoint_of_another_task_or_format_is_refused_with_both_sides(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    path = folder.save("last", toy_task(width=8), None, 1) / STATE_FILE
    with pytest.raises(ValueError, match=r"75 of 75 parameters.*; this worker has .*111 of 111 parameters"):
        folder.load("last", toy_task(width=12))
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="has format None; this program reads 'ayni-checkpoint-1'"):
        folder.load("last", toy_task())


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*best"):
        CheckpointFolder(tmp_path).load("best", toy_task())


@pytest.mark.parametrize(("point", "found"), [("worker.checkpoint.written", 1), ("worker.checkpoint.moved", 1)])
def test_a_worker_that_dies_while_it_replaces_a_checkpoint_leaves_a_whole_one(
    tmp_path: Path, point: str, found: int
) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.support.toy_task import toy_task; "
        "from worker_agent.training.checkpoint import CheckpointFolder; "
        "folder, task = CheckpointFolder(Path(sys.argv[1])), toy_task(); "
        "[folder.save('last', task, None, steps) for steps in (1, 2, 3)]"
    )
    environment = {**os.environ, "AYNI_FAILPOINTS": f"{point}=kill", "PYTHONPATH": os.pathsep.join(sys.path)}
    if point.endswith("written"):
        environment["AYNI_FAILPOINTS"] += "@2"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    folder, task = CheckpointFolder(tmp_path), toy_task(seed=8)
    assert folder.load("last", task) == found
    folder.save("last", task, None, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    assert folder.load("last", task) == 9


class SlowDisk:
    """Holds the writing of checkpoints up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.threads = threading.Event(), set[str]()
        self._write = UnwrittenCheckpoint.write
        monkeypatch.setattr(UnwrittenCheckpoint, "write", lambda unwritten: self.write(unwritten))

    def write(self, unwritten: UnwrittenCheckpoint) -> Path:
        self.threads.add(threading.current_thread().name)
        assert self.may_write.wait(60)
        return self._write(unwritten)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, slow_disk: SlowDisk) -> None:
    writer, task = CheckpointWriter(tmp_path), toy_task()
    before = parameters_sha256(task.trainable())
    writer.start("last", task, None, 5, timeout_s=60)
    changed(task, 1.0)
    writer.check()
    assert not (tmp_path / "last").exists()
    slow_disk.may_write.set()
    writer.wait(60)
    assert slow_disk.threads == {"checkpoint"}
    other = toy_task(seed=8)
    assert CheckpointFolder(tmp_path).load("last", other) == 5
    assert parameters_sha256(other.trainable()) == before
    saved = load_file(tmp_path / "last" / "model" / "trainable.safetensors")
    assert torch.equal(saved["0.bias"], other.trainable()[1][1])


def test_a_second_checkpoint_waits_for_the_first(tmp_path: Path, slow_disk: SlowDisk) -> None:
    writer, task = CheckpointWriter(tmp_path), toy_task()
    writer.start("last", task, None, 1, timeout_s=60)
    with pytest.raises(TimeoutError, match="was not written on this worker within 0 s"):
        writer.start("last", task, None, 2, timeout_s=0.05)
    slow_disk.may_write.set()
    writer.start("best", task, None, 3, timeout_s=60)
    writer.wait(60)
    assert CheckpointFolder(tmp_path).load("last", task) == 1
    assert CheckpointFolder(tmp_path).load("best", task) == 3


def test_an_error_in_the_background_comes_up_once_on_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer, task = CheckpointWriter(tmp_path), toy_task()
    monkeypatch.setattr("worker_agent.training.checkpoint._sync_tree", full)
    writer.start("last", task, None, 1, timeout_s=60)
    with pytest.raises(OSError, match="last was not written on this worker: the disk is full") as caught:
        writer.wait(60)
    assert caught.value.errno == errno.ENOSPC
    writer.check()
    assert list(tmp_path.iterdir()) == []
    writer.start("last", task, None, 2, timeout_s=60)
    writer.close(60)
    assert "last was not written on this worker: the disk is full" in caplog.text


def test_a_failed_checkpoint_ends_training_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("worker_agent.training.checkpoint._sync_tree", full)
    config = RunConfig(num_steps=4, task=TaskConfig(name="toy"), batch=BatchConfig(samples=8, microbatches=2))
    local = LocalRun(config)
    training = TrainingConfig(checkpoint_folder=tmp_path, checkpoint_every=1)
    with pytest.raises(OSError, match="the disk is full"):
        train(local.session(0), toy_task(), config, training)
    assert len(local.commits) < 4
