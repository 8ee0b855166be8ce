"""The moments that training tells of a step are in the order in which things happen."""

from ayni.run_config import BatchConfig, OptimizerConfig, RunConfig
from tests.support.local_session import Faults, LocalRun, LocalSession
from tests.support.toy_task import toy_task
from worker_agent.training.events import StepEvent
from worker_agent.training.loop import train

CONFIG = RunConfig(
    seed=3, num_steps=3, batch=BatchConfig(samples=8, microbatches=4), optimizer=OptimizerConfig(update="host")
)


def events_of(run: LocalRun) -> list[StepEvent]:
    events: list[StepEvent] = []

    def worker(session: LocalSession) -> None:
        train(session, toy_task(), CONFIG, on_event=events.append)

    run.run(worker)
    return events


def test_a_lease_is_computed_then_committed_then_applied() -> None:
    before = 0.0
    for event in events_of(LocalRun(CONFIG)):
        moments = event.moments
        assert moments is not None
        (lease,) = moments.leases
        assert before <= lease.began < lease.computed < moments.committed <= moments.updating < moments.updated
        before = moments.updated


def test_an_extra_lease_has_moments_of_its_own() -> None:
    faults = Faults(absent=lambda step, attempt: (1,) if step == 2 else ())
    events = events_of(LocalRun(CONFIG, shares=(2, 2), faults=faults))
    (event,) = [event for event in events if event.step == 2]
    assert event.moments is not None
    first, extra = event.moments.leases
    assert first.lease_id != extra.lease_id
    assert first.computed <= extra.began < extra.computed < event.moments.committed


def test_an_evaluation_has_none() -> None:
    events = events_of(LocalRun(CONFIG, num_evaluation_samples=12))
    assert [event.moments is None for event in events] == [False, False, False, True]
