"""The view as metrics for Prometheus.  [shell]"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from coordinator_service.watch.curve import Durations
from coordinator_service.watch.view import PHASES, RunView, WorkerView

_STATES = ("waiting", "running", "paused", "finished", "halted")
_Value = float | int | None

_GAUGES: Sequence[tuple[str, str, Callable[[RunView], _Value]]] = (
    ("ayni_epoch", "Number of the membership in force.", lambda v: v.epoch),
    ("ayni_step", "Step in progress.", lambda v: v.step),
    ("ayni_attempt", "Attempt of the step in progress, from 0.", lambda v: v.attempt),
    ("ayni_committed_steps", "Training steps that are committed.", lambda v: v.committed_steps),
    ("ayni_target_steps", "Training steps that the run will make; 0 for no end.", lambda v: v.num_steps),
    ("ayni_stored_steps", "Steps behind the newest stored train state; 0 for none.", lambda v: v.stored_steps),
    ("ayni_training_loss", "Loss of the last committed training step.", lambda v: v.loss),
    ("ayni_evaluation_loss", "Loss of the last evaluation.", lambda v: v.evaluation_loss),
    ("ayni_evaluation_accuracy_ratio", "Accuracy of the last evaluation.", lambda v: v.evaluation_accuracy),
    ("ayni_samples_per_second", "Training samples per second, smoothed.", lambda v: v.samples_per_second),
    ("ayni_reducer_bytes", "Bytes that the reducer holds.", lambda v: v.reducer_bytes),
    ("ayni_reducer_peak_bytes", "Most bytes that the reducer has held.", lambda v: v.reducer_peak_bytes),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[RunView], int]]] = (
    ("ayni_gradient_received_bytes", "Gradient bytes that came from workers.", lambda v: v.received_bytes),
    ("ayni_gradient_sent_bytes", "Gradient bytes that went to workers.", lambda v: v.sent_bytes),
    ("ayni_voided_attempts", "Attempts at steps that were given up.", lambda v: v.voided_attempts),
    ("ayni_extra_leases", "Leases given to others inside a step.", lambda v: v.extra_leases),
    ("ayni_skipped_microbatches", "Micro-batches left out as not finite.", lambda v: v.skipped_microbatches),
    ("ayni_norm_alarms", "Contributions of an unusual norm.", lambda v: v.norm_alarms),
    ("ayni_divergences", "Times that a worker's parameters were found to differ.", lambda v: v.divergences),
    ("ayni_regroups", "Exchange groups formed inside a step.", lambda v: v.regroups),
)
_WORKER_GAUGES: Sequence[tuple[str, str, Callable[[WorkerView], float]]] = (
    ("ayni_worker_share_ratio", "Share of the step in progress.", lambda w: w.share),
    ("ayni_worker_samples_per_second", "Samples per second while computing.", lambda w: w.samples_per_second),
    ("ayni_worker_lag_steps", "Updates that the worker's parameters lack.", lambda w: w.lag_steps),
    ("ayni_worker_silence_seconds", "Time since its last sign of life.", lambda w: w.silence),
    ("ayni_worker_published_steps", "Steps behind the state in its host memory.", lambda w: w.published_steps),
    ("ayni_worker_memory_bytes", "Memory that it computes in; 0 for not said.", lambda w: w.memory_bytes),
)
_WORKER_COUNTERS: Sequence[tuple[str, str, Callable[[WorkerView], int]]] = (
    ("ayni_worker_gradient_received_bytes", "Gradient bytes that came from it.", lambda w: w.received_bytes),
    ("ayni_worker_gradient_sent_bytes", "Gradient bytes that went to it.", lambda w: w.sent_bytes),
    ("ayni_worker_strikes", "Its micro-batches that were not finite.", lambda w: w.strikes),
    ("ayni_worker_cpu_fallbacks", "Operations that its GPU gave back to its CPU.", lambda w: w.cpu_fallbacks),
)


class Exposition(Collector):
    """All metrics of one run, in a registry of their own."""

    def __init__(self, view: Callable[[], RunView], durations: Durations) -> None:
        """Shows what `view` returns at each scrape."""
        self._view = view
        self._durations = durations
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics in the best form that a scraper accepts, and the form's content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # What it accepts can't be read.
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        """Says nothing in advance: nobody else registers here."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of now."""
        view = self._view()
        yield from _of_run(view)
        yield HistogramMetricFamily(
            "ayni_step_duration_seconds",
            "How long committed training steps took.",
            buckets=self._durations.cumulative(),
            sum_value=self._durations.total,
        )
        yield from _of_workers(view.workers)


def _of_run(view: RunView) -> Iterator[Metric]:
    info = {"run_id": view.run_id, "wire_type": view.wire_type, "topology": view.topology or "star"}
    yield InfoMetricFamily("ayni_run", "What the run is.", value=info)
    states = GaugeMetricFamily("ayni_run_state", "1 for the state that the run is in.", labels=["state"])
    for state in _STATES:
        states.add_metric([state], float(view.state == state))
    yield states
    for name, text, read in _GAUGES:
        if (value := read(view)) is not None:
            yield GaugeMetricFamily(name, text, value=value)
    for name, text, count in _COUNTERS:
        yield CounterMetricFamily(name, text, value=count(view))


def _of_workers(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    members = GaugeMetricFamily("ayni_workers", "Members of the run, by what they do.", labels=["state"])
    for state, count in sorted(Counter(worker.state for worker in workers).items()):
        members.add_metric([state], count)
    yield members
    info = InfoMetricFamily("ayni_worker", "What a worker is.", labels=["worker"])
    phases = GaugeMetricFamily(
        "ayni_worker_phase_seconds", "Where its last step's time went.", labels=["worker", "phase"]
    )
    for worker in workers:
        about = {"backend": worker.backend, "devices": ", ".join(worker.devices), "route": worker.route}
        info.add_metric([worker.name], about)
        for phase in PHASES:
            phases.add_metric([worker.name, phase], getattr(worker.last, phase))
    yield info
    yield phases
    for name, text, read in _WORKER_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["worker"])
        for worker in workers:
            gauge.add_metric([worker.name], read(worker))
        yield gauge
    for name, text, count_of in _WORKER_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["worker"])
        for worker in workers:
            counter.add_metric([worker.name], count_of(worker))
        yield counter
