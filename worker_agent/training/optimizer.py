"""AdamW, SGD and Nesterov's outer step on the host: the same bytes on every processor.  [core]

Legend: N elements of one array.

Theory of operation. Replicas on different machines stay equal only if every rounding of the update is fixed. IEEE 754
fixes the result of a single multiplication, addition, division and square root; it does not fix what a compiler makes
of several (fused multiply-add rounds once where two operations round twice), nor a library's exp or pow. So every
update here is a chain of single numpy operations in float32, each rounded for itself, in a fixed order, and scalars
are computed in float64 from the same four operations and rounded to float32 once. Element-wise operations do not
depend on thread count, vector width or blocking.

Each array is updated in place, in blocks that stay in the cache while the chain runs over them. Nothing is allocated
after construction.

What is ugly: torch's optimizers use fused operations and reciprocals, so results agree with torch closely, not to the
last bit.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ayni.run_config import OptimizerConfig

Vector = npt.NDArray[np.float32]

BLOCK_ELEMENTS = 32 * 1024
"""Elements that one pass of the chain works on: six arrays of 128 KiB fit the second-level cache."""


class HostOptimizer(Protocol):
    """An optimizer over a fixed list of float32 arrays."""

    num_updates: int

    def step(self, gradients: Sequence[Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Updates all arrays in place from their mean gradients."""

    def moments(self) -> dict[str, list[Vector]]:
        """Returns the state arrays by name, one for each parameter array; writing to them restores a state."""


def make_optimizer(config: OptimizerConfig, parameters: Sequence[Vector]) -> HostOptimizer:
    """Returns the optimizer that a run file names.

    Args:
        config: name and constants; the learning rate comes with each step.
        parameters: arrays that `step` updates in place, each shape [N], float32, contiguous.
    """
    for index, array in enumerate(parameters):
        if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"parameter array {index} must be flat, contiguous float32; it is {array.dtype}")
    return AdamW(config, parameters) if config.name == "adamw" else Sgd(config, parameters)


