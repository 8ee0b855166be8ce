"""Applies a committed mean gradient: on the host, or on the device.  [shell]

`HostUpdate` gives the same bytes on every processor (`worker_agent.training.optimizer`) and is what mixed devices use;
`DeviceUpdate` is torch's own optimizer on the task's device. Both take the learning rate and the clip factor from the
commit, so that all workers use the same doubles. Every trainable parameter is one flat array to either.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ayni.buckets import Bucket
from ayni.run_config import OptimizerConfig
from worker_agent.training.fingerprint import arrays_sha256, parameters_sha256
from worker_agent.training.layout import BucketSpec
from worker_agent.training.optimizer import make_optimizer

Vector = npt.NDArray[np.float32]
Named = Sequence[tuple[str, nn.Parameter]]


class Update(Protocol):
    """Holds the optimizer's state of one replica."""

    @property
    def kind(self) -> str:
        """Name for `make_update`: "host" or "device"."""

    def step(self, means: Mapping[Bucket, Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Applies one mean gradient, given bucket by bucket."""

    def parameters_sha256(self) -> str:
        """Returns the hash of the parameters that the next step starts from."""

    def state(self) -> dict[str, Tensor]:
        """Returns copies of the optimizer's arrays and of its update count, by name, on the CPU."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes `state()` of an equal replica, and the parameters as they are now."""


class InnerUpdate(Update, Protocol):
    """An update whose parameters can be taken elsewhere and back, for local updates."""

    def values(self) -> list[Vector]:
        """Returns each parameter's values, flat; they may be the parameters' own memory."""

    def put(self, values: Sequence[Vector]) -> None:
        """Gives the parameters other values (one copy)."""

    def reset(self) -> None:
        """Forgets all moments, as if no update had been made."""


def make_update(kind: str, config: OptimizerConfig, parameters: Named, specs: Sequence[BucketSpec]) -> InnerUpdate:
    """Returns the update that an assignment names: "host" or "device"."""
    if kind not in ("host", "device"):
        raise ValueError(f'update {kind!r} is neither "host" nor "device"')
    return (HostUpdate if kind == "host" else DeviceUpdate)(config, parameters, specs)


def warm_up() -> None:
    """Loads what torch loads when its first optimizer is made, which takes seconds, before the first step."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


class HostUpdate:
    """Float32 copies of the parameters on the CPU are what is trained; the device gets their values.

    A float32 parameter on the CPU is its own copy: it is updated in place.
    """

    kind = "host"

    def __init__(self, config: OptimizerConfig, parameters: Named, specs: Sequence[BucketSpec]) -> None:
        """Copies the parameters (once, and not those that are float32 on the CPU)."""
        self._parameters = list(parameters)
        self._slices = _slices(specs)
        self._masters = [_master(parameter) for _, parameter in parameters]
        self._optimizer = make_optimizer(config, self._masters)

    def step(self, means: Mapping[Bucket, Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Applies one mean gradient and writes the values to the device (one copy there)."""
        gradients = [means[bucket][place] for bucket, place in (self._slices[name] for name, _ in self._parameters)]
        self._optimizer.step(gradients, learning_rate=learning_rate, clip_factor=clip_factor)
        self._write_back()

    def parameters_sha256(self) -> str:
        """Returns the hash of the float32 copies."""
        return arrays_sha256(
            (name, master.reshape(tuple(parameter.shape)))
            for (name, parameter), master in zip(self._parameters, self._masters, strict=True)
        )

    def state(self) -> dict[str, Tensor]:
        """Returns moments, update count, and the copies of parameters that are not float32."""
        names = [name for name, _ in self._parameters]
        arrays = {
            f"{moment}/{name}": torch.from_numpy(values.copy())
            for moment, values_of in self._optimizer.moments().items()
            for name, values in zip(names, values_of, strict=True)
        }
        masters = {f"master/{name}": torch.from_numpy(master.copy()) for name, master in self._separate()}
        return {**arrays, **masters, "num_updates": torch.tensor(self._optimizer.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of the same optimizer over the same parameters."""
        names = [name for name, _ in self._parameters]
        for moment, values_of in self._optimizer.moments().items():
            for name, values in zip(names, values_of, strict=True):
                values[...] = _stored(state, f"{moment}/{name}").numpy()
        for (_, parameter), master in zip(self._parameters, self._masters, strict=True):
            master[...] = parameter.detach().float().cpu().reshape(-1).numpy()
        for name, master in self._separate():
            master[...] = _stored(state, f"master/{name}").numpy()
        self._optimizer.num_updates = int(_stored(state, "num_updates"))
        self._write_back()

    def values(self) -> list[Vector]:
        """Returns the float32 copies themselves."""
        return self._masters

    def put(self, values: Sequence[Vector]) -> None:
        """Writes the float32 copies, and the device from them."""
        for master, value in zip(self._masters, values, strict=True):
            master[...] = value
        self._write_back()

    def reset(self) -> None:
        """Sets all moments to zero."""
        for arrays in self._optimizer.moments().values():
            for array in arrays:
                array[...] = 0.0
        self._optimizer.num_updates = 0

    def _separate(self) -> Iterable[tuple[str, Vector]]:
        """Yields the copies that hold more than their parameters; the same ones on every kind of device."""
        for (name, parameter), master in zip(self._parameters, self._masters, strict=True):
            if parameter.dtype != torch.float32:
                yield name, master

    def _write_back(self) -> None:
        with torch.no_grad():
            for (_, parameter), master in zip(self._parameters, self._masters, strict=True):
                if not _is_own_master(parameter):
                    parameter.copy_(torch.from_numpy(master).view(parameter.shape))


class DeviceUpdate:
    """Torch's AdamW or SGD, on the parameters where they are."""

    kind = "device"

    def __init__(self, config: OptimizerConfig, parameters: Named, specs: Sequence[BucketSpec]) -> None:
        """Makes the optimizer; its learning rate is set at each step."""
        self._parameters = list(parameters)
        self._slices = _slices(specs)
        self._num_updates = 0
        self._optimizer = _torch_optimizer(config, [parameter for _, parameter in parameters])

    def step(self, means: Mapping[Bucket, Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Copies one mean gradient to the device and steps (one copy)."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for name, parameter in self._parameters:
            bucket, place = self._slices[name]
            gradient = torch.from_numpy(means[bucket][place]).view(parameter.shape)
            parameter.grad = gradient.to(parameter.device, parameter.dtype) * clip_factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_updates += 1

    def parameters_sha256(self) -> str:
        """Returns the hash of the parameters as float32."""
        return parameters_sha256(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """Returns torch's state tensors under "torch/<key>/<parameter>", and the update count."""
        arrays = {
            f"torch/{key}/{name}": value.detach().cpu().clone().contiguous()
            for name, parameter in self._parameters
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return {**arrays, "num_updates": torch.tensor(self._num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of the same optimizer over the same parameters."""
        for name, parameter in self._parameters:
            suffix = f"/{name}"
            self._optimizer.state[parameter] = {
                key.removeprefix("torch/").removesuffix(suffix): value.clone().to(_state_device(key, parameter))
                for key, value in state.items()
                if key.startswith("torch/") and key.removeprefix("torch/").partition("/")[2] == name
            }
        self._num_updates = int(_stored(state, "num_updates"))

    def values(self) -> list[Vector]:
        """Returns copies of the parameters as float32."""
        return [parameter.detach().float().cpu().reshape(-1).numpy().copy() for _, parameter in self._parameters]

    def put(self, values: Sequence[Vector]) -> None:
        """Writes the parameters."""
        with torch.no_grad():
            for (_, parameter), value in zip(self._parameters, values, strict=True):
                parameter.copy_(torch.from_numpy(value).view(parameter.shape))

    def reset(self) -> None:
        """Drops torch's state tensors."""
        self._optimizer.state.clear()
        self._num_updates = 0


def _slices(specs: Sequence[BucketSpec]) -> dict[str, tuple[Bucket, slice]]:
    return {name: (spec.bucket, place) for spec in specs for name, place in spec.slices()}


def _is_own_master(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _master(parameter: nn.Parameter) -> Vector:
    """Returns the parameter's memory if it is float32 on the CPU, else a copy; shape [elements]."""
    values = parameter.detach()
    return (values if _is_own_master(parameter) else values.float().cpu().contiguous()).reshape(-1).numpy()


def _stored(state: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in state:
        raise ValueError(f"the optimizer state has no {key!r}; it was written by another optimizer or kind of update")
    return state[key]


def _state_device(key: str, parameter: Tensor) -> torch.device:
    # Torch keeps its step count on the CPU unless the optimizer is capturable.
    return torch.device("cpu") if key.startswith("torch/step/") else parameter.device


def _torch_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
