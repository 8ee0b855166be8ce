"""What the status command says beside the table."""

from rich.console import Console

from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.status_command import render


def shown(snapshot: pb.RunSnapshot, wide: bool) -> list[str]:
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(render("toy", snapshot, wide))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_why_a_share_is_what_it_is_stands_below_the_table_where_there_is_room():
    reason = "12 of 16 micro-batches: 410 samples/s of 546"
    ant = pb.WorkerSnapshot(worker_name="ant", share_reason=reason)
    snapshot = pb.RunSnapshot(workers=[ant, pb.WorkerSnapshot(worker_name="bee")])
    assert shown(snapshot, wide=True)[-1] == f"ant: {reason}"
    assert not any(reason in line for line in shown(snapshot, wide=False))


def test_one_of_a_kind_is_not_many():
    one = pb.RunSnapshot(extra_leases=1, skipped_microbatches=1, norm_alarms=1, divergences=1)
    said = "1 lease given to others inside a step, 1 micro-batch skipped, 1 norm alarm, 1 divergence"
    assert said in shown(one, wide=True)
    two = pb.RunSnapshot(extra_leases=2, skipped_microbatches=2, divergences=2)
    assert "2 leases given to others inside a step, 2 micro-batches skipped, 2 divergences" in shown(two, wide=True)
