"""What a worker does when its device is lost in the middle of a run.  [shell]

A process whose device is gone can't have another: CUDA's context stays broken, torchvulkan stays loaded. So the worker
leaves the run and the process ends; where "auto" has chosen the device, the same command takes its place on the CPU.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ayni.process import TemporaryFailure
from worker_agent.device_errors import loss_told_by

_log = logging.getLogger(__name__)


class DeviceLost(TemporaryFailure):
    """The device that this worker computed on is gone. Says which, how that was told, and what to do."""

    def __init__(self, event: str) -> None:
        """Takes what has happened, as half a sentence."""
        super().__init__(
            f"{event}; the other workers go on; start this worker again, and look at the driver's messages (dmesg) if "
            "it happens again"
        )
        self.event = event


@contextmanager
def noticed(backend: str, devices: Sequence[str]) -> Iterator[None]:
    """Turns an engine's error that means that the device is lost into one sentence.

    Args:
        backend: what the worker computes on; the CPU is never lost.
        devices: names of it for people.

    Raises:
        DeviceLost: an error inside says so.
    """
    try:
        yield
    except Exception as error:
        told = loss_told_by(error) if backend != "cpu" else ""
        if not told:
            raise
        event = f"the device of backend {backend} ({', '.join(devices)}) was lost in the middle of the run ({told})"
        raise DeviceLost(event) from error


def go_on_without(error: DeviceLost) -> None:
    """Becomes the same command with `--backend cpu`: the process keeps its id, and nothing else.

    Returns where it can't: a file that can be read only once, such as --token-file <(...), is empty the second time.
    """
    if any(Path(argument.rpartition("=")[2]).is_fifo() for argument in sys.orig_argv[1:]):
        return
    _log.warning("%s; --backend auto goes on without it: this worker starts again with --backend cpu", error.event)
    command = [sys.executable, *sys.orig_argv[1:], "--backend", "cpu"]
    logging.shutdown()
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # Then what was lost is still the reason of this end.
        os.execv(sys.executable, command)
