"""Runs workers in several languages in one run, and compares their parameters to the byte.

Usage: `python scripts/interop.py --languages cpp,go,rust`. Builds the examples of examples/clients and runs them twice
against a coordinator process: all of them beside the Python one, and the Python one alone. In the first run one more
worker is killed in the middle, so that an attempt at a step is given up and all must begin it anew. Everybody must end
with the same parameters, and a wrong token must end each of them with the reason. The last line on standard output is
one JSON object; logs are below the output folder.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.interop_builds import LANGUAGES, ROOT, InteropError, build_all
from scripts.interop_run import refuse_workers, run_workers

VICTIM = "killed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds, runs and compares; returns the exit code."""
    given = _parser().parse_args(arguments)
    languages = ["python", *(name for name in given.languages if name != "python")]
    output = given.output_dir.resolve()
    started = time.monotonic()
    try:
        build_s = build_all(languages)
        running = time.monotonic()
        workers = {f"{language}-worker": language for language in languages}
        printed = run_workers({**workers, VICTIM: "python"}, output / "together", victim=VICTIM)
        alone = run_workers({"python-worker": "python"}, output / "alone")
        result = compare(printed, alone)
        refuse_workers(languages, output / "refused")
    except (InteropError, OSError) as error:
        print(f"interop: {error}", file=sys.stderr)
        return 1
    times = {"build_s": build_s, "run_s": round(time.monotonic() - running, 1)}
    print(json.dumps({**result, **times, "wall_s": round(time.monotonic() - started, 1)}), flush=True)
    return 0


def compare(printed: Mapping[str, Mapping[str, Any]], alone: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what all workers have in common.

    Raises:
        InteropError: two of them differ in parameters, steps or loss, or the loss has not fallen.
    """
    [(_, reference)] = alone.items()
    for key in ("steps", "parameters_sha256", "loss", "first_loss"):
        said = {name: result.get(key) for name, result in printed.items()}
        if differing := {name: value for name, value in said.items() if value != reference[key]}:
            raise InteropError(f"{key} differs: {reference[key]} of a Python worker alone, but {differing}")
    if not reference["loss"] < reference["first_loss"] / 10:
        raise InteropError(f"the loss fell from {reference['first_loss']} to {reference['loss']} only")
    languages = [result["language"] for result in printed.values()]
    return {
        "languages": languages,
        **{key: value for key, value in reference.items() if key not in ("language", "worker")},
    }


def _parser() -> argparse.ArgumentParser:
    usual = [name for name, language in LANGUAGES.items() if not language.only_if_asked]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--languages",
        type=_languages,
        default=usual,
        help=f"from {', '.join(LANGUAGES)}; separated by commas, beside Python (default: {','.join(usual)})",
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "interop", help="folder for logs and state")
    return parser


def _languages(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in LANGUAGES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(LANGUAGES)}")
    return names


if __name__ == "__main__":
    # As after Ctrl-C: what was started is ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
