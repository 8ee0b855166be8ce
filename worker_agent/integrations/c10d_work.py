"""A collective under way, as torch.distributed sees it.  [shell]"""

from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TorchFuture = torch.futures.Future[list[Tensor]]


class AyniWork(dist.Work):
    """Handle of one collective. Errors surface in `wait`, as their own class."""

    def __init__(self, outcome: "Future[None]", tensors: list[Tensor]) -> None:
        """Follows the thread that carries it out.

        Args:
            outcome: is done when the collective is.
            tensors: what it writes.
        """
        super().__init__()
        self._outcome, self._tensors = outcome, tensors
        self._future: TorchFuture = torch.futures.Future()
        outcome.add_done_callback(self._settle)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end; raises what went wrong."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._outcome.result(seconds if seconds > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Returns whether it is over, well or not."""
        return self._outcome.done()

    def is_success(self) -> bool:
        """Returns whether it ended well."""
        return self._outcome.done() and self._outcome.exception() is None

    def exception(self) -> BaseException | None:
        """Returns what went wrong, once it is over."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self) -> list[Tensor]:
        """Returns the tensors that were written."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Waits for the end."""
        self.wait()

    def get_future(self) -> TorchFuture:
        """Returns a future of the tensors that are written. In C++ its error is a RuntimeError with our sentence."""
        return self._future

    def _settle(self, outcome: "Future[None]") -> None:
        if error := outcome.exception():
            self._future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._future.set_result(self._tensors)
