"""Files of residuals: those that fit are found, and everything else is said and costs nothing but zeros."""

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ayni.buckets import FLAT, Bucket
from tests.support.toy_task import toy_task
from worker_agent.session import Vector
from worker_agent.training.checkpoint_writer import CheckpointWriter
from worker_agent.training.residual_files import FORMAT, UnwrittenResiduals, load

BLOCK = Bucket("block", 12)
SIZES = {FLAT: 5, BLOCK: 3}


def residuals(factor: float = 1.0) -> dict[Bucket, Vector]:
    return {bucket: np.arange(1, size + 1, dtype=np.float32) * np.float32(factor) for bucket, size in SIZES.items()}


def unwritten(completed_steps: int, factor: float = 1.0, sha256: str = "abc") -> UnwrittenResiduals:
    return UnwrittenResiduals(completed_steps=completed_steps, parameters_sha256=sha256, residuals=residuals(factor))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "residuals").iterdir())


def test_residuals_come_back(tmp_path: Path) -> None:
    assert unwritten(7, factor=-0.25).write(tmp_path) == tmp_path / "residuals" / "7.safetensors"
    found = load(tmp_path, 7, "abc", SIZES)
    assert found is not None
    assert {bucket: values.tolist() for bucket, values in found.items()} == {
        bucket: values.tolist() for bucket, values in residuals(-0.25).items()
    }
    assert {values.dtype for values in found.values()} == {np.dtype(np.float32)}


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    unwritten(7, factor=1).write(tmp_path)
    unwritten(7, factor=2).write(tmp_path)
    found = load(tmp_path, 7, "abc", SIZES)
    assert found is not None
    assert found[FLAT][0] == 2
    assert names(tmp_path) == ["7.safetensors"]


def test_the_newest_three_are_kept(tmp_path: Path) -> None:
    (tmp_path / "residuals").mkdir()
    (tmp_path / "residuals" / "notes.safetensors").write_text("not one of ours")
    for steps in (8, 9, 10, 100):
        unwritten(steps).write(tmp_path)
    assert names(tmp_path) == ["10.safetensors", "100.safetensors", "9.safetensors", "notes.safetensors"]


@pytest.mark.parametrize("steps", [6, 70])
def test_those_of_another_step_are_not_taken(tmp_path: Path, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    unwritten(7).write(tmp_path)
    assert load(tmp_path, steps, "abc", SIZES) is None
    assert f"no residuals of step {steps} in {tmp_path / 'residuals'}: they begin with zeros" in caplog.text


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def written_as(tensors: dict[str, np.ndarray], **facts: str) -> Any:
    return lambda path: save_file(tensors, path, {"format": FORMAT, "parameters_sha256": "abc", **facts})


GOOD = {"flat": np.ones(5, np.float32), "block 12": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shortened, "are of no use on this worker: "),
        (lambda path: path.write_bytes(b"\xff" * 64), "are of no use on this worker: "),
        (lambda path: path.write_bytes(b""), "are of no use on this worker: "),
        (written_as(GOOD, format="other"), "their format is 'other'; this program reads 'ayni-residuals-1'"),
        (written_as(GOOD, parameters_sha256="0123456789abcdef"), "belong to parameters 0123456789ab, and this worker"),
        (written_as({"flat": np.ones(5, np.float32)}), "they have shapes {'flat': (5,)}; this worker's buckets have"),
        (written_as({**GOOD, "flat": np.ones(6, np.float32)}), "'flat': (6,)"),
        (written_as({**GOOD, "lm_head": np.ones(1, np.float32)}), "'lm_head': (1,)"),
        (written_as({**GOOD, "flat": np.array([1, 2, np.nan, 4, 5], np.float32)}), "those of flat are not finite"),
        (written_as({**GOOD, "flat": np.ones(5, np.float64)}), "those of flat are not finite float32 numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_left_and_said(
    tmp_path: Path, spoil: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = unwritten(7).write(tmp_path)
    assert path is not None
    spoil(path)
    assert load(tmp_path, 7, "abc", SIZES) is None
    assert f"residuals in {path} are of no use on this worker" in caplog.text
    assert words in caplog.text


def test_a_full_disk_is_said_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(tensors: object, path: Path, facts: object) -> None:
        path.write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    unwritten(7).write(tmp_path)
    monkeypatch.setattr("worker_agent.training.residual_files.save_file", full)
    assert unwritten(8).write(tmp_path) is None
    assert names(tmp_path) == ["7.safetensors"]
    assert "residuals after step 8 were not written on this worker" in caplog.text
    assert "No space left on device; started again at that step, it begins with zeros" in caplog.text


def test_a_folder_that_can_not_be_made_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "residuals").write_text("a file")
    assert unwritten(8).write(tmp_path) is None
    assert "residuals after step 8 were not written on this worker" in caplog.text


def test_residuals_do_not_wait_for_a_checkpoint_and_both_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, is_written = threading.Event(), threading.Event()
    sync = "worker_agent.training.checkpoint._sync_tree"
    monkeypatch.setattr(sync, lambda folder: None if may_write.wait(60) else pytest.fail("never let go"))
    write = UnwrittenResiduals.write

    def noted(self: UnwrittenResiduals, checkpoints: Path) -> Path | None:
        path = write(self, checkpoints)
        is_written.set()
        return path

    monkeypatch.setattr(UnwrittenResiduals, "write", noted)
    writer = CheckpointWriter(tmp_path)
    writer.start("last", toy_task(), None, 5, timeout_s=60)
    writer.start_residuals(unwritten(5), timeout_s=60)
    assert is_written.wait(60)
    assert names(tmp_path) == ["5.safetensors"]
    assert not (tmp_path / "last").exists()
    with pytest.raises(TimeoutError, match=r"a checkpoint in .* was not written on this worker within 0 s"):
        writer.wait(0.01)
    may_write.set()
    writer.wait(60)
    assert (tmp_path / "last").is_dir()


def test_residuals_that_can_not_be_written_do_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("worker_agent.training.residual_files.save_file", full)
    writer = CheckpointWriter(tmp_path)
    writer.start_residuals(unwritten(5), timeout_s=60)
    writer.wait(60)
    writer.check()
    assert "residuals after step 5 were not written on this worker" in caplog.text
