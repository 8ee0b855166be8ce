"""The picture of a run: what is read from a metrics file."""

import json
from pathlib import Path

import pytest

from scripts import plot_run

TIMES = {"data": 0.01, "compute": 0.3, "exchange": 0.1, "commit_wait": 0.05, "update": 0.02}


def line(step: int, kind: str = "train", **values: object) -> str:
    record = {"kind": kind, "step": step, "loss": 2.0 / (step + 1), "accuracy": None, "samples_per_s": 60.0}
    return json.dumps({**record, "world_size": 2, "times": TIMES, **values})


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end if lines else "")
    return path


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", line(0), line(1), '{"kind": "tra', end="")
    assert [record["step"] for record in plot_run.read_metrics(path)] == [0, 1]


def test_only_the_last_of_two_runs_in_one_file_is_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", line(0), line(1), line(2, "evaluate"), line(0), line(1))
    assert [record["step"] for record in plot_run.read_metrics(path)] == [0, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "holds no training step yet"), ([line(1, "evaluate")], "holds no training"), (["{"], "line 1 is not JSON")],
)
def test_a_file_without_steps_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_run.read_metrics(write(tmp_path / "metrics.jsonl", *lines))


def test_the_command_names_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_run.main([str(tmp_path)]) == 1
    assert "plot_run: there is no metrics file at" in capsys.readouterr().err


def test_smoothing_is_the_mean_of_the_steps_before() -> None:
    values = [float(value) for value in range(15)]
    smoothed = plot_run._smoothed(values)
    assert smoothed[:3] == [0.0, 0.5, 1.0]
    assert smoothed[14] == sum(range(5, 15)) / 10
