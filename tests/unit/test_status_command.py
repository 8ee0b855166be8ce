"""What the status command says beside the table."""

from rich.console import Console

from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2
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


def test_who_reduces_is_said_where_the_coordinator_does_not():
    ant, bee = (pb.WorkerSnapshot(worker_name=name, owns_slices=True) for name in ("ant", "bee"))
    snapshot = pb.RunSnapshot(workers=[ant, bee], topology="sharded", generation=3 << 32 | 5, regroups=2)
    lines = shown(snapshot, wide=True)
    assert "topology sharded, exchange group 3.5, slices owned by ant, bee" in lines
    assert "2 exchange groups formed inside a step" in lines
    assert not any("topology" in line for line in shown(pb.RunSnapshot(topology="star"), wide=True))


def test_how_gradients_travel_is_said_where_it_is_known():
    snapshot = pb.RunSnapshot(samples_per_second=3.0, wire_type=tensor_pb2.DTYPE_BFLOAT16)
    assert "3.0 samples/s, gradients in bfloat16, in 0 B" in shown(snapshot, wide=True)[1]
    assert "gradients" not in " ".join(shown(pb.RunSnapshot(), wide=True))


def test_work_that_an_accelerator_gives_back_to_the_cpu_is_shown():
    ant = pb.WorkerSnapshot(worker_name="ant", activity="computing", cpu_fallbacks=3)
    bee = pb.WorkerSnapshot(worker_name="bee", activity="computing")
    lines = shown(pb.RunSnapshot(workers=[ant, bee]), wide=False)
    assert any("ant" in line and "computing (3 fallbacks to CPU)" in line for line in lines), lines
    assert not any("bee" in line and "fallback" in line for line in lines)


def with_history() -> pb.RunSnapshot:
    snapshot = pb.RunSnapshot(state=pb.RUN_STATE_RUNNING, committed_steps=100, num_steps=200, stored_steps=90)
    for step in range(100):
        loss, kind = 4.0 - step / 50, pb.STEP_KIND_TRAIN
        snapshot.points.add(step=step, unix_time=1e9 + 2 * step, kind=kind, loss=loss, samples_per_second=8.0)
    snapshot.events.add(unix_time=1e9, level="info", sentence="worker ant joined as 0")
    snapshot.events.add(unix_time=1e9, level="warning", sentence="worker bee left: its lease ended")
    ant = snapshot.workers.add(worker_name="ant", activity="computing")
    ant.times.compute.FromMilliseconds(500)
    ant.times.exchange.FromMilliseconds(250)
    ant.times.update.FromMilliseconds(250)
    snapshot.workers.add(worker_name="[b]bee", following=True, completed_steps=97)
    return snapshot


def test_curves_bars_tiers_and_events_are_shown_with_the_history():
    lines = shown(with_history(), wide=True)
    [curve] = [line for line in lines if line.lstrip().startswith("loss 4 ")]
    assert curve.endswith(" 2.02  (steps 0 to 99)")
    assert curve.index("\u2588") < curve.index("\u2585") < curve.index("\u2581")
    assert any("about 00:03:20 left" in line for line in lines)
    [ant] = [line for line in lines if line.startswith(" ant ")]
    assert "cccccccc" in ant
    assert "ssss" in ant
    assert "aaaa" in ant
    assert "device: 1 of 2 workers has the run's parameters" in lines
    assert "objects: the newest stored state is that behind step 90" in lines
    assert lines[-1].endswith("worker bee left: its lease ended")


def test_names_are_text_and_not_markup():
    lines = shown(with_history(), wide=True)
    assert any("[b]bee" in line for line in lines)
    assert any("following" in line for line in lines)


def test_a_plain_terminal_gets_plain_curves():
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(render("toy", with_history(), plain=True))
    curve = next(line for line in capture.get().splitlines() if line.lstrip().startswith("loss 4 "))
    assert curve.isascii()
    assert "@" in curve
