"""Traces of real processes, at a real OTLP receiver, and their logs as machines read them."""

import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from ayni import tracing
from ayni.settings import SettingsError
from tests.support.agents import TOY, agent
from tests.support.coordinator import coordinator

RUN: dict[str, Any] = {
    "run_id": "traced",
    "num_steps": 4,
    "min_workers": 2,
    "task": {"name": TOY, "options": {}},
    "batch": {"samples": 8, "microbatches": 4, "evaluation_samples": 4},
    "evaluation": {"every_steps": 0},
    "timeouts": {"shutdown": "10s"},
}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans, each with the service that it came from."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._lock = threading.Lock()

    def Export(self, request, context):  # noqa: N802 - named after the call
        with self._lock:
            for resource in request.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                is_worker = names["service.name"] == "ayni-worker"
                service = names["service.instance.id"] if is_worker else names["service.name"]
                self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@contextlib.contextmanager
def receiver() -> Iterator[tuple[Receiver, str]]:
    service, server = Receiver(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield service, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)


def attribute(span: Any, name: str) -> int:
    return next(one.value.int_value for one in span.attributes if one.key == name)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Receiver, str, str]:
    """What a receiver got of a run, and the logs of its coordinator and of a worker."""
    folder = tmp_path_factory.mktemp("traced")
    with receiver() as (received, url), coordinator(folder, RUN, "--traces", url, "--log-format", "json") as server:
        with (
            agent(server.address, "ant", folder, "--traces", url, "--log-format", "json") as ant,
            agent(server.address, "bee", folder, OTEL_EXPORTER_OTLP_ENDPOINT=url) as bee,
        ):
            assert (ant.end(100), bee.end(100)) == (0, 0), f"{ant.read_log()}\n{bee.read_log()}"
        assert server.process.wait(30) == 0, server.read_log()
        return received, server.read_log(), ant.read_log()


def test_every_step_is_one_trace_over_all_processes(traced: tuple[Receiver, str, str]) -> None:
    traces: dict[bytes, list[tuple[str, Any]]] = defaultdict(list)
    for service, span in traced[0].spans:
        traces[span.trace_id].append((service, span))
    roots = [root(spans) for spans in traces.values()]
    assert sorted((span.name, attribute(span, "ayni.step")) for span in roots) == [
        ("evaluate step", 4),
        *(("train step", step) for step in range(4)),
    ]
    for spans in traces.values():
        if root(spans).name == "train step":
            check_trace(spans)


def test_events_of_both_services_name_run_epoch_step_and_worker(traced: tuple[Receiver, str, str]) -> None:
    told, own = ([json.loads(line) for line in log.splitlines()] for log in traced[1:])
    assert {event["run"] for event in told if event["logger"].startswith("coordinator_service")} == {"traced"}
    joined = [event["worker"] for event in told if " joined as " in event["message"]]
    assert sorted(joined) == ["ant", "bee"]
    commits = [event for event in told if event["message"].startswith("step ") and " committed: " in event["message"]]
    assert [(event["epoch"], event["step"]) for event in commits] == [(1, step) for step in range(4)]
    assert {event["worker"] for event in own if event["logger"].startswith("worker_agent")} == {"ant"}
    steps = [event for event in own if event["logger"] == "worker_agent.progress" and "step" in event]
    where = [(event["run"], event["epoch"], event["step"]) for event in steps[:4]]
    assert where == [("traced", 1, step) for step in range(4)]


def root(spans: list[tuple[str, Any]]) -> Any:
    [found] = [span for _, span in spans if not span.parent_span_id]
    return found


def check_trace(spans: list[tuple[str, Any]]) -> None:
    step, named = root(spans), defaultdict(list)
    for service, span in spans:
        named[service, span.name].append(span)
    [attempt] = named["ayni-coordinator", "attempt"]
    assert attempt.parent_span_id == step.span_id
    for worker in ("ant", "bee"):
        [whole] = named[worker, "worker"]
        assert whole.parent_span_id == attempt.span_id
        parts = [named[worker, name] for name in ("compute", "send", "wait", "apply")]
        assert [len(part) for part in parts] == [1, 1, 1, 1]
        assert all(span.parent_span_id == whole.span_id for [span] in parts)
        assert all(whole.start_time_unix_nano <= span.start_time_unix_nano for [span] in parts)
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano for [span] in parts)
        assert attempt.start_time_unix_nano - 10**7 < whole.start_time_unix_nano < attempt.end_time_unix_nano + 10**7


def test_a_receiver_that_is_away_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    away = tracing.open_tracing("http://127.0.0.1:9", "x", {})
    assert away
    began = time.monotonic()
    for _ in range(10_000):  # More than the queue holds.
        away.begin("step", attributes={"ayni.step": 1}).end()
    away.close()
    assert time.monotonic() - began < 20


def test_nothing_is_loaded_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    loaded = set(sys.modules)
    assert tracing.open_tracing("", "x", {}) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert tracing.open_tracing("off", "x", {}) is None
    assert not [name for name in set(sys.modules) - loaded if name.startswith("opentelemetry")]


def test_what_is_missing_or_wrong_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match=r"traces is '127\.0\.0\.1:4317'; it must be a URL"):
        tracing.open_tracing("127.0.0.1:4317", "x", {})
    monkeypatch.setattr(tracing, "_is_installed", lambda: False)
    with pytest.raises(SettingsError, match=r"pip install 'ayni\[otel\]'"):
        tracing.open_tracing("http://127.0.0.1:4317", "x", {})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert tracing.open_tracing("", "x", {}) is None
    assert "none are sent" in caplog.text
