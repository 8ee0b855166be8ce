"""Writes down when each bucket of a step was computed, sent, received and applied.  [shell]

One JSON line for each bucket and lease of a committed step. Moments are those of `time.perf_counter`, which all
processes of a host share on Linux, so that the lines of its workers can be laid beside one another. What is kept in
memory and on disk is bounded: the file ends at a size, and what an attempt left that was given up is dropped.
"""

import json
import logging
import threading
from collections import deque
from dataclasses import asdict
from pathlib import Path

from worker_agent.session import BucketExchange
from worker_agent.training.events import StepEvent, StepMoments

log = logging.getLogger(__name__)

_MOST_WAITING = 1 << 14
_MOST_BYTES = 256 << 20


class Timeline:
    """The timeline of one worker."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Appends to `folder`/timeline.jsonl, until that is about as long as `most_bytes`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "timeline.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._room = most_bytes - self._file.tell()
        self._lock = threading.Lock()
        self._waiting: deque[BucketExchange] = deque(maxlen=_MOST_WAITING)
        self._is_over = False

    def exchanged(self, exchange: BucketExchange) -> None:
        """Takes an exchange that is over, from any thread; it is written with its step."""
        with self._lock:
            self._waiting.append(exchange)

    def write(self, event: StepEvent) -> None:
        """Writes the lines of a training step. Training does not end for them: a warning says why they end."""
        exchanges = self._take()
        if self._is_over or event.moments is None:
            return
        rows = _rows(event, event.moments, exchanges)
        text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        if len(text) > self._room:
            self._end("it is long enough")
            return
        try:
            written = self._file.write(text)
        except OSError as error:
            self._end(str(error))
        else:
            self._room -= written
            if written < len(text):
                self._end("the disk is full")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _take(self) -> list[BucketExchange]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def _end(self, why: str) -> None:
        self._is_over = True
        log.warning("the timeline in %s ends here: %s; training goes on", self._path, why)


def _rows(event: StepEvent, moments: StepMoments, exchanges: list[BucketExchange]) -> list[dict[str, object]]:
    """Returns one row for each exchange under a lease of the step, in the order in which they were handed over."""
    leases = {lease.lease_id: lease for lease in moments.leases}
    return [
        {
            "step": event.step,
            "attempt": event.attempt,
            "epoch": event.epoch,
            "rank": event.rank,
            "lease": each.assignment.lease_id,
            "extra": each.assignment.extra,
            "bucket": str(each.bucket),
            "elements": each.num_elements,
            "began": leases[each.assignment.lease_id].began,
            "computed": leases[each.assignment.lease_id].computed,
            "handed_over": each.handed_over,
            **asdict(each.times),
            "committed": moments.committed,
            "updating": moments.updating,
            "updated": moments.updated,
        }
        for each in sorted(exchanges, key=lambda exchange: exchange.handed_over)
        if each.assignment.lease_id in leases
    ]
