"""The timeline that a worker writes: a line for each bucket of a step, bounded."""

import json
from pathlib import Path

import pytest

from ayni.buckets import FLAT, Bucket
from tests.unit.test_metrics import event
from worker_agent.session import BucketExchange, ExchangeTimes, ShardAssignment
from worker_agent.training.events import LeaseMoments, StepMoments
from worker_agent.training.metrics import record
from worker_agent.training.timeline import Timeline

MOMENTS = StepMoments(
    leases=(LeaseMoments(lease_id=4, began=1.0, computed=2.0), LeaseMoments(lease_id=5, began=2.5, computed=2.75)),
    committed=3.0,
    updating=3.5,
    updated=4.0,
)


def exchange(lease_id: int, bucket: Bucket = FLAT, handed_over: float = 1.5, attempt: int = 0) -> BucketExchange:
    assignment = ShardAssignment(
        step=3, attempt=attempt, epoch=1, kind="train", lease_id=lease_id, microbatch_start=0, microbatch_stop=1,
        num_microbatches=2, position=0, num_samples=8, shard_start=0, shard_end=4, rank=0, world_size=2, update="host",
        extra=lease_id == 5,
    )  # fmt: skip
    times = ExchangeTimes(begun=1.6, accepted=1.7, sent=1.8, first=1.75, last=1.9)
    return BucketExchange(assignment=assignment, bucket=bucket, num_elements=10, handed_over=handed_over, times=times)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]


def test_each_bucket_and_lease_of_a_step_is_one_line_in_the_order_of_handing_over(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "run")
    timeline.exchanged(exchange(5, handed_over=2.7))
    timeline.exchanged(exchange(4, Bucket("block", 1), handed_over=1.5))
    timeline.exchanged(exchange(4, Bucket("non_block", 0), handed_over=1.25))
    timeline.write(event(moments=MOMENTS))
    timeline.close()
    written = lines(tmp_path / "run")
    assert [(line["bucket"], line["extra"], line["computed"]) for line in written] == [
        ("lm_head", False, 2.0),
        ("block 1", False, 2.0),
        ("flat", True, 2.75),
    ]
    assert written[1] == {
        "step": 3, "attempt": 0, "epoch": 1, "rank": 0, "lease": 4, "extra": False, "bucket": "block 1", "elements": 10,
        "began": 1.0, "computed": 2.0, "handed_over": 1.5, "begun": 1.6, "accepted": 1.7, "sent": 1.8, "first": 1.75,
        "last": 1.9, "committed": 3.0, "updating": 3.5, "updated": 4.0,
    }  # fmt: skip


def test_what_a_voided_attempt_sent_is_not_in_the_step_that_follows(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.exchanged(exchange(3))
    timeline.exchanged(exchange(4, attempt=1))
    timeline.write(event(moments=MOMENTS))
    timeline.write(event(step=4, moments=MOMENTS))
    timeline.close()
    assert [line["lease"] for line in lines(tmp_path)] == [4]


def test_an_evaluation_has_no_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.write(event(kind="evaluate"))
    timeline.close()
    assert lines(tmp_path) == []


def test_the_file_ends_at_its_size_between_two_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path, most_bytes=1000)
    for _ in range(10):
        timeline.exchanged(exchange(4))
        timeline.write(event(moments=MOMENTS))
    timeline.close()
    assert 0 < len(lines(tmp_path)) < 10
    assert (tmp_path / "timeline.jsonl").stat().st_size <= 1000
    (told,) = [entry.getMessage() for entry in caplog.records]
    assert "ends here: it is long enough" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_once_and_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "timeline.jsonl").symlink_to("/dev/full")
    timeline = Timeline(tmp_path)
    for _ in range(3):
        timeline.exchanged(exchange(4))
        timeline.write(event(moments=MOMENTS))
    timeline.close()
    (told,) = [entry.getMessage() for entry in caplog.records]
    assert "No space left on device" in told


def test_metrics_leave_moments_out() -> None:
    assert "moments" not in record(event(moments=MOMENTS))
