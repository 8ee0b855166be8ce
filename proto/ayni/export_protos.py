"""Writes the schema out of the installed package, for generators of other languages.  [shell]

Usage: `python -m ayni.export_protos --output-dir protos`. The files are then protos/ayni/v1/*.proto, and protos is what
protoc calls an import path (`-I protos`).
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path


def export(folder: Path) -> list[Path]:
    """Writes every schema file below the folder; returns their paths, sorted.

    Raises:
        OSError: a file could not be written.
    """
    target = folder / "ayni" / "v1"
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for source in resources.files("ayni").joinpath("v1").iterdir():
        if source.name.endswith(".proto"):
            written.append(target / source.name)
            written[-1].write_bytes(source.read_bytes())
    return sorted(written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files and prints their paths; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ayni.export_protos", description="Write the .proto files.")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder that gets ayni/v1/*.proto")
    folder = parser.parse_args(arguments).output_dir
    try:
        written = export(folder)
    except OSError as error:
        print(f"the schema could not be written to {folder}: {error}; choose a folder you may write", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
