"""python -m coordinator_service status: the run as text or JSON, once or live.  [shell]"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from rich.console import Console, Group
from rich.live import Live

from ayni.channels import UNREACHED, open_sync_channel
from ayni.endpoints import ClientTls
from ayni.messages import duration
from ayni.process import DONE, FAILED, TEMPORARY, exit_code_of, load_token
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from coordinator_service.watch.terminal import draw
from coordinator_service.watch.view import plain
from coordinator_service.watch.view_messages import view_of

_TIMEOUT = 10.0
_Update = Callable[[pb.RunSnapshot], None]
_WIDE = 130
"""Columns of a terminal that holds the whole table."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the caller, as `print` does."""
        raise BrokenPipeError


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
            run = stub.GetRun(pb.GetRunRequest(with_history=True), timeout=_TIMEOUT)
            if given.watch:
                return _watch(stub, run, given.json)
            return _print(run.run_id, run.snapshot, given.json)
        except grpc.RpcError as error:
            return _explain(given.coordinator, error)
        except BrokenPipeError:  # Whoever read has seen enough; what is still buffered must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE


def _print(run_id: str, snapshot: pb.RunSnapshot, as_json: bool) -> int:
    if as_json:
        print(json.dumps(plain(view_of(run_id, snapshot))), flush=True)
        return DONE
    console = _Console(width=None if sys.stdout.isatty() else 140)
    console.print(render(run_id, snapshot, console.width >= _WIDE, plain=not _is_rich(console)))
    return DONE


def _watch(stub: coordinator_pb2_grpc.CoordinatorServiceStub, run: pb.GetRunResponse, as_json: bool) -> int:
    request = pb.WatchRunRequest(min_interval=duration(0.5), with_history=True)
    state = run.snapshot.state
    show = _print_lines(run.run_id) if as_json else _show_live(run)
    try:
        with show as update:
            for response in stub.WatchRun(request):
                state = response.snapshot.state
                update(response.snapshot)
    except KeyboardInterrupt:
        return DONE
    return FAILED if state == pb.RUN_STATE_HALTED else DONE


@contextmanager
def _print_lines(run_id: str) -> Iterator[_Update]:
    """Yields what prints a snapshot as a line of JSON."""
    yield lambda snapshot: print(json.dumps(plain(view_of(run_id, snapshot))), flush=True)


@contextmanager
def _show_live(run: pb.GetRunResponse) -> Iterator[_Update]:
    """Yields what shows a snapshot in place of the one before."""
    console = _Console(width=None if sys.stdout.isatty() else 140)
    wide, is_plain = console.width >= _WIDE, not _is_rich(console)
    if not console.is_terminal:  # Nothing can be shown in place of what is there.
        yield lambda snapshot: console.print(render(run.run_id, snapshot, wide, plain=is_plain))
        return
    first = render(run.run_id, run.snapshot, wide, plain=is_plain)
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda snapshot: live.update(render(run.run_id, snapshot, wide, plain=is_plain), refresh=True)


def _is_rich(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def render(run_id: str, snapshot: pb.RunSnapshot, wide: bool = True, *, plain: bool = False) -> Group:
    """Returns a snapshot as text; see `draw`."""
    return draw(view_of(run_id, snapshot), wide, plain=plain)


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
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch a line for each change")
    parser.add_argument("--tls-ca", type=Path, help="PEM file with the authority of the coordinator's certificate")
    parser.add_argument("--tls-system-roots", action="store_true", help="trust the usual public authorities")
    parser.add_argument("--tls-server-name", default="", help="name to expect in the coordinator's certificate")
    parser.add_argument("--tls-certificate", type=Path, help="PEM file with a client certificate, for mTLS")
    parser.add_argument("--tls-key", type=Path, help="PEM file with the private key of the client certificate")
    parser.add_argument("--insecure", action="store_true", help="dial other hosts without TLS")
    return parser
