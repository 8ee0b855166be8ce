"""Spans over OTLP, where a process is asked for them.  [shell]

The coordinator opens a trace for each step and says its context with every lease (`Assignment.traceparent`), so that
the workers' spans lie under it. What is sent waits in a bounded queue on a thread of its own; what does not fit, or
finds no receiver, is dropped, and training goes on.
"""

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ayni.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

OFF = "off"
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDED = "opentelemetry.exporter.otlp.proto.grpc"
_FLUSH_S = 5.0
"""Longest time for what is still to be sent at the end."""

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """Makes spans and sends them."""

    def __init__(self, provider: "TracerProvider") -> None:
        """Sends what it makes through a provider."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("ayni")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str = "", attributes: Attributes | None = None, start_ns: int = 0) -> "Span":
        """Begins a span, now or at a moment.

        Args:
            name: of the span.
            parent: trace context in W3C form; empty begins a trace.
            attributes: what it is about.
            start_ns: when, in nanoseconds since 1970; 0 for now.
        """
        from opentelemetry.context import Context

        context = self._propagator.extract({"traceparent": parent}, Context()) if parent else Context()
        return self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns or time.time_ns())

    def traceparent(self, span: "Span") -> str:
        """Returns a span's context in W3C form, for its children."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Sends what is left, within a few seconds. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


def open_tracing(traces: str, service: str, attributes: Attributes) -> Tracing | None:
    """Returns what makes spans; None where nobody asked for them.

    Args:
        traces: URL of an OTLP receiver over gRPC; empty: where the usual variables say, if they do; "off": nowhere.
        service: name of the kind of process.
        attributes: what tells it from others.

    Raises:
        SettingsError: they are asked for, and the packages are not installed, or the URL is none.
    """
    from_environment = any(os.environ.get(name) for name in _VARIABLES)
    if traces == OFF or not (traces or from_environment) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if traces and not traces.startswith(("http://", "https://")):
        raise SettingsError(f"traces is {traces!r}; it must be a URL, such as http://127.0.0.1:4317, or off")
    if not _is_installed():
        sentence = "traces need OpenTelemetry: pip install 'ayni[otel]'"
        if traces:
            raise SettingsError(sentence)
        _log.warning("%s; none are sent, although %s is set", sentence, " or ".join(_VARIABLES))
        return None
    return _open(traces, service, attributes)


def _open(traces: str, service: str, attributes: Attributes) -> Tracing:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create({**named, **attributes}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(traces or None, insecure=traces.startswith("http://") or None)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _log.info("spans of every step go to %s", traces or "where OTEL_EXPORTER_OTLP_ENDPOINT says")
    return Tracing(provider)


def _is_installed() -> bool:
    try:
        return (
            importlib.util.find_spec(_NEEDED) is not None and importlib.util.find_spec("opentelemetry.sdk") is not None
        )
    except ModuleNotFoundError:
        return False
