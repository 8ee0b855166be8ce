"""When the exchange is too much of a step, and what is advised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.step_values import StepTimes
from coordinator_service.link_plan import Choice, LinkPlan, advise

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


def changes(plan: LinkPlan, exchange: float, steps: int = 40) -> tuple[int, Choice] | None:
    """After how many steps of this length there is a choice, and which."""
    for number in range(1, steps + 1):
        plan.observe(step(exchange), 125_000_000)
        if choice := plan.choice():
            return number, choice
    return None


def test_the_wire_type_goes_down_its_list_and_stays_there():
    plan = LinkPlan("float32", 0.2)
    first = changes(plan, 4.0)
    assert first is not None
    assert (first[0], first[1].wire_type) == (19, "bfloat16")
    assert first[1].sentence == (
        "gradients travel in bfloat16, not float32: the exchange takes 80% of a step (4 s beside 1 s, 250 Mbit/s each "
        "way), more than 20% in 10 steps one after the other, and bfloat16 would make it 67%"
    )
    plan.changed("bfloat16")
    second = changes(plan, 2.0)
    assert second is not None
    assert (second[0], second[1].wire_type) == (19, "int8")
    plan.changed("int8")
    assert changes(plan, 1.5) is None


def test_the_wire_type_stays_while_the_exchange_is_short_enough():
    assert changes(LinkPlan("float32", 0.2), 0.2) is None
    plan = LinkPlan("float32", 0.2)
    assert changes(plan, 4.0) is not None
    plan.changed("bfloat16")
    assert changes(plan, 0.2) is None


def test_a_few_long_steps_change_nothing():
    plan = LinkPlan("float32", 0.2)
    for number in range(100):
        plan.observe(step(9.0 if number % 20 < 7 else 0.1), 1000)
        assert plan.choice() is None


def test_where_fewer_bytes_took_as_long_there_is_no_further_change():
    plan = LinkPlan("float32", 0.2)
    assert changes(plan, 4.0) is not None
    plan.changed("bfloat16")
    assert changes(plan, 3.9) is None


def test_after_a_restart_nothing_changes_before_it_was_measured_and_what_did_not_help_stays_known():
    plan = LinkPlan("float32", 0.2)
    found = changes(plan, 4.0)
    assert found is not None
    assert found[1].exchange_s == 4.0
    assert changes(LinkPlan("bfloat16", 0.2, before_s=found[1].exchange_s), 3.9) is None
    helped = changes(LinkPlan("bfloat16", 0.2, before_s=found[1].exchange_s), 2.0)
    assert helped is not None
    assert (helped[0], helped[1].wire_type) == (19, "int8")


@given(exchange_s=SECONDS, compute_s=SECONDS, limit=LIMITS, microbatches=st.integers(1, 512))
def test_local_updates_are_advised_more_inner_steps_and_no_other_wire_type(exchange_s, compute_s, limit, microbatches):
    found = advise(exchange_s, compute_s, 1000, "float32", limit, microbatches)
    if found is None:
        return
    longer_s = compute_s * found.inner_steps / microbatches
    assert exchange_s / (exchange_s + longer_s) <= limit * (1 + 1e-9)
    assert found.inner_steps > microbatches * (1 - 1e-9)
    assert "wire_type" not in found.sentence(limit)
    assert f"batch.microbatches of {found.inner_steps} or more" in found.sentence(limit)


def test_with_local_updates_the_wire_type_stays():
    assert changes(LinkPlan("float32", 0.2, microbatches=8), 4.0) is None
