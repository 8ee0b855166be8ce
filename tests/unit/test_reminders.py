"""What a wait that goes on says of itself, at growing intervals."""

import asyncio
from typing import Any

import pytest

from worker_agent import reminders


def test_a_long_wait_is_spoken_of_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(reminders, "FIRST_S", 0.02)
    monkeypatch.setattr(reminders, "LONGEST_S", 0.04)
    reasons = iter(["waiting for ant", "", "waiting for bee"])
    ended = asyncio.Event()

    def reason() -> str:
        found = next(reasons, "")
        if found == "waiting for bee":
            ended.set()
        return found

    async def wait() -> list[float]:
        loop = asyncio.get_running_loop()
        asked, call_later = list[float](), loop.call_later

        def noted(delay: float, *rest: Any) -> asyncio.TimerHandle:
            asked.append(delay)
            return call_later(delay, *rest)

        monkeypatch.setattr(loop, "call_later", noted)
        with reminders.reminders(reason):
            await ended.wait()
        return asked

    assert asyncio.run(wait()) == [0.02, 0.04, 0.04, 0.04]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "waiting for ant",
        "waiting for bee",
    ]


def test_a_short_wait_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(reminders, "FIRST_S", 0.02)

    async def wait() -> None:
        with reminders.reminders(lambda: "waiting for ant"):
            pass
        await asyncio.sleep(0.05)

    asyncio.run(wait())
    assert not caplog.records
