"""What the documentation lists is what there is."""

import ast
import re
from dataclasses import MISSING
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
import yaml

from ayni import failpoints
from ayni.endpoints import Keepalive
from ayni.errors import BY_REASON
from ayni.plain_values import arms
from ayni.process import load_yaml
from ayni.settings import Leaf, leaves
from coordinator_service.config import RunFile
from tests.unit.test_layers import ROOT, first_line, source_files
from worker_agent.blocks_config import ServeConfig
from worker_agent.config import WorkerConfig
from worker_agent.launchers import LAUNCHERS
from worker_agent.layouts_file import LayoutEntry, LayoutsFile
from worker_agent.ray_config import RayConfig

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
KINDS: dict[Any, str] = {
    **{str: "text", Literal: "text", int: "whole number", float: "number", bool: "true / false"},
    **{timedelta: "duration", Path: "path", dict: "mapping", tuple: "list of text"},
}
OPTIONS = {
    "lora_classification": "LoraClassificationOptions",
    "causal_lm": "CausalLmOptions",
    "causal_lm_lora": "CausalLmLoraOptions",
}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, heading: str) -> str:
    """The text under a heading, up to the next one of the same level or above."""
    level = heading.partition(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"there is no heading {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str) -> dict[str, list[str]]:
    """The cells of every table row whose first cell is code, by that code."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")
    ]
    assert len({row[0] for row in rows}) == len(rows), f"listed twice: {sorted(row[0] for row in rows)}"
    return {row[0].strip("`"): row[1:] for row in rows}


def flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The values of nested mappings, by their dotted paths."""
    nested = {key: flat(value, f"{path}{key}.") for key, value in values.items() if isinstance(value, dict)}
    here = {f"{path}{key}": value for key, value in values.items() if key not in nested}
    return here | {name: value for found in nested.values() for name, value in found.items()}


def described(leaf: Leaf) -> list[str]:
    """Type and default as docs/run-file.md writes them."""
    kind = KINDS[next(get_origin(arm) or arm for arm in arms(leaf.annotation) if arm is not type(None))]
    if leaf.default is MISSING:
        return [kind, "required"]
    if leaf.default in (None, "", {}, []):
        return [kind, "none"]
    if kind == "duration":
        return [kind, f"`{leaf.default:g}s`"]
    if isinstance(leaf.default, list):
        return [kind, f"`{', '.join(leaf.default)}`"]
    return [kind, f"`{str(leaf.default).lower() if kind == 'true / false' else leaf.default}`"]


def test_every_key_of_the_run_file_is_listed_with_type_and_default():
    before_worker = read("docs/run-file.md").partition("\n## The worker\n")[0]
    without_options = re.sub(r"\n### Options of .*?(?=\n## )", "\n", before_worker, flags=re.DOTALL)
    listed = {key: cells[:2] for key, cells in table(without_options).items()}
    assert listed == {leaf.path: described(leaf) for leaf in leaves(RunFile)}


def test_every_key_of_the_worker_is_listed_with_type_and_default():
    listed = {key: cells[:2] for key, cells in table(section(read("docs/run-file.md"), "## The worker")).items()}
    assert listed == {leaf.path: described(leaf) for leaf in leaves(WorkerConfig)}


def test_every_key_of_the_serving_agent_is_listed_with_type_and_default():
    listed = {key: cells[:2] for key, cells in table(section(read("docs/run-file.md"), "## The serving agent")).items()}
    assert listed == {leaf.path: described(leaf) for leaf in leaves(ServeConfig)}


def test_every_key_of_the_ray_driver_is_listed_with_type_and_default():
    listed = {key: cells[:2] for key, cells in table(section(read("docs/launch.md"), "## Ray")).items()}
    assert listed == {leaf.path: described(leaf) for leaf in leaves(RayConfig)}


def test_every_variable_of_a_launcher_is_listed():
    rows = section(read("docs/launch.md"), "## What an agent takes from where").splitlines()
    listed = {row.split(" | ")[0].strip("| "): set(re.findall(r"`([A-Z_]+)`", row)) for row in rows if row[:2] == "| "}
    listed = {name: variables for name, variables in listed.items() if variables}
    assert list(listed) == list(LAUNCHERS)
    for name, launcher in LAUNCHERS.items():
        firsts = {variables[0] for variables in launcher.variables.values()}
        assert {launcher.mark, *firsts} <= listed[name]


def test_every_key_of_a_layout_is_listed_with_type_and_default():
    listed = {key: cells[:2] for key, cells in table(section(read("docs/blocks.md"), "### The layouts file")).items()}
    about_all = [leaf for leaf in leaves(LayoutsFile) if leaf.path != "layouts"]
    assert listed == {leaf.path: described(leaf) for leaf in [*about_all, *leaves(LayoutEntry)]}


def test_every_timeout_is_listed_with_its_default():
    sections = [leaf for leaf in leaves(RunFile) if leaf.path.partition(".")[0] in ("timeouts", "stragglers")]
    waits = [leaf for leaf in leaves(WorkerConfig) if leaf.path.endswith("_timeout") and "." not in leaf.path]
    expected = {leaf.path: described(leaf)[1] for leaf in [*sections, *waits]}
    expected |= {f"Keepalive.{leaf.path}": described(leaf)[1] for leaf in leaves(Keepalive)}
    listed = {key: cells[0] for key, cells in table(section(read("docs/operations.md"), "## Timeouts")).items()}
    assert listed == expected


def test_every_failpoint_is_listed_with_what_has_happened_there():
    assert table(section(read("docs/operations.md"), "## Failpoints")) == {
        name: [what] for name, what in failpoints.NAMES.items()
    }


def test_operations_names_reasons_states_and_settings_that_there_are():
    page = read("docs/operations.md")
    by_who_acts = re.findall(r"`([A-Z_]+)`", section(page, "## What a refusal asks of you"))
    assert len(by_who_acts) == len(set(by_who_acts))
    assert set(by_who_acts) <= BY_REASON.keys()
    states = ["waiting", "running", "paused", "halted", "finished"]
    assert list(table(section(page, "## States of a run"))) == states
    keys = {leaf.path for leaf in [*leaves(RunFile), *leaves(WorkerConfig)]}
    assert {name.lower() for name in re.findall(r"AYNI_(\w+)", page)} <= keys | {"failpoints", "kernels"}
    flags = {key.replace(".", "-").replace("_", "-") for key in keys} | {"config"}
    page = re.sub(r"^kubectl .*\\\n.*\n", "", page, flags=re.MULTILINE)
    ours = re.findall(r"(?:-m (?:coordinator_service|worker_agent) |\\\n +|^ +- )--([a-z-]+)", page, re.MULTILINE)
    assert len(ours) > 20
    assert set(ours) <= flags


def test_kubernetes_manifests_are_yaml():
    [block] = re.findall(r"```yaml\n(.*?)```", read("docs/operations.md"), re.DOTALL)
    assert [part["kind"] for part in yaml.safe_load_all(block)] == ["Service", "StatefulSet", "Deployment"]


@pytest.mark.parametrize("task", OPTIONS)
def test_every_option_of_a_task_is_listed(task):
    # Read, not imported: tasks bring torch and transformers along.
    nodes = ast.parse(read(f"worker_agent/tasks/{task}.py")).body
    [options] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == OPTIONS[task]]
    names = [
        node.target.id for node in options.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert list(table(section(read("docs/run-file.md"), f"### Options of `{task}`"))) == names


def test_every_reason_of_a_refusal_is_explained():
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", read("docs/errors.md"), re.MULTILINE))
    assert explained == BY_REASON.keys() - {"UNSPECIFIED"}


def test_every_make_target_is_listed():
    targets = re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE)
    listed = re.findall(r"^\| `make ([a-z-]+)", section(read("README.md"), "## Make targets"), re.MULTILINE)
    assert sorted(listed) == sorted(set(targets) - {"help"})


