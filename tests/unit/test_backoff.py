"""How long a worker waits before it tries again."""

from itertools import islice

from worker_agent.backoff import delays


def test_waits_double_up_to_a_limit():
    assert list(islice(delays(lambda: 1.0), 6)) == [0.5, 1, 2, 4, 4, 4]


def test_chance_takes_at_most_half_away():
    assert list(islice(delays(lambda: 0.0), 5)) == [0.25, 0.5, 1, 2, 2]
