"""When a published state is stored, and when the workers are told not to wait for it any more."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator_service.progress import Progress
from coordinator_service.signals import Signal
from coordinator_service.state_keeper import StateKeeper


class Recording(StateKeeper):
    """Stores nothing, but notes what it would have stored."""

    stored: list[int]

    async def _put(self, steps: int, timeout_s: float) -> int:
        self.stored.append(steps)
        return 0


def seat(steps: int) -> Any:
    return SimpleNamespace(published_steps=steps, member=SimpleNamespace(ready=True))


async def settled(*published: int, first_step: int = 0, settled_before: int = 0) -> tuple[list[int], int]:
    """Returns what is stored, and which step is settled, once nothing more is to be done."""
    run: Any = SimpleNamespace(
        file=SimpleNamespace(
            state=SimpleNamespace(store_every=3),
            timeouts=SimpleNamespace(store=SimpleNamespace(total_seconds=lambda: 5.0)),
        ),
        progress=Progress(first_step),
        changed=Signal(),
        epochs=SimpleNamespace(seats=dict(enumerate(seat(steps) for steps in published))),
    )
    run.progress.settled_steps = max(run.progress.settled_steps, settled_before)
    keeper = Recording(run, lambda address, rank: pytest.fail("nobody is to be dialled"))
    keeper.stored = []
    keeping = asyncio.create_task(keeper.keep())
    for _ in range(20):
        await asyncio.sleep(0)
    keeping.cancel()
    return keeper.stored, run.progress.settled_steps


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ((3, 3), ([3], 3)),
        ((3, 0), ([], 0)),
        ((2, 2), ([], 0)),
        ((0, 4), ([], 3)),
        ((3, 4), ([], 3)),
        ((3, 6), ([], 3)),
        ((6, 6), ([6], 6)),  # Step 3 was skipped by both, step 6 is held by both.
        ((3, 7), ([], 6)),
    ],
)
def test_a_state_is_stored_when_all_hold_it_and_given_up_when_one_has_gone_past_it(published, expected):
    assert asyncio.run(settled(*published)) == expected


def test_what_is_settled_or_before_the_first_step_is_left_alone():
    assert asyncio.run(settled(3, 4, settled_before=3)) == ([], 3)
    assert asyncio.run(settled(3, 3, first_step=3)) == ([], 3)
