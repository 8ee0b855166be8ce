"""Metrics files: one complete JSON object for each event."""

import json
import math
import resource
from pathlib import Path

import pytest

from worker_agent.session import StepTimes
from worker_agent.training.events import StepEvent
from worker_agent.training.metrics import Metrics, record


def event(**changes: object) -> StepEvent:
    values: dict[str, object] = {
        "kind": "train", "step": 3, "attempt": 0, "epoch": 1, "rank": 0, "world_size": 2, "num_microbatches": 4,
        "num_samples": 16, "total_samples": 32, "total_weight": 32, "loss": 0.5, "num_correct": 24,
        "num_predictions": 32, "learning_rate": 1e-3, "gradient_norm": 2.0, "clip_factor": 0.5,
        "times": StepTimes(compute=0.25, exchange=0.1), "wall_s": 0.5, "elapsed_s": 9.0,
    }  # fmt: skip
    return StepEvent(**(values | changes))  # type: ignore[arg-type]


def test_each_event_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "run", tensorboard=False)
    metrics.write(event())
    metrics.write(event(step=4, derived={"bits_per_byte": 2.5}))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics.close()
    first, second = map(json.loads, lines)
    assert (first["step"], first["loss"], first["accuracy"], first["samples_per_s"]) == (3, 0.5, 0.75, 64.0)
    assert first["times"] == {"compute": 0.25, "exchange": 0.1, "commit_wait": 0.0, "update": 0.0, "data": 0.0}
    assert second["derived"] == {"bits_per_byte": 2.5}


def test_a_second_start_appends(tmp_path: Path) -> None:
    for step in range(2):
        metrics = Metrics(tmp_path, tensorboard=False)
        metrics.write(event(step=step))
        metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_once_and_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    metrics = Metrics(tmp_path, tensorboard=False)
    for step in range(3):
        metrics.write(event(step=step))
    metrics.close()
    (told,) = [entry.getMessage() for entry in caplog.records]
    assert "No space left on device" in told
    assert str(path) in told


def test_lines_follow_when_there_is_room_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = Metrics(tmp_path, tensorboard=False)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        metrics.write(event(step=0))
        metrics.write(event(step=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write(event(step=2))
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_numbers_that_json_does_not_have_are_null() -> None:
    values = record(event(loss=math.nan, gradient_norm=math.inf, num_predictions=0, wall_s=0.0))
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text)["loss"] is None
    assert json.loads(text)["gradient_norm"] is None
    assert values["accuracy"] is None
    assert values["samples_per_s"] is None
