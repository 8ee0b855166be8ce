"""Local updates: an inner optimizer that is each worker's own, and an outer step that is everybody's.  [shell]

Legend: N elements in a bucket.

Theory of operation. The run's parameters are the *outer* ones: they are hashed, evaluated, stored and handed over. For
each lease a worker leaves them with its inner optimizer, one inner step for each micro-batch (`inner_loop`); what it
contributes is how far it went, and then it goes back. The weighted mean of those distances, which comes with the
commit, makes the outer step. To the rest of the training loop this is an update like any other, in which the mean takes
the place of a mean gradient; learning rate and clip factor of the commit are not used.

The outer parameters are float32 arrays on the host; a task's float32 parameters are copies of them.

What is ugly: with `inner_state: keep`, moments are changed by the inner steps of an attempt that is voided, too.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ayni.buckets import Bucket
from ayni.run_config import RunConfig
from worker_agent.training.fingerprint import arrays_sha256
from worker_agent.training.layout import BucketSpec
from worker_agent.training.optimizer import Nesterov, Vector
from worker_agent.training.update import Named, make_update

_INNER, _OUTER, _VELOCITY = "inner/", "outer/", "outer_velocity/"


class LocalUpdate:
    """The outer parameters and their momentum, and the inner optimizer of one replica."""

    def __init__(self, kind: str, config: RunConfig, parameters: Named, specs: Sequence[BucketSpec]) -> None:
        """Starts at the task's parameters (one copy); `kind` says where inner steps run."""
        local = config.local_update
        self.kind = kind
        self.inner = make_update(kind, config.optimizer, parameters, specs)
        self._resets = local.inner_state == "reset"
        self._parameters = list(parameters)
        self._places = {name: (spec.bucket, place) for spec in specs for name, place in spec.slices()}
        self._outer = [values.copy() for values in self.inner.values()]
        self._nesterov = Nesterov(local.outer_learning_rate, local.outer_momentum, self._outer)

    def step(self, means: Mapping[Bucket, Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Makes the outer step from the mean distance, given bucket by bucket; its rate is the run file's own."""
        places = (self._places[name] for name, _ in self._parameters)
        self._nesterov.step([means[bucket][place] for bucket, place in places])
        self.inner.put(self._outer)

    def set_out(self) -> None:
        """Begins the inner steps of a lease, from the outer parameters."""
        if self._resets:
            self.inner.reset()

    def go_back(self) -> None:
        """Gives the task the outer parameters again."""
        self.inner.put(self._outer)

    def distances(self, weight: int, out: Mapping[Bucket, Vector]) -> None:
        """Writes how far the inner steps went, times a weight, each bucket's in `out`, shape [N]."""
        for (name, _), outer, own in zip(self._parameters, self._outer, self.inner.values(), strict=True):
            bucket, place = self._places[name]
            np.subtract(outer, own, out=out[bucket][place])
        for values_N in out.values():
            np.multiply(values_N, np.float32(weight), out=values_N)

    def parameters_sha256(self) -> str:
        """Returns the hash of the outer parameters."""
        return arrays_sha256(
            (name, outer.reshape(tuple(parameter.shape)))
            for (name, parameter), outer in zip(self._parameters, self._outer, strict=True)
        )

    def state(self) -> dict[str, Tensor]:
        """Returns outer momentum, outer parameters where the task's have fewer bits, and what is kept inside."""
        names = [name for name, _ in self._parameters]
        velocity = {
            _VELOCITY + name: _copy(values)
            for name, values in zip(names, self._nesterov.velocity, strict=bool(self._nesterov.velocity))
        }
        outer = {_OUTER + name: _copy(self._outer[index]) for index, name in self._narrow()}
        inner = {} if self._resets else {_INNER + key: value for key, value in self.inner.state().items()}
        return {**velocity, **outer, **inner}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes `state()` of an equal replica, and the outer parameters from the task's."""
        for index, (_, parameter) in enumerate(self._parameters):
            self._outer[index][...] = parameter.detach().float().cpu().reshape(-1).numpy()
        for index, name in self._narrow():
            self._outer[index][...] = _stored(state, _OUTER + name).numpy()
        for index, (name, _) in enumerate(self._parameters[: len(self._nesterov.velocity)]):
            self._nesterov.velocity[index][...] = _stored(state, _VELOCITY + name).numpy()
        if self._resets:
            self.inner.reset()
        else:
            self.inner.load_state(
                {key.removeprefix(_INNER): value for key, value in state.items() if key.startswith(_INNER)}
            )
        self.inner.put(self._outer)

    def _narrow(self) -> list[tuple[int, str]]:
        """Returns the parameters that are not float32 on the task's device."""
        return [(index, name) for index, (name, p) in enumerate(self._parameters) if p.dtype != torch.float32]


def _copy(values: Vector) -> Tensor:
    return torch.from_numpy(values.copy())


def _stored(state: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in state:
        raise ValueError(f"the state has no {key!r}; it was written by a run without local updates, or with others")
    return state[key]
