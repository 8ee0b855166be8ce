"""When the exchange is too much of a step, and what is advised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.step_values import StepTimes
from coordinator_service.link_plan import LinkPlan, advise

SECONDS = st.floats(1e-4, 1e4)
LIMITS = st.floats(0.01, 0.9)


@pytest.mark.parametrize(
    ("bytes_each_way", "inner_steps"),
    [(4 * 124_000_000 * 2 * 4, 603), (124_000_000 * 2 * 4, 151)],
)
def test_the_reference_case_of_124_million_parameters_at_one_gigabit(bytes_each_way, inner_steps):
    # A star of 4 workers: the coordinator's link carries everything in and, after that, out.
    exchange_s = bytes_each_way * 8 / 1e9
    found = advise(exchange_s, 1.0, bytes_each_way, "float32", 0.05)
    assert found is not None
    assert found.inner_steps == pytest.approx(inner_steps, abs=1)


@given(exchange_s=SECONDS, compute_s=SECONDS, limit=LIMITS)
def test_with_the_advised_inner_steps_the_share_is_kept_and_with_one_fewer_it_is_not(exchange_s, compute_s, limit):
    found = advise(exchange_s, compute_s, 1000, "float32", limit)
    if found is None:
        assert exchange_s / (exchange_s + compute_s) <= limit
        return
    assert found.share > limit

    def share(steps: int) -> float:
        return exchange_s / (exchange_s + steps * compute_s)

    assert share(found.inner_steps) <= limit * (1 + 1e-9)
    assert found.inner_steps == 1 or share(found.inner_steps - 1) > limit * (1 - 1e-9)


def test_a_wire_type_of_half_the_bytes_takes_half_the_time():
    found = advise(3.0, 1.0, 1000, "float32", 0.2)
    assert found is not None
    assert found.wire_shares == {"bfloat16": pytest.approx(0.6), "int8": pytest.approx(0.5308, abs=1e-4)}
    narrow = advise(3.0, 1.0, 1000, "int8", 0.2)
    assert narrow is not None
    assert narrow.wire_shares == {}


def step(exchange: float, compute: float = 1.0) -> list[StepTimes]:
    """Two workers, of which one had to wait for the other."""
    return [StepTimes(compute=compute, exchange=exchange), StepTimes(compute=compute, exchange=exchange + 5)]


def test_advice_comes_after_ten_steps_once_and_again_when_it_gets_worse():
    plan = LinkPlan("float32", 0.2)
    said = [plan.observe(step(1.0), 125_000_000) for _ in range(30)]
    assert [bool(sentence) for sentence in said] == [False] * 9 + [True] + [False] * 20
    assert said[9] == (
        "the exchange takes 50% of a step (1 s beside 1 s, 1,000 Mbit/s each way); wire_type bfloat16 would make it "
        "33%, wire_type int8 would make it 27%, local updates with 4 or more inner steps keep it below 20%"
    )
    worse = [plan.observe(step(8.0), 125_000_000) for _ in range(12)]
    told = [sentence for sentence in worse if sentence]
    assert 1 <= len(told) <= 2, "as the median climbs, by doublings"
    assert "with 32 or more" in told[-1]


@pytest.mark.parametrize("times", [[], [StepTimes()], [StepTimes(compute=1.0, exchange=0.1)]])
def test_nothing_is_said_while_all_is_well_or_nothing_is_known(times):
    plan = LinkPlan("float32", 0.2)
    assert not any(plan.observe(times, 1000) for _ in range(30))


def test_nothing_is_said_where_nobody_asked():
    plan = LinkPlan("float32", 0.0)
    assert not any(plan.observe(step(9.0), 1000) for _ in range(30))
