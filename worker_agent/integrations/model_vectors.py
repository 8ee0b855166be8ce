"""Parameters and gradients of a model, into the vectors of an exchange and back.  [shell]

A parameter has its place in one bucket. A bucket leaves when all of its places are filled; what was not filled when the
step is finished counts as zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ayni.buckets import Bucket
from ayni.step_values import Commit
from worker_agent.integrations.averaging import Averaging, Weigh, constant, only_first
from worker_agent.session import Vector
from worker_agent.training.layout import BucketSpec

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Slot:
    bucket: Bucket
    where: slice


class ModelVectors:
    """Carries one model's gradients through the steps of an exchange."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], specs: Sequence[BucketSpec], averaging: Averaging
    ) -> None:
        """Gives each parameter its place."""
        slots = {name: _Slot(spec.bucket, where) for spec in specs for name, where in spec.slices()}
        self.parameters = [parameter for _, parameter in named]
        self._slots = {id(parameter): slots[name] for name, parameter in named}
        self._averaging = averaging
        self._missing: dict[Bucket, set[int]] = {}
        self._weight = 1

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and not finished."""
        return self._averaging.is_open

    def begin(self, weight: int) -> None:
        """Begins a step whose gradients are means over `weight` samples or tokens of this worker."""
        self._begin(constant(weight))
        self._weight = weight

    def add(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Takes a parameter's gradient, which may change afterwards; sends its bucket when that is whole.

        Raises:
            ValueError: the parameter is not trained in this run.
        """
        slot = self._slots.get(id(parameter))
        if slot is None:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} was not trainable, or not there, when the run was "
                "joined; join with the model as it is trained"
            )
        missing = self._missing[slot.bucket]
        if id(parameter) not in missing or gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = self._averaging.sent[slot.bucket][slot.where]
        _write(place, gradient)
        if self._weight != 1:
            place *= np.float32(self._weight)
        missing.discard(id(parameter))
        if not missing:
            self._averaging.put(slot.bucket)

    def finish(self) -> Commit:
        """Sends the rest and waits for the commit; `mean` holds from then on, until the next `begin`."""
        for parameter in self.parameters:
            slot = self._slots[id(parameter)]
            if id(parameter) in self._missing[slot.bucket]:
                self._averaging.sent[slot.bucket][slot.where] = 0.0
        return self._averaging.finish()

    def give_up(self) -> None:
        """Forgets a step that was begun, after an error."""
        self._averaging.give_up()

    def mean(self, parameter: nn.Parameter) -> Tensor:
        """Returns the mean of a parameter's gradients, float32 on the host, in the parameter's shape."""
        slot = self._slots[id(parameter)]
        return torch.from_numpy(self._averaging.means[slot.bucket][slot.where]).view(parameter.shape)

    @torch.no_grad()
    def average_gradients(self, weight: int) -> Commit:
        """Makes each `.grad` the weighted mean over all workers; a parameter without one counts as zeros.

        A parameter that has no gradient here gets one if any worker has: the mean is the same everywhere.
        """
        self.begin(weight)
        try:
            for parameter in self.parameters:
                self.add(parameter, parameter.grad)
            commit = self.finish()
        finally:
            self._averaging.give_up()
        self.write_gradients(self.parameters)
        return commit

    @torch.no_grad()
    def write_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Writes the means of some parameters to `.grad`."""
        for parameter in parameters:
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = self.mean(parameter).to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(self.mean(parameter))

    @torch.no_grad()
    def share_first(self) -> Commit:
        """Gives every worker the parameters of rank 0, to the bit, as a step of the run."""
        self._begin(only_first)
        self._weight = 1
        try:
            for parameter in self.parameters:
                self.add(parameter, parameter)
            commit = self.finish()
        finally:
            self._averaging.give_up()
        for parameter in self.parameters:
            parameter.copy_(self.mean(parameter))
        return commit

    def _begin(self, weigh: Weigh) -> None:
        self._averaging.begin(weigh)
        self._missing = {}
        for key, slot in self._slots.items():
            self._missing.setdefault(slot.bucket, set()).add(key)


def check_floats(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that do not fit into float32, in which they travel.

    Raises:
        ValueError: names the first one.
    """
    for name, parameter in named:
        if parameter.dtype not in _FLOATS:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}; gradients travel as float32, so it must be float32, bfloat16 "
                "or float16"
            )


def _write(place: Vector, values: Tensor) -> None:
    torch.from_numpy(place).copy_(values.detach().reshape(-1))
