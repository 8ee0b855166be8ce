"""The first steps of docs/blocks.md, as a reader takes them: its layouts, its programs, its outputs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN, environment

PAGE = (Path(__file__).parents[2] / "docs" / "blocks.md").read_text()
LIMIT_S = 60


def fenced(kind: str, begins: str) -> str:
    """The block of the page that begins with a text."""
    found = [block for block in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if block.startswith(begins)]
    assert len(found) == 1, f"{len(found)} blocks of the page begin with {begins!r}"
    return found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page has in it."""
    path = tmp_path_factory.mktemp("first-steps")
    whole = fenced("yaml", "# layouts.yaml")
    half = whole.replace("inner_dim: 256", "inner_dim: 128").replace("num_heads: 4", "num_heads: 2")
    (path / "layouts.yaml").write_text(whole)
    (path / "half.yaml").write_text(half)
    (path / "run.token").write_text(TOKEN)
    (path / "run.token").chmod(0o600)
    for name in ("move", "cache"):
        (path / f"{name}.py").write_text(fenced("python", f"# example: {name}"))
    return path


@pytest.fixture(scope="module")
def agents(folder: Path) -> Iterator[dict[str, str]]:
    """Agents by the ports that the page gives them; each with its address here."""
    started = {}
    try:
        for port, layouts in (("50061", "layouts"), ("50062", "layouts"), ("50063", "half"), ("50064", "half")):
            command = [sys.executable, "-m", "worker_agent", "serve", "--layouts", f"{layouts}.yaml"]
            started[port] = subprocess.Popen(
                [*command, "--token-file", "run.token", "--log-level", "error"],
                cwd=folder,
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
        yield {port: said(process).split()[-1] for port, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def said(process: subprocess.Popen) -> str:
    assert process.stdout
    line: str = process.stdout.readline()
    assert line.startswith("listening on "), "an agent did not start"
    return line


def shown(folder: Path, agents: dict[str, str], command: str) -> str:
    """What a command of the page prints."""
    arguments = [re.sub(r"127\.0\.0\.1:(\d+)", lambda port: agents[port[1]], word) for word in command.split()]
    done = subprocess.run(
        [sys.executable, *arguments[1:]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "program",
    [
        "move.py 127.0.0.1:50061 127.0.0.1:50062",
        "move.py 127.0.0.1:50061 127.0.0.1:50063,127.0.0.1:50064",
        "cache.py 127.0.0.1:50062",
    ],
)
def test_programs_print_what_the_page_says(folder: Path, agents: dict[str, str], program: str) -> None:
    command = f".venv/bin/python {program}\n"
    [output] = re.findall(rf"```\n{re.escape(command)}```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shown(folder, agents, command) == output
