"""What a run through deaths comes to, from the lines of its workers."""

from tests.bench.churn_measure import Death, Line, outcome_of


def lines(times: list[float], samples: int = 24, sha256: str = "a") -> list[Line]:
    steps = [Line(time=time, step=step, samples=samples) for step, time in enumerate(times)]
    return [*steps, Line(time=times[-1], sha256=sha256)]


def test_rate_counts_samples_from_the_first_step_to_the_last():
    outcome = outcome_of({"ant": lines([0, 1, 2, 3]), "bee": lines([0.1, 1.1, 2.1, 3.1])}, [])
    assert (outcome.samples_per_second, outcome.median_step_s) == (24, 1)
    assert (outcome.distinct_replicas, outcome.steps_lost, outcome.stalls_s) == (1, 0, ())


def test_stall_is_that_of_whoever_lived_on_and_waited_longest():
    ant, bee = lines([0, 1, 2, 6, 7, 8]), lines([0, 1, 2, 5, 6.5, 8])
    outcome = outcome_of({"ant": ant, "bee": bee, "cow": lines([0, 1, 2])}, [Death(name="cow", unix_time=2.5)])
    assert outcome.stalls_s == (2.5,)


def test_steps_thrown_away_and_replicas_that_parted():
    ant = lines([0, 1, 2])
    ant.insert(1, Line(time=0.5, step=1, committed=False))
    outcome = outcome_of({"ant": ant, "bee": lines([0, 1, 2], sha256="b")}, [])
    assert (outcome.steps_lost, outcome.distinct_replicas) == (1, 2)


def test_who_comes_back_when_the_others_have_ended_is_another_run():
    outcome = outcome_of({"ant": lines([0, 1, 2]), "bee": lines([50, 51, 52], sha256="b")}, [])
    assert outcome.distinct_replicas == 1
