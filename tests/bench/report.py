"""The one JSON object that a bench prints: rows, and where, when and with what they were measured."""

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "numba", "torch", "grpcio", "protobuf")


def row(case: str, ours: float, peer: str, theirs: float, unit: str, goal: float | None = None) -> dict:
    """One comparison; `goal` is what the ratio ours / theirs may be at most."""
    ratio = ours / theirs
    return {
        "case": case,
        "ours": _rounded(ours),
        "peer": peer,
        "theirs": _rounded(theirs),
        "unit": unit,
        "ratio": _rounded(ratio),
        "goal": None if goal is None else _rounded(goal),
        "met": None if goal is None else ratio <= goal,
    }


def report(program: str, rows: list[dict], arguments: dict, samples: dict, measured_on: dict) -> dict:
    """The object to print; `measured_on` is what `hardware` gave before the first process was started."""
    return {
        "program": program,
        "rows": rows,
        "hardware": measured_on,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
        "versions": versions(),
        "samples": samples,
    }


def keep(result: dict) -> Path:
    """Writes a result to the folder of dated results."""
    RESULTS.mkdir(exist_ok=True)
    stamp = result["date"][:16].replace(":", "")
    path = RESULTS / f"{stamp}_{result['program']}_{result['commit']}.json"
    path.write_text(_lines(result))
    return path


def _lines(result: dict) -> str:
    """JSON with one line for each row and for each other value."""
    rows = ",\n".join(f"  {json.dumps(line)}" for line in result["rows"])
    rest = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items() if key != "rows")
    return f'{{\n "rows": [\n{rows}\n ],\n{rest}\n}}\n'


def hardware() -> dict:
    """The machine, and how busy it is with other work."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def commit() -> str:
    """Short hash of the commit, with "-dirty" when files that belong to it were changed."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return (head or "unknown") + ("-dirty" if changed else "")


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 10_000 else round(value)