class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[Vector]) -> None:
        """Starts with zero moments."""
        self._config = config
        self._parameters = list(parameters)
        self._first = [np.zeros_like(array) for array in parameters]
        self._second = [np.zeros_like(array) for array in parameters]
        self._scratch = np.empty((2, _block_size(parameters)), np.float32)
        self.num_updates = 0

    def step(self, gradients: Sequence[Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Updates all arrays in place from their mean gradients, each shape [N], float32, which are not changed."""
        self.num_updates += 1
        scalars = _AdamWScalars(self._config, self.num_updates, learning_rate, clip_factor)
        for arrays in zip(self._parameters, gradients, self._first, self._second, strict=True):
            for block in _blocks(arrays[0].size):
                self._update_block(scalars, *(array[block] for array in arrays))

    def moments(self) -> dict[str, list[Vector]]:
        """Returns the running means of the gradient and of its square."""
        return {"first_moment": self._first, "second_moment": self._second}

    def _update_block(
        self, scalars: "_AdamWScalars", parameter: Vector, gradient: Vector, first: Vector, second: Vector
    ) -> None:
        clipped, work = self._scratch[:, : parameter.size]
        np.multiply(gradient, scalars.clip, out=clipped)
        np.multiply(first, scalars.beta1, out=first)
        np.multiply(clipped, scalars.one_minus_beta1, out=work)
        np.add(first, work, out=first)
        np.multiply(second, scalars.beta2, out=second)
        np.multiply(clipped, clipped, out=work)
        np.multiply(work, scalars.one_minus_beta2, out=work)
        np.add(second, work, out=second)
        np.sqrt(second, out=work)
        np.divide(work, scalars.sqrt_correction2, out=work)
        np.add(work, scalars.epsilon, out=work)
        np.divide(first, work, out=work)
        np.multiply(work, scalars.step_size, out=work)
        np.multiply(parameter, scalars.decay, out=parameter)
        np.subtract(parameter, work, out=parameter)


class _AdamWScalars:
    """The constants of one AdamW update, each rounded to float32 once."""

    def __init__(self, config: OptimizerConfig, num_updates: int, learning_rate: float, clip_factor: float) -> None:
        correction1 = 1.0 - power(config.beta1, num_updates)
        correction2 = 1.0 - power(config.beta2, num_updates)
        self.clip = np.float32(clip_factor)
        self.beta1 = np.float32(config.beta1)
        self.one_minus_beta1 = np.float32(1.0 - config.beta1)
        self.beta2 = np.float32(config.beta2)
        self.one_minus_beta2 = np.float32(1.0 - config.beta2)
        self.sqrt_correction2 = np.float32(math.sqrt(correction2))
        self.epsilon = np.float32(config.epsilon)
        self.step_size = np.float32(learning_rate / correction1)
        self.decay = np.float32(1.0 - learning_rate * config.weight_decay)


class Sgd:
    """Gradient descent with momentum and weight decay that is added to the gradient, as in torch."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[Vector]) -> None:
        """Starts with zero momentum; without momentum there is no state."""
        self._config = config
        self._parameters = list(parameters)
        self._velocity = [np.zeros_like(array) for array in parameters] if config.momentum else []
        self._scratch = np.empty((2, _block_size(parameters)), np.float32)
        self.num_updates = 0

    def step(self, gradients: Sequence[Vector], *, learning_rate: float, clip_factor: float) -> None:
        """Updates all arrays in place from their mean gradients, each shape [N], float32, which are not changed."""
        self.num_updates += 1
        rate, clip = np.float32(learning_rate), np.float32(clip_factor)
        for index, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            for block in _blocks(parameter.size):
                velocity = self._velocity[index][block] if self._velocity else None
                self._update_block(rate, clip, parameter[block], gradient[block], velocity)

    def moments(self) -> dict[str, list[Vector]]:
        """Returns the velocity; empty without momentum."""
        return {"velocity": self._velocity} if self._velocity else {}

    def _update_block(
        self, rate: np.float32, clip: np.float32, parameter: Vector, gradient: Vector, velocity: Vector | None
    ) -> None:
        direction, work = self._scratch[:, : parameter.size]
        np.multiply(gradient, clip, out=direction)
        if self._config.weight_decay:
            np.multiply(parameter, np.float32(self._config.weight_decay), out=work)
            np.add(direction, work, out=direction)
        if velocity is not None:
            # The velocity starts at zero, so its first value is the gradient itself, as in torch.
            np.multiply(velocity, np.float32(self._config.momentum), out=velocity)
            np.add(velocity, direction, out=velocity)
            direction = velocity
        np.multiply(direction, rate, out=work)
        np.subtract(parameter, work, out=parameter)


class Nesterov:
    """The outer step of local updates (DiLoCo, Douillard et al., 2023).

    With D how far the workers' parameters went on average, taken from where they began: velocity = momentum * velocity
    + D; parameter -= learning_rate * (D + momentum * velocity). It is torch's SGD with nesterov=True and D as gradient.
    """

    def __init__(self, learning_rate: float, momentum: float, parameters: Sequence[Vector]) -> None:
        """Starts with zero velocity; without momentum there is none."""
        self._rate, self._momentum = np.float32(learning_rate), np.float32(momentum)
        self._parameters = list(parameters)
        self._scratch = np.empty(_block_size(parameters), np.float32)
        self.velocity = [np.zeros_like(array) for array in parameters] if momentum else []

    def step(self, distances: Sequence[Vector]) -> None:
        """Updates all arrays in place from their D, each shape [N], float32, which are not changed."""
        for index, (parameter, distance) in enumerate(zip(self._parameters, distances, strict=True)):
            for block in _blocks(parameter.size):
                velocity = self.velocity[index][block] if self.velocity else None
                self._update_block(parameter[block], distance[block], velocity)

    def _update_block(self, parameter: Vector, distance: Vector, velocity: Vector | None) -> None:
        work = self._scratch[: parameter.size]
        if velocity is None:
            np.multiply(distance, self._rate, out=work)
        else:
            np.multiply(velocity, self._momentum, out=velocity)
            np.add(velocity, distance, out=velocity)
            np.multiply(velocity, self._momentum, out=work)
            np.add(work, distance, out=work)
            np.multiply(work, self._rate, out=work)
        np.subtract(parameter, work, out=parameter)


def power(base: float, exponent: int) -> float:
    """Returns base ** exponent by repeated squaring in float64: a library's pow may differ between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _block_size(parameters: Sequence[Vector]) -> int:
    return min(BLOCK_ELEMENTS, max((array.size for array in parameters), default=0))


def _blocks(num_elements: int) -> list[slice]:
    return [slice(start, start + BLOCK_ELEMENTS) for start in range(0, num_elements, BLOCK_ELEMENTS)]
