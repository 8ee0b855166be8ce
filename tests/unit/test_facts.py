"""Every fact of the reference is held by a test, or DECISIONS.md says why none holds it."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.unit.test_docs import read, section
from tests.unit.test_layers import ROOT

FACTS = {f"T{number}" for number in range(1, 127)}
MARK = "@pytest.mark.fact("


@cache
def marked() -> frozenset[str]:
    """The facts that tests are marked with."""
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)}
    return frozenset(fact for path, text in texts.items() if MARK in text for fact in marks_of(path.name, text))


def marks_of(name: str, text: str) -> list[str]:
    """The facts that the tests of one file are marked with."""
    facts, num_marks = [], 0
    for node in ast.walk(ast.parse(text)):
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fact":
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{name}: a class is marked"
                assert node.name.startswith("test_"), f"{name}: {node.name} is marked and no test"
                facts += [ast.literal_eval(fact) for fact in mark.args]
                num_marks += 1
    assert num_marks == text.count(MARK), f"{name}: a mark is on something else than a test"
    return facts


def facts_in(rows: str) -> list[str]:
    """The facts in the first cells of a table."""
    cells = re.findall(r"^\| (T\d[^|]*) \| \S.* \| \S.* \|$", rows, re.MULTILINE)
    return [fact for cell in cells for fact in re.findall(r"T\d+", cell)]


def test_each_fact_is_held_by_a_test_or_explained_and_never_both():
    held, explained = marked(), facts_in(section(read("DECISIONS.md"), "### Facts of the reference that are no test"))
    assert len(set(explained)) == len(explained), f"explained twice: {explained}"
    assert held <= FACTS, f"there are no such facts: {sorted(held - FACTS)}"
    assert not held & set(explained), f"held by a test, and explained away: {sorted(held & set(explained))}"
    assert held | set(explained) == FACTS, f"neither held nor explained: {sorted(FACTS - held - set(explained))}"


def test_facts_that_are_said_to_differ_here_are_held_by_tests():
    rows, *_ = section(read("DECISIONS.md"), "## Facts of the reference").partition("\n### ")
    assert facts_in(rows)
    assert set(facts_in(rows)) <= marked()
