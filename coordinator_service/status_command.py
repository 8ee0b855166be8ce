"""python -m coordinator_service status: the run as a table, once or live.  [shell]"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ayni.channels import UNREACHED, open_sync_channel
from ayni.endpoints import ClientTls
from ayni.messages import dtype_name, duration
from ayni.process import DONE, FAILED, TEMPORARY, exit_code_of, load_token
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from coordinator_service.exchange_groups import EPOCH_BITS

_TIMEOUT = 10.0
_WIDE = 130
"""Columns of a terminal that holds the whole table."""


def show(arguments: Sequence[str]) -> int:
    """Prints the status of a run; returns the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: _show(given))


def _show(given: argparse.Namespace) -> int:
    token = load_token(given.token_file)
    tls = ClientTls(
        ca=given.tls_ca,
        system_roots=given.tls_system_roots,
        certificate=given.tls_certificate,
        key=given.tls_key,
        server_name=given.tls_server_name,
    )
    with open_sync_channel(given.coordinator, token, tls, given.insecure) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            run = stub.GetRun(pb.GetRunRequest(), timeout=_TIMEOUT)
            return _watch(stub, run) if given.watch else _print(run.run_id, run.snapshot)
        except grpc.RpcError as error:
            return _explain(given.coordinator, error)


def _print(run_id: str, snapshot: pb.RunSnapshot) -> int:
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(render(run_id, snapshot, console.width >= _WIDE))
    return DONE


def _watch(stub: coordinator_pb2_grpc.CoordinatorServiceStub, run: pb.GetRunResponse) -> int:
    request = pb.WatchRunRequest(min_interval=duration(0.5))
    console, state = Console(), run.snapshot.state
    try:
        with Live(
            render(run.run_id, run.snapshot, console.width >= _WIDE), console=console, auto_refresh=False
        ) as live:
            for response in stub.WatchRun(request):
                state = response.snapshot.state
                live.update(render(run.run_id, response.snapshot, console.width >= _WIDE), refresh=True)
    except KeyboardInterrupt:
        return DONE
    return FAILED if state == pb.RUN_STATE_HALTED else DONE


def render(run_id: str, snapshot: pb.RunSnapshot, wide: bool = True) -> Group:
    """Returns the run as text, a table of its workers and why their shares are what they are.

    A narrow one leaves out what is least asked for.
    """
    reasons = [f"{w.worker_name}: {w.share_reason}" for w in snapshot.workers if wide and w.share_reason]
    return Group(
        *(Text(line) for line in _head(run_id, snapshot)), _table(snapshot, wide), *(Text(line) for line in reasons)
    )


def _head(run_id: str, snapshot: pb.RunSnapshot) -> list[str]:
    state = pb.RunState.Name(snapshot.state).removeprefix("RUN_STATE_").lower()
    steps = f"{snapshot.committed_steps}" + (f" of {snapshot.num_steps}" if snapshot.num_steps else "")
    lines = [
        f"run {run_id}: {state}, {steps} steps committed, epoch {snapshot.epoch}, attempt {snapshot.attempt}, "
        f"{_time(snapshot.elapsed.ToTimedelta())} since start"
    ]
    values = [
        f"loss {snapshot.loss:.4f}" if snapshot.HasField("loss") else "",
        f"held-out loss {snapshot.evaluation_loss:.4f}" if snapshot.HasField("evaluation_loss") else "",
        f"held-out accuracy {snapshot.evaluation_accuracy:.4f}" if snapshot.HasField("evaluation_accuracy") else "",
        f"{snapshot.samples_per_second:.1f} samples/s",
        f"gradients in {dtype_name(snapshot.wire_type)}" if snapshot.wire_type else "",
        f"in {_size(snapshot.received_bytes)}, out {_size(snapshot.sent_bytes)}",
        f"reducer {_size(snapshot.reducer_bytes)} (peak {_size(snapshot.reducer_peak_bytes)})",
    ]
    lines.append(", ".join(value for value in values if value))
    counted = [
        (snapshot.extra_leases, "lease", "given to others inside a step"),
        (snapshot.skipped_microbatches, "micro-batch", "skipped"),
        (snapshot.norm_alarms, "norm alarm", ""),
        (snapshot.divergences, "divergence", ""),
        (snapshot.regroups, "exchange group", "formed inside a step"),
    ]
    if snapshot.generation:
        lines.append(_exchange(snapshot))
    if parts := [_counted(*one) for one in counted if one[0]]:
        lines.append(", ".join(parts))
    if snapshot.waiting.reason:
        lines.append(snapshot.waiting.reason)
    return lines


