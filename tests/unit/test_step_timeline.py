"""The timeline of a step: what is read from a worker's file, how much of an exchange was hidden, how it is drawn."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts import plot_run, step_timeline
from scripts.step_timeline import BucketTimes


def bucket(name: str = "block 0", **changes: float) -> BucketTimes:
    """Computes from 100 to 110; on its way from 104 to 108, sent until 106, mean from 105."""
    values = {
        "step": 3, "attempt": 0, "epoch": 1, "rank": 0, "lease": 7, "extra": False, "bucket": name, "elements": 1000,
        "began": 100.0, "computed": 110.0, "handed_over": 104.0, "begun": 104.0, "accepted": 104.5, "sent": 106.0,
        "first": 105.0, "last": 108.0, "committed": 112.0, "updating": 114.0, "updated": 120.0,
    }  # fmt: skip
    return BucketTimes(**(values | changes))  # type: ignore[arg-type]


def write(path: Path, *rows: BucketTimes, end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(asdict(row)) for row in rows) + end)
    return path


def test_what_passes_before_the_end_of_computing_is_hidden() -> None:
    rows = [bucket(), bucket("block 1", handed_over=107.0, sent=109.0, last=113.0)]
    found = step_timeline.overlap(rows)
    # 104 to 113 without a gap, of which six seconds before 110.
    assert (found.exchange, found.hidden, found.exposed, found.share) == (9.0, 6.0, 3.0, 6 / 9)


def test_time_between_two_exchanges_is_not_exchange() -> None:
    rows = [bucket(handed_over=101.0, sent=102.0, last=102.0), bucket(handed_over=110.0, sent=111.0, last=112.0)]
    found = step_timeline.overlap(rows)
    assert (found.exchange, found.hidden, found.exposed) == (3.0, 1.0, 2.0)


def test_an_extra_lease_does_not_count_as_exchange_of_the_first_one() -> None:
    extra = bucket(extra=True, handed_over=130.0, sent=140.0, last=0.0, first=0.0)
    assert step_timeline.overlap([bucket(), extra]) == step_timeline.overlap([bucket()])


def test_what_did_not_happen_has_no_span() -> None:
    assert "receive" not in bucket(first=0.0, last=0.0).spans()
    assert list(bucket().spans()) == ["compute", "wait", "send", "receive", "apply"]


def test_text_shows_when_each_bucket_did_what() -> None:
    head, columns, first, second, legend, summary = step_timeline.text([bucket(), bucket("b")], width=20).splitlines()
    assert head == "step 3, rank 0: 20000.00 ms"
    assert columns.startswith("bucket ")
    # One sign for each second: 100 to 104 computed, 104 sent, 105 both ways, then received, waits, is applied from 114.
    assert first.endswith("  ####>x<<......======")
    assert second.endswith("  ####>x<<......======")
    assert first.split()[2:6] == ["1,000", "4000.00", "6000.00", "8000.00"]
    assert "# compute" in legend
    assert "exchange 4000.00 ms, 100% of it" in summary


def test_only_the_last_of_two_runs_is_read_and_no_unfinished_line(tmp_path: Path) -> None:
    path = write(tmp_path / "timeline.jsonl", bucket(step=8), bucket(step=0), bucket("b", step=0), bucket(step=1))
    path.write_text(path.read_text() + '{"step": 2, "atte')
    steps = step_timeline.read_steps(path)
    assert {step: [row.bucket for row in rows] for step, rows in steps.items()} == {0: ["block 0", "b"], 1: ["block 0"]}


@pytest.mark.parametrize(("content", "message"), [("", "holds no step"), ('{"step": 1}\n', "line 1 is no line")])
def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "timeline.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        step_timeline.read_steps(tmp_path / "timeline.jsonl")


def test_the_command_draws_the_step_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "timeline.jsonl", bucket(step=4), bucket(step=5))
    assert plot_run.main(["--timeline", "--text", str(tmp_path)]) == 0
    assert plot_run.main(["--timeline", "--text", "--step", "4", str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == [
        "step 5, rank 0: 20000.00 ms",
        "step 4, rank 0: 20000.00 ms",
    ]
    assert plot_run.main(["--timeline", "--step", "6", str(tmp_path)]) == 1
    assert "has steps 4 to 5, and not step 6" in capsys.readouterr().err
