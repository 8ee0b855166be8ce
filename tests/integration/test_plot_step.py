"""The picture of a step is drawn from a worker's timeline."""

from pathlib import Path

from scripts import plot_run
from tests.unit.test_step_timeline import bucket, write


def test_plot_run_draws_a_step(tmp_path: Path) -> None:
    no_mean = bucket("flat", extra=True, first=0.0, last=0.0)
    write(tmp_path / "timeline.jsonl", bucket(), bucket("block 1", handed_over=107.0), no_mean)
    assert plot_run.main(["--timeline", str(tmp_path)]) == 0
    assert (tmp_path / "step-3.png").read_bytes().startswith(b"\x89PNG")
    assert plot_run.main(["--timeline", str(tmp_path / "timeline.jsonl"), "--out", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "other.png").stat().st_size > 10_000
