"""What a worker adds to the trace of each step: compute, send, wait, apply.  [shell]"""

import threading
import time
from collections import deque

from ayni.tracing import Tracing
from worker_agent.session import BucketExchange
from worker_agent.training.events import StepEvent, StepMoments

_MOST_WAITING = 1 << 12


class StepSpans:
    """The spans of one worker."""

    def __init__(self, tracing: Tracing) -> None:
        """Makes spans after each step, from the moments that were taken down anyway."""
        self._tracing = tracing
        self._lock = threading.Lock()
        self._exchanges: deque[BucketExchange] = deque(maxlen=_MOST_WAITING)

    def exchanged(self, exchange: BucketExchange) -> None:
        """Takes an exchange that is over, from any thread."""
        with self._lock:
            self._exchanges.append(exchange)

    def write(self, event: StepEvent) -> None:
        """Makes the spans of a training step; none where the coordinator does not trace it."""
        with self._lock:
            exchanges = list(self._exchanges)
            self._exchanges.clear()
        if event.moments and event.moments.traceparent:
            self._add(event, event.moments, exchanges)

    def close(self) -> None:
        """Sends what was not sent. Blocks for some seconds at most."""
        self._tracing.close()

    def _add(self, event: StepEvent, moments: StepMoments, exchanges: list[BucketExchange]) -> None:
        to_unix_ns = time.time_ns() - time.perf_counter_ns()
        leases = {lease.lease_id for lease in moments.leases}
        times = [each.times for each in exchanges if each.assignment.lease_id in leases and each.times.begun]
        computed = max(lease.computed for lease in moments.leases)
        sent = max([computed, *(one.sent for one in times)])
        spans = [("compute", lease.began, lease.computed) for lease in moments.leases]
        if times:
            spans.append(("send", min(one.begun for one in times), sent))
        spans += [("wait", sent, moments.updating), ("apply", moments.updating, moments.updated)]
        about = {"ayni.step": event.step, "ayni.attempt": event.attempt, "ayni.epoch": event.epoch}
        about |= {"ayni.rank": event.rank, "ayni.microbatches": event.num_microbatches, "ayni.buckets": len(times)}
        began = min(lease.began for lease in moments.leases)
        whole = self._tracing.begin("worker", moments.traceparent, about, to_unix_ns + round(began * 1e9))
        parent = self._tracing.traceparent(whole)
        for name, start, stop in spans:
            span = self._tracing.begin(name, parent, start_ns=to_unix_ns + round(start * 1e9))
            span.end(to_unix_ns + round(max(start, stop) * 1e9))
        whole.end(to_unix_ns + round(moments.updated * 1e9))
