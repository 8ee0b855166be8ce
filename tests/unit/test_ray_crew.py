"""What the Ray driver does with agents that end, are lost, or come back; without Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker_agent.ray_agents import _Agent, _Crew


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class Call:
    """A call of an actor, which the test ends."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.result = name, arguments, ...


class Method:
    def __init__(self, name: str, calls: list[Call]) -> None:
        self.name, self.calls, self.retries = name, calls, 0

    def options(self, max_task_retries: int) -> "Method":
        self.retries = max_task_retries
        return self

    def remote(self, *arguments: Any) -> Call:
        assert self.retries == (-1 if self.name == "ready" else 0)
        self.calls.append(Call(self.name, arguments))
        return self.calls[-1]


class Ray:
    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)

    @staticmethod
    def wait(calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.result is not ...][:num_returns], []

    @staticmethod
    def get(call: Call) -> Any:
        if isinstance(call.result, Exception):
            raise call.result
        return call.result


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def crew(calls: list[Call]) -> _Crew:
    agents = [
        _Agent(rank=r, actor=SimpleNamespace(train=Method("train", calls), ready=Method("ready", calls)))
        for r in range(2)
    ]
    crew = _Crew(ray=Ray, arguments=["--threads", "1"], variables={"AYNI_COORDINATOR": "n1:1"}, agents=agents)
    for agent in agents:
        crew.call(agent)
    return crew


def end(crew: _Crew, call: Call, result: Any) -> None:
    call.result = result
    crew.look(0.0)


def test_agents_are_told_their_place(crew: _Crew, calls: list[Call]) -> None:
    assert [call.arguments for call in calls] == [
        (
            ["--threads", "1"],
            {"AYNI_COORDINATOR": "n1:1", "AYNI_RAY_RANK": r, "AYNI_RAY_WORLD_SIZE": "2", "AYNI_RAY_ATTEMPT": "0"},
        )
        for r in ("0", "1")
    ]


@pytest.mark.parametrize("result", [RayActorError("its node died"), 75])
def test_a_lost_agent_lives_again_once_its_actor_can_be_called(
    crew: _Crew, calls: list[Call], result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    end(crew, calls[1], result)
    assert [call.name for call in calls] == ["train", "train", "ready"]
    assert "attempt 1 begins where there is room" in caplog.text
    crew.look(0.0)
    assert len(calls) == 3, "nothing more happens until the actor is back"
    end(crew, calls[2], None)
    assert calls[3].name == "train"
    assert calls[3].arguments[1]["AYNI_RAY_ATTEMPT"] == "1"
    assert calls[3].arguments[1]["AYNI_RAY_RANK"] == "1"
    assert not crew.is_over


def test_an_actor_that_ray_does_not_start_again_is_given_up(
    crew: _Crew, calls: list[Call], caplog: pytest.LogCaptureFixture
) -> None:
    end(crew, calls[0], RayActorError("lost"))
    end(crew, calls[2], RayActorError("restarts are used up"))
    assert "agent 0 is not started again by Ray (RayActorError: restarts are used up)" in caplog.text
    assert (list(crew.calls), crew.returns) == ([calls[1]], {})


@pytest.mark.parametrize(
    ("result", "words"), [(1, "agent 0 ended with code 1"), (RayError("no module"), "could not live: RayError: no")]
)
def test_an_agent_that_fails_is_not_tried_again(
    crew: _Crew, calls: list[Call], result: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    end(crew, calls[0], result)
    assert words in caplog.text
    assert len(calls) == 2
    assert not crew.is_over


def test_after_the_end_of_the_run_nobody_is_started_again(crew: _Crew, calls: list[Call]) -> None:
    end(crew, calls[0], RayActorError("lost"))
    end(crew, calls[1], 0)
    assert crew.is_over
    end(crew, calls[2], None)
    assert len(calls) == 3
    assert (crew.calls, crew.returns) == ({}, {})
