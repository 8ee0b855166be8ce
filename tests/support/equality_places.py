"""What a worker of the equality program computes on, and how a mixed run shares its steps out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ayni.run_config import RunConfig
from tests.support.equality_cases import Case
from tests.support.equality_reference import PlainLoop
from worker_agent.backend import Backend, PortableWishes, resolve
from worker_agent.training.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one worker computes."""

    backend: str = "cpu"
    engine: str = "auto"
    """The only engine of backend wgpu to try; "auto" for all of them."""
    allow_software: bool = False
    max_microbatches: int = 0
    """Most micro-batches of one step that the worker takes; 0 for no limit."""


CPU = Place()
Crew = tuple[Place, ...]
"""The workers of one run."""


def is_mixed(crew: Sequence[Place]) -> bool:
    """Returns whether some worker computes elsewhere than on the CPU."""
    return any(place.backend != "cpu" for place in crew)


def capped(crew: Crew, case: Case) -> Crew:
    """Returns a mixed crew with a limit for each worker, so that no speed keeps a device out of a step.

    With two workers each gets four micro-batches of eleven at least, and sizes still follow speed.
    """
    limit = math.ceil(case.run["batch"]["microbatches"] / len(crew)) + 1
    return tuple(replace(place, max_microbatches=limit) for place in crew) if is_mixed(crew) else crew


def opened(place: Place) -> Backend:
    """Opens what a worker computes on, as an agent does; products of every size go to the device."""
    return resolve(place.backend, PortableWishes(engine=place.engine, allow_software=place.allow_software, min_flops=0))


def own_terms(case: Case, task: Task, config: RunConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the gradients of the first step's micro-batches as this device rounds them; also compiles its shaders.

    Call it inside the backend's context.
    """
    with torch.random.fork_rng(devices=[]):
        terms = PlainLoop(case, task, config, torch.float32).microbatches()
    return {
        f"term/{number}/{name}": gradient.detach().cpu().numpy()
        for number, term in enumerate(terms)
        for name, gradient in term.gradient.items()
    }
