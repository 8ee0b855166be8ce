"""Files are what their first line says, and no longer than a reader's patience."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ROOTS = {"ayni": ROOT / "proto", "coordinator_service": ROOT, "worker_agent": ROOT}
MAX_LINES = 400


def source_files() -> list[Path]:
    """Returns every written file of the three packages; generated ones are left out."""
    files = [path for package, root in IMPORT_ROOTS.items() for path in (root / package).rglob("*.py")]
    return sorted(path for path in files if "_pb2" not in path.name)


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0]


def module_name(path: Path) -> str:
    root = next(root for package, root in IMPORT_ROOTS.items() if path.is_relative_to(root / package))
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def core_contract() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(contract["source_modules"] for contract in contracts if contract["id"] == "core")


def test_core_contract_lists_exactly_the_files_that_say_core():
    marked = sorted(module_name(path) for path in source_files() if first_line(path).endswith("[core]"))
    lines = "".join(f'    "{name}",\n' for name in marked)
    assert core_contract() == marked, f"contract 3 in pyproject.toml must say\nsource_modules = [\n{lines}]"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_file_opens_with_a_docstring(path):
    assert first_line(path), f"{path} needs a docstring whose first line says what it is"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_file_is_short_enough(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines; split it by meaning"
