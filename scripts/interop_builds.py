"""The example workers under examples/clients: what each needs, and how it is built into build/interop/LANGUAGE."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts import gen_stubs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "clients"
BUILD_LIMIT_S = 900
AT_A_TIME = 2


class InteropError(Exception):
    """What went wrong, in a sentence for whoever ran it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """What building an example takes, beside its packages.txt."""

    programs: tuple[str, ...] = ()
    """Programs that must be there, wherever they come from."""
    stubs: str = ""
    """Language of scripts/gen_stubs.py whose stubs it is given; empty where it generates its own."""
    only_if_asked: bool = False
    """Whether it runs only where it is named: its compiler is in no distribution that CI has."""


LANGUAGES = {
    "python": Language(),
    "cpp": Language(programs=("g++", "pkg-config"), stubs="cpp"),
    "go": Language(programs=("go",), stubs="go"),
    "rust": Language(programs=("cargo", "protoc")),
    "java": Language(programs=("java", "javac"), stubs="java"),
    "typescript": Language(programs=("node", "npm")),
    "typescript-grpc": Language(programs=("node", "npm")),
    "ruby": Language(programs=("ruby",), stubs="ruby"),
    "csharp": Language(programs=("dotnet",), only_if_asked=True),
}
"""Every language that can be compiled and run here. Python is always among the workers."""


def missing(language: str) -> list[str]:
    """Returns a line for everything that the language's example needs and this machine lacks."""
    listed = EXAMPLES / language / "packages.txt"
    named = listed.read_text().split() if listed.exists() else []
    packages = [name for name in named if not _is_installed(name)] if shutil.which("dpkg-query") else []
    programs = [name for name in LANGUAGES[language].programs if shutil.which(name) is None]
    lines = [f"apt-get install {' '.join(packages)}"] if packages else []
    return [*lines, *(f"the program {name} is not on PATH" for name in programs)]


def build_all(languages: Sequence[str]) -> dict[str, float]:
    """Builds the examples, two at a time; returns how many seconds each took, 0 where nothing had changed.

    Raises:
        InteropError: something is missing, or a build failed; all that is missing is named.
    """
    lacking = {language: lines for language in languages if (lines := missing(language))}
    if lacking:
        texts = [f"{language}: {line}" for language, lines in lacking.items() for line in lines]
        raise InteropError("\n  ".join(["the examples need more than this machine has:", *texts]))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(languages, pool.map(_build, languages), strict=True))


def folder_of(language: str) -> Path:
    """Returns where the example is built; its program is `worker` in there."""
    return ROOT / "build" / "interop" / language


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"


def _build(language: str) -> float:
    out, inputs = folder_of(language), _inputs(language)
    stamp = out / "inputs.sha256"
    if (out / "worker").exists() and stamp.exists() and stamp.read_text() == inputs:
        return 0.0
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    path = gen_stubs.search_path()
    stubs = _stubs(LANGUAGES[language].stubs, path)
    log = out / "build.log"
    environment = {**os.environ, "PATH": path, "PYTHON": sys.executable}
    command = [str(EXAMPLES / language / "build.sh"), str(ROOT / "proto"), str(stubs), str(out)]
    _run(command, environment, log, f"the {language} example could not be built")
    stamp.write_text(inputs)
    return round(time.monotonic() - started, 1)


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, failure: str) -> None:
    with log.open("w") as output:
        try:
            subprocess.run(command, check=True, env=environment, stdout=output, stderr=output, timeout=BUILD_LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise InteropError(f"{failure}: {error}; the end of {log}:\n{tail}") from error


def _stubs(language: str, path: str) -> Path:
    if not language:
        empty = ROOT / "build" / "stubs" / "none"
        empty.mkdir(parents=True, exist_ok=True)
        return empty
    if lines := gen_stubs.missing_tools(language, path):
        raise InteropError("\n  ".join([f"stubs for {language} need tools that are not on PATH:", *lines]))
    try:
        return gen_stubs.generate(language, path)
    except subprocess.CalledProcessError as error:
        raise InteropError(f"buf could not generate the {language} stubs; its message is above") from error


def _inputs(language: str) -> str:
    """Hashes what a build depends on: the example, the schema and its templates, and the interpreter."""
    digest = hashlib.sha256(sys.executable.encode())
    for path in _input_files(language):
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _input_files(language: str) -> Iterator[Path]:
    folders = (EXAMPLES / language, ROOT / "proto" / "ayni" / "v1")
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    yield from sorted([*found, *(ROOT / "proto").glob("buf*.yaml")])
