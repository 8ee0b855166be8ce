"""How gradients get to host memory: at once, or beside backward on a stream of their own.  [shell]

Theory of operation. A copy out of a GPU into ordinary memory makes whoever asks for it wait until the GPU has computed
what is copied, so backward's kernels would be queued one parameter at a time. On a stream of its own a copy into
page-locked memory waits by itself, while more kernels are queued and computed. When all copies of a bucket are asked
for, an event marks the place behind them; what is to be done with the bucket is done, in order, once its event has
passed: at the latest when backward has ended. From page-locked memory gradients are copied on to where they belong,
because that is memory shared with other processes, which a driver would have to lock for each of them.

A gradient is not freed before its copy was made, although nobody holds it any more (`record_stream`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker_agent.training.partial_sums import Vector


class HostCopies(Protocol):
    """Copies gradients to host memory."""

    def copy(self, gradient: Tensor, out: Vector) -> None:
        """Has a gradient copied as float32, shape [elements of the parameter]."""

    def then(self, act: Callable[[], None]) -> None:
        """Acts once all copies that were asked for so far are there; in order, and before `finish` returns."""

    def finish(self) -> None:
        """Waits for all copies, and acts on them."""

    def drop(self) -> None:
        """Waits for copies that nobody is interested in any more, and does not act on them."""


class AtOnce:
    """Copies while the caller waits: there is nothing to be gained where gradients are in host memory already."""

    def copy(self, gradient: Tensor, out: Vector) -> None:
        """See `HostCopies`."""
        torch.from_numpy(out).view(gradient.shape).copy_(gradient)

    def then(self, act: Callable[[], None]) -> None:
        """See `HostCopies`."""
        act()

    def finish(self) -> None:
        """See `HostCopies`."""

    def drop(self) -> None:
        """See `HostCopies`."""


class Event(Protocol):
    """A place on a stream."""

    def query(self) -> bool:
        """Returns whether the stream has passed it."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Stream(Protocol):
    """Where copies are queued, beside what computes."""

    def new_buffer(self, num_elements: int) -> Tensor:
        """Returns host memory that is copied to without anybody waiting, float32, flat."""

    def copy(self, gradient: Tensor, buffer: Tensor) -> None:
        """Queues a copy behind what computes the gradient."""

    def mark(self) -> Event:
        """Returns the place behind everything that was queued so far."""


class CudaStream:
    """A side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Makes a stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def new_buffer(self, num_elements: int) -> Tensor:
        """See `Stream`."""
        return torch.empty(num_elements, dtype=torch.float32, pin_memory=True)

    def copy(self, gradient: Tensor, buffer: Tensor) -> None:
        """See `Stream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Converted there: a copy between element types waits.
            buffer.view(gradient.shape).copy_(gradient.to(torch.float32), non_blocking=True)
        gradient.record_stream(self._stream)

    def mark(self) -> Event:
        """See `Stream`."""
        event: Event = self._stream.record_event()
        return event


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that something is done with once all are there."""

    event: Event
    copies: list[tuple[Tensor, Vector]]
    act: Callable[[], None]


class BesideBackward:
    """Copies on a stream, through buffers that are used again."""

    def __init__(self, stream: Stream) -> None:
        """Uses a stream."""
        self._stream = stream
        self._asked: list[tuple[Tensor, Vector]] = []
        self._waiting: deque[_Batch] = deque()
        self._free: dict[int, list[Tensor]] = {}

    def copy(self, gradient: Tensor, out: Vector) -> None:
        """See `HostCopies`."""
        free = self._free.get(out.size)
        buffer = free.pop() if free else self._stream.new_buffer(out.size)
        self._stream.copy(gradient, buffer)
        self._asked.append((buffer, out))

    def then(self, act: Callable[[], None]) -> None:
        """See `HostCopies`."""
        self._waiting.append(_Batch(self._stream.mark(), self._asked, act))
        self._asked = []
        while self._waiting and self._waiting[0].event.query():
            self._settle(self._waiting.popleft())

    def finish(self) -> None:
        """See `HostCopies`."""
        self.then(_nothing)
        while self._waiting:
            self._waiting[0].event.synchronize()
            self._settle(self._waiting.popleft())

    def drop(self) -> None:
        """See `HostCopies`."""
        if not self._asked and not self._waiting:
            return
        self._stream.mark().synchronize()
        given_up = [*self._asked, *(pair for batch in self._waiting for pair in batch.copies)]
        self._asked = []
        self._waiting.clear()
        for buffer, _ in given_up:
            self._give_back(buffer)

    def _settle(self, batch: _Batch) -> None:
        for buffer, out in batch.copies:
            np.copyto(out, buffer.numpy())
            self._give_back(buffer)
        batch.act()

    def _give_back(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)


def copies_from(device: torch.device) -> HostCopies:
    """Returns how gradients of a device get to host memory."""
    return BesideBackward(CudaStream(device)) if device.type == "cuda" else AtOnce()


def _nothing() -> None:
    """What is done with copies that nothing is to be done with yet."""