def _exchange(snapshot: pb.RunSnapshot) -> str:
    """Returns who reduces, where the coordinator does not."""
    owners = [worker.worker_name for worker in snapshot.workers if worker.owns_slices]
    number = f"{snapshot.generation >> EPOCH_BITS}.{snapshot.generation % (1 << EPOCH_BITS)}"
    slices = f", slices owned by {', '.join(owners)}" if owners else ""
    return f"topology {snapshot.topology}, exchange group {number}{slices}"


def _counted(count: int, what: str, rest: str) -> str:
    plural = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{plural} {rest}".rstrip()


def _table(snapshot: pb.RunSnapshot, wide: bool) -> Table:
    table = Table()
    columns: list[tuple[str, Callable[[pb.WorkerSnapshot], str]]] = [
        ("id", lambda w: str(w.worker_id)),
        ("worker", lambda w: w.worker_name),
        ("backend", lambda w: ", ".join((w.backend, *(w.device_names if wide else ())))),
        ("share", lambda w: f"{w.share:.0%}"),
        ("samples/s", lambda w: f"{w.samples_per_second:.1f}"),
        ("doing", _doing),
        ("compute", lambda w: _seconds(w.times.compute.ToTimedelta())),
        ("exchange", lambda w: _seconds(w.times.exchange.ToTimedelta())),
        ("wait", lambda w: _seconds(w.times.commit_wait.ToTimedelta())),
        ("by", lambda w: "shm" if w.shares_memory else "grpc"),
        ("in", lambda w: _size(w.received_bytes)),
        ("out", lambda w: _size(w.sent_bytes)),
        ("seen", lambda w: f"{w.last_seen.ToTimedelta().total_seconds():.1f} s ago"),
    ]
    if not wide:
        hidden = ("id", "wait", "by", "in", "out", "seen")
        columns = [column for column in columns if column[0] not in hidden]
    for title, _ in columns:
        table.add_column(title, overflow="fold")
    for worker in snapshot.workers:
        table.add_row(*(cell(worker) for _, cell in columns))
    return table


def _doing(worker: pb.WorkerSnapshot) -> str:
    doing = "committed" if worker.committed else worker.activity
    notes = ["follows"] if worker.following else []
    notes += [f"{worker.strikes} not finite"] if worker.strikes else []
    notes += [_counted(worker.cpu_fallbacks, "fallback", "to CPU")] if worker.cpu_fallbacks else []
    return f"{doing} ({', '.join(notes)})" if notes else doing


def _explain(coordinator: str, error: grpc.RpcError) -> int:
    refusal = error_from(error)
    if refusal:
        print(f"the coordinator at {coordinator} refused: {refusal.message}", file=sys.stderr)
        return FAILED
    details = getattr(error, "details", str)()
    print(f"can't reach a coordinator at {coordinator}: {details}; {UNREACHED}", file=sys.stderr)
    return TEMPORARY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator_service status", description="Shows a run as a table, once or live."
    )
    parser.add_argument("coordinator", metavar="HOST:PORT", help="address of the coordinator")
    parser.add_argument("--token-file", type=Path, help="file with the join token (environment: AYNI_TOKEN)")
    parser.add_argument("--watch", action="store_true", help="keep the table live until the run ends")
    parser.add_argument("--tls-ca", type=Path, help="PEM file with the authority of the coordinator's certificate")
    parser.add_argument("--tls-system-roots", action="store_true", help="trust the usual public authorities")
    parser.add_argument("--tls-server-name", default="", help="name to expect in the coordinator's certificate")
    parser.add_argument("--tls-certificate", type=Path, help="PEM file with a client certificate, for mTLS")
    parser.add_argument("--tls-key", type=Path, help="PEM file with the private key of the client certificate")
    parser.add_argument("--insecure", action="store_true", help="dial other hosts without TLS")
    return parser


def _time(elapsed: timedelta) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(elapsed.total_seconds()))


def _seconds(value: timedelta) -> str:
    return f"{value.total_seconds():.2f} s"


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
