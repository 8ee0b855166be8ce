"""python -m coordinator_service ledger: a run's commits as a table or as JSON, and whether they add up.  [shell]"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ayni.process import DONE, FAILED, exit_code_of
from ayni.settings import SettingsError
from coordinator_service import ledger
from coordinator_service.run_places import add_places, open_place, read_span
from coordinator_service.store import RunStore
from coordinator_service.store_records import CommitRecord

_SHORT_HASH = 12
_NARROWEST = 180
"""Columns of a table that goes into a file."""


def show(arguments: Sequence[str]) -> int:
    """Prints the ledger of a run, or checks it; returns the exit code."""
    given = _parser().parse_args(arguments)
    return exit_code_of(lambda: _show(given))


def _show(given: argparse.Namespace) -> int:
    steps = read_span(given.steps)
    with contextlib.closing(open_place(given)) as store:
        if given.check:
            return _check(store)
        records = store.superseded() if given.superseded else store.commits()
    chosen = [record for record in records if record.step in steps]
    if records and not chosen and not given.superseded:
        raise SettingsError(f"no step in {given.steps} is there: {_committed(records)}")
    if given.json:
        for record in chosen:
            print(json.dumps(asdict(record)))
    else:
        console = Console(width=None if sys.stdout.isatty() else _NARROWEST)
        console.print(table(chosen))
    return DONE


def _committed(records: Sequence[CommitRecord]) -> str:
    return f"the run has committed steps {records[0].step}:{max(record.step for record in records) + 1}"


def _check(store: RunStore) -> int:
    checked = ledger.check(store.commits(), ledger.data_from(store.facts()))
    wrong = bool(checked.problems or checked.samples_missing or checked.samples_duplicated)
    print(json.dumps({"ok": not wrong, **asdict(checked), "superseded": len(store.superseded())}))
    return FAILED if wrong else DONE


def table(records: Sequence[CommitRecord]) -> Table:
    """Returns commits as a table, a line for each."""
    columns: list[tuple[str, Callable[[CommitRecord], str]]] = [
        ("step", lambda r: str(r.step) if r.kind == "train" else f"{r.step} evaluated"),
        ("epoch", lambda r: str(r.epoch)),
        ("attempt", lambda r: str(r.attempt)),
        ("samples", lambda r: f"{r.position} to {r.position + r.num_samples - 1}"),
        ("weight", lambda r: str(r.total_weight)),
        ("loss", lambda r: "unknown" if r.loss is None else f"{r.loss:.6g}"),
        ("norm", lambda r: f"{r.gradient_norm:.4g}" if r.kind == "train" else ""),
        ("gradient", lambda r: r.gradient_hash[:_SHORT_HASH]),
        ("parameters before", lambda r: r.parameters_sha256[:_SHORT_HASH]),
        ("micro-batches", _contributions),
    ]
    if len({r.wire_type for r in records}) > 1:
        columns.insert(-1, ("wire", lambda r: r.wire_type))
    shown = Table()
    for title, _ in columns:
        shown.add_column(title, overflow="fold")
    for record in records:
        shown.add_row(*(Text(cell(record)) for _, cell in columns))
    return shown


def _contributions(record: CommitRecord) -> str:
    parts = [f"{c.worker_name} {c.start} to {c.stop - 1}" for c in record.contributions if c.stop > c.start]
    if record.skipped:
        parts.append(f"skipped {', '.join(map(str, record.skipped))}")
    if record.left_behind:
        parts.append(f"without {', '.join(record.left_behind)}")
    return "; ".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator_service ledger",
        description="Shows what each step of a run was made of, and checks that nothing is missing or counted twice.",
        allow_abbrev=False,
    )
    add_places(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--check", action="store_true", help="print what the checks find as one JSON object; exit 1 if "
                       "anything is wrong")  # fmt: skip
    shown.add_argument("--json", action="store_true", help="print a JSON object for each commit")
    parser.add_argument("--steps", metavar="A:B", default=":", help="show steps A to B-1 only; the checks take all")
    parser.add_argument(
        "--superseded", action="store_true", help="show the commits that were taken back when the run went back"
    )
    return parser