def test_step_counts_are_those_of_the_run_files():
    runs = section(read("README.md"), "## More runs")
    rules = re.findall(r"^(\w+):.*(?:\n\t.*)*?--run (\S+)", read("Makefile"), re.MULTILINE)
    files = {f"make {target}": file for target, file in rules}
    said = {
        files.get(name, name): int(cells[0].rpartition(" steps")[0].split()[-1]) for name, cells in table(runs).items()
    }
    assert said == {f"runs/{path.name}": load_yaml(path)["num_steps"] for path in (ROOT / "runs").glob("*.yaml")}
    assert re.findall(r"^\| LoRA, (\d+) steps", runs, re.MULTILINE) == [str(said["runs/wordnet.yaml"])]


def test_the_example_run_file_is_part_of_the_run_that_it_names(tmp_path):
    [example, *_] = re.findall(r"```yaml\n(.*?)```", read("docs/run-file.md"), re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    values = load_yaml(tmp_path / "example.yaml")
    whole = load_yaml(ROOT / "runs" / f"{values['run_id']}.yaml")
    assert flat(values).items() <= flat(whole).items()


def test_the_tree_lists_every_file_with_its_tag():
    listed, folders = {}, {0: ""}
    for line in section(read("ARCHITECTURE.md"), "## The tree").splitlines():
        indent, name = len(line) - len(line.lstrip()), (line.split() or [""])[0]
        if name.endswith("/"):
            folders[indent + 2] = folders.get(indent, "") * (indent > 0) + name
        elif name.endswith(".py"):
            listed[folders[indent] + name] = line.split()[1]
    written = [path for path in source_files() if path.name != "__init__.py"]
    assert listed == {str(path.relative_to(ROOT)): first_line(path).split()[-1] for path in written}


def test_the_tree_lists_every_script():
    [listed] = re.findall(r"^scripts/ (.*(?:\n .*)*)", read("ARCHITECTURE.md"), re.MULTILINE)
    assert sorted(re.findall(r"\w+", listed)) == sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_plain_ascii_and_name_files_that_exist(page):
    text = page.read_text()
    assert text.isascii(), sorted({character for character in text if not character.isascii()})
    for name in re.findall(r"`((?:proto|coordinator_service|worker_agent|scripts|runs|tests)/[\w/]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def examples() -> list[str]:
    blocks = [re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES]
    return [block for found in blocks for block in found]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.splitlines()[0][:40])
def test_examples_parse_and_import_what_there_is(example):
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            found = (ROOT / folder / f"{(node.module or '').replace('.', '/')}{end}" for folder, end in PLACES)
            text = "".join(file.read_text() for file in found if file.exists())
            defined = re.findall(r"^(?:class|(?:async )?def) (\w+)|^(\w+)\b[^=\n]*=", text, re.MULTILINE)
            exported = re.findall(r'"(\w+)"', "".join(re.findall(r"^__all__ = \[[^]]*\]", text, re.MULTILINE)))
            known = {name for pair in defined for name in pair} | set(exported)
            assert {alias.name for alias in node.names} <= known, node.module


PACKAGES = ("ayni", "coordinator_service", "worker_agent")
PLACES = [(folder, end) for folder in (".", "proto") for end in (".py", "/__init__.py")]
