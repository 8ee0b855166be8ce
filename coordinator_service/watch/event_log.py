"""The coordinator's log as the run's event log: everything but the sentences of single steps.  [shell]"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ayni.logs import redacted
from coordinator_service.progress import Progress
from coordinator_service.watch.view import Event

EACH_STEP = {"each_step": True}
"""`extra` of log events that come with every step; the event log leaves them out."""


@contextmanager
def event_log(progress: Progress) -> Iterator[None]:
    """Keeps what the coordinator logs in the run's history."""
    handler, logger = _Keeper(progress), logging.getLogger("coordinator_service")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Keeper(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "each_step", False):
            return
        self._progress.history.happened(
            Event(
                unix_time=record.created,
                level="info" if record.levelno < logging.WARNING else record.levelname.lower(),
                sentence=redacted(record.getMessage()),
                committed_steps=self._progress.committed_steps,
            )
        )
