"""Agents as actors of a Ray cluster, and the process that drives them.  [shell]

An agent that is lost, alone or with its node, costs the run nothing: the others take over, Ray starts the actor again
where there is room, and this process calls it again as the next attempt. Ray's own retries of calls stay off, since
they would hide how often that was. With a run file the coordinator runs beside this process, and ends with it.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ayni.endpoints import Address, parse_address
from ayni.process import DONE, FAILED, TEMPORARY, WRONG_USE, Stopped, load_token, on_signal
from ayni.settings import SettingsError
from worker_agent.beside import BesideConfig, with_coordinator
from worker_agent.launchers import ray_environment
from worker_agent.ray_config import RayConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Between two looks at agents that have not ended; a signal is seen at once."""
_FAREWELL_SECONDS = 60.0
"""How long agents may go on after the first one has seen the end of the run."""


class AgentActor:
    """One agent, in a process of Ray's."""

    def train(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Lives an agent's life, as python -m worker_agent does; returns its exit code."""
        from worker_agent.__main__ import main

        os.environ.update(variables)
        try:
            return main(list(arguments))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else WRONG_USE

    def ready(self) -> None:
        """Does nothing; where this can be called the actor is there."""


@dataclass(kw_only=True, slots=True)
class _Agent:
    rank: int
    actor: Any
    attempt: int = 0


@dataclass(kw_only=True, slots=True)
class _Crew:
    """The agents of one run, and the calls that are under way."""

    ray: Any
    arguments: Sequence[str]
    variables: Mapping[str, str]
    agents: list[_Agent]
    calls: dict[Any, _Agent] = field(default_factory=dict)
    """Lives under way."""
    returns: dict[Any, _Agent] = field(default_factory=dict)
    """Lost agents whose actors Ray is starting again: their next life begins when they can be called."""
    is_over: bool = False

    def call(self, agent: _Agent) -> None:
        variables = {**self.variables, **ray_environment(agent.rank, len(self.agents), agent.attempt)}
        self.calls[agent.actor.train.remote(list(self.arguments), variables)] = agent

    def look(self, seconds: float) -> None:
        """Waits for a change, for so long at most, and decides what comes of it."""
        ended, _ = self.ray.wait([*self.calls, *self.returns], num_returns=1, timeout=seconds)
        for call in ended:
            is_return = call in self.returns
            agent = self.returns.pop(call) if is_return else self.calls.pop(call)
            try:
                result = self.ray.get(call)
            except self.ray.exceptions.RayActorError as error:
                self._lost(agent, _first_line(error), is_return)
            except self.ray.exceptions.RayError as error:
                _log.error("agent %d could not live: %s", agent.rank, _first_line(error))
            else:
                if not is_return:
                    self._ended(agent, result)
                elif not self.is_over:
                    self.call(agent)

    def _ended(self, agent: _Agent, code: int) -> None:
        if code == DONE:
            self.is_over = True
        elif code == TEMPORARY:
            self._again(agent, f"ended for now (code {TEMPORARY}; its log says why)")
        else:
            _log.error("agent %d ended with code %d; its log says why", agent.rank, code)

    def _lost(self, agent: _Agent, why: str, was_lost_before: bool) -> None:
        if was_lost_before:
            _log.error("agent %d is not started again by Ray (%s)", agent.rank, why)
        else:
            self._again(agent, f"was lost ({why})")

    def _again(self, agent: _Agent, why: str) -> None:
        if self.is_over:
            return
        agent.attempt += 1
        _log.warning("agent %d %s; attempt %d begins where there is room", agent.rank, why, agent.attempt)
        # Unlike a life this may be called again by Ray: it waits until the actor is back.
        self.returns[agent.actor.ready.options(max_task_retries=-1).remote()] = agent


def run_agents(config: RayConfig, arguments: Sequence[str]) -> int:
    """Runs agents until the run is over; returns the process's exit code.

    Args:
        config: what to start, and where.
        arguments: flags of the agents.

    Raises:
        ChildProcessError: the coordinator did not start.
        ConnectionError: there is no Ray cluster at the address.
        SettingsError: Ray is not installed, or there is no token.
    """
    ray, token = _load_ray(), load_token(config.token_file)
    with on_signal(_stop), _connected(ray, config.address):
        coordinator = config.coordinator or str(Address(host=ray.util.get_node_ip_address(), port=config.port))
        variables = {"AYNI_COORDINATOR": coordinator, "AYNI_TOKEN": token, "AYNI_TOKEN_FILE": ""}
        if config.insecure:
            variables["AYNI_INSECURE"] = "true"
        if not config.run:
            return _drive(ray, config, arguments, variables)
        beside = BesideConfig(
            run=config.run,
            coordinator=coordinator,
            world_size=config.agents,
            token_file=config.token_file,
            insecure=config.insecure,
            log_format=config.log_format,
            log_level=config.log_level,
        )
        return with_coordinator(beside, lambda: _drive(ray, config, arguments, variables))


def _drive(ray: Any, config: RayConfig, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    options = {"num_cpus": config.cpus, "num_gpus": config.gpus, "max_restarts": config.restarts, "max_task_retries": 0}
    actor_class = ray.remote(**options)(AgentActor)
    agents = [_Agent(rank=rank, actor=actor_class.remote()) for rank in range(config.agents)]
    crew = _Crew(ray=ray, arguments=arguments, variables=variables, agents=agents)
    _log.info("%d agents, each with %g processors and %g GPUs", config.agents, config.cpus, config.gpus)
    try:
        for agent in agents:
            crew.call(agent)
        while (crew.calls or crew.returns) and not crew.is_over:
            crew.look(_LOOK_SECONDS)
        for _ in range(int(_FAREWELL_SECONDS / _LOOK_SECONDS)):
            if crew.calls:
                crew.look(_LOOK_SECONDS)
    finally:
        for agent in agents:
            ray.kill(agent.actor)
    return DONE if crew.is_over else FAILED


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _load_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise SettingsError(f"Ray is not installed here ({error}): pip install 'ayni[ray]'") from None
    return ray


@contextmanager
def _connected(ray: Any, address: str) -> "Iterator[None]":
    extra = {}
    if ":" in address and (given := parse_address(address)).is_loopback:
        # Ray would look for this process's node under the address of a network interface.
        extra["_node_ip_address"] = given.host
    ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING, **extra)
    try:
        yield
    finally:
        ray.shutdown()


def _stop(name: str) -> None:
    raise Stopped(name)
