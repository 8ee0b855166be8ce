"""The bench of the block half runs, checks what it moves, and prints what docs/benchmarks.md promises; not how fast."""

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.bench import blocks
from tests.bench.blocks_case import CASES
from tests.bench.blocks_measure import CaseResult, Contender, Scale, compared, limited, measure
from tests.bench.blocks_mooncake import mooncake
from tests.bench.blocks_remote import size_text
from tests.bench.processes import BenchFailed
from tests.support.coordinator import ROOT, environment

PROGRAM = ROOT / "tests" / "bench" / "blocks.py"
ROW = {"case", "ours", "peer", "theirs", "unit", "ratio", "goal", "met", "note"}
WHOLE = {"program", "rows", "hardware", "commit", "date", "arguments", "versions", "samples", "skipped", "failed"}
UNITS = {"GB/s", "ms", "s", "cpu_s_per_GB"}


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment(), check=False)


def printed(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result.keys() == WHOLE
    assert result["failed"] == []
    for row in result["rows"]:
        check_row(row)
    return result


def check_row(row: dict) -> None:
    assert row.keys() == ROW
    assert row["ours"] > 0
    assert row["unit"] in UNITS
    assert (row["peer"] is None) == (row["theirs"] is None) == (row["ratio"] is None)
    assert (row["goal"] is None) == (row["met"] is None)


def cases_of(result: dict, *, has_goal: bool) -> list[str]:
    return [row["case"] for row in result["rows"] if (row["goal"] is not None) == has_goal]


def test_blocks_between_processes_and_bare_streams() -> None:
    result = printed(run("--quick", "--only", "grpc"))
    small, large = size_text(16, 64 << 10), size_text(16, 1 << 20)
    for size in (small, large):
        assert cases_of(result, has_goal=True).count(f"grpc pull, {size}") == 2
        assert f"grpc push, {size}" in cases_of(result, has_goal=True)
    peers = {row["peer"] for row in result["rows"]}
    assert peers == {None, "tcp", "tcp both ways", "numpy copy", "bare grpc pull", "bare grpc push"}
    samples = result["samples"]["grpc"][f"grpc {small}"]
    assert all(len(each["seconds"]) == len(each["cpu_seconds"]) == 1 for each in samples.values())


def test_disk_and_calls() -> None:
    result = printed(run("--quick", "--only", "slab", "--only", "overhead"))
    assert result["arguments"] == {"quick": True, "only": ["slab", "overhead"]}
    assert result["samples"].keys() == {"slab", "overhead"}
    assert cases_of(result, has_goal=True) == ["slab write, 15 x 1 MiB", "slab read, 15 x 1 MiB"]
    assert "one 4 KiB block on each of 2 ranks over gRPC, beyond the copy" in cases_of(result, has_goal=False)


def test_help_names_every_case_and_an_unknown_one_is_refused() -> None:
    described = run("--help")
    assert described.returncode == 0
    assert all(case in described.stdout for case in CASES)
    refused = run("--only", "telepathy")
    assert refused.returncode == 2
    assert "telepathy" in refused.stderr
    assert not refused.stdout


def test_a_case_that_fails_is_named_with_its_log() -> None:
    with pytest.raises(BenchFailed, match=r"telepathy ended with exit code 2 after .*\n(.|\n)*invalid choice"):
        blocks.measure("telepathy", quick=True)


def test_what_is_not_installed_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    result = asyncio.run(_await(mooncake(tmp_path, Scale(quick=True))))
    assert result.rows == []
    assert [left_out["case"] for left_out in result.skipped] == ["mooncake"]
    assert "can't be loaded" in result.skipped[0]["why"]


async def _await(case) -> CaseResult:
    return await case


def test_contenders_take_turns_and_only_what_counts_is_kept() -> None:
    seen: list[str] = []

    async def note(text: str) -> None:
        seen.append(text)

    def contender(name: str) -> Contender:
        prepare, work, check = (partial(note, f"{step} {name}") for step in ("prepare", "work", "check"))
        return Contender(name=name, num_bytes=10, prepare=prepare, work=work, check=check)

    samples = asyncio.run(measure([contender("a"), contender("b")], repeat=2, warm_up=1))
    assert seen[:6] == ["prepare b", "work b", "check b", "prepare a", "work a", "check a"]
    assert [text for text in seen if text.startswith("work")] == [f"work {name}" for name in "baabba"]
    assert [len(samples[name].seconds) for name in "ab"] == [2, 2]


@pytest.mark.parametrize(
    ("unit", "goal", "met"),
    [("GB/s", None, None), ("GB/s", 0.5, True), ("GB/s", 0.51, False), ("ms", 0.5, True), ("ms", 0.49, False)],
)
def test_a_goal_with_a_peer_is_a_ratio(unit: str, goal: float | None, met: bool | None) -> None:
    row = compared("case", 1.0, "peer", 2.0, unit, goal)
    check_row(row)
    assert (row["ratio"], row["goal"], row["met"]) == (0.5, goal, met)


@pytest.mark.parametrize(
    ("unit", "goal", "met"),
    [("s", None, None), ("GB/s", 2.0, True), ("GB/s", 2.1, False), ("s", 2.0, True), ("s", 1.9, False)],
)
def test_a_goal_without_a_peer_is_a_limit(unit: str, goal: float | None, met: bool | None) -> None:
    row = limited("case", 2.0, unit, goal)
    check_row(row)
    assert (row["peer"], row["goal"], row["met"]) == (None, goal, met)
