"""The program that reuses a prompt's KV cache in another process, with the tiny Llama."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import kv_reuse
from scripts.kv_reuse_model import greedy, paged, reference, shape_of, tiny_llama
from scripts.kv_reuse_processes import AgentFailed, AgentProcess
from scripts.paged_cache import Pages, PagesShape
from tests.support.coordinator import ROOT, TOKEN, environment

PROMPT, NEW, PAGE = 203, 16, 16
FULL = 12
"""Full pages of the prompt; 11 tokens are left over."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program prints; it left nothing behind."""
    temporary = tmp_path_factory.mktemp("temporary")
    sizes = ("--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW), "--page-size", str(PAGE))
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts" / "kv_reuse.py", "--tiny", *sizes],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(TMPDIR=str(temporary)),
        cwd=temporary,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    # Sockets are in a folder that all processes of a user share.
    assert [path for path in temporary.rglob("*") if not (path.is_dir() and path.name.startswith("ayni-"))] == []
    (line,) = finished.stdout.splitlines()
    read: dict[str, Any] = json.loads(line)
    return read


def test_second_agent_writes_what_a_model_writes_that_moved_nothing(result: dict[str, Any]) -> None:
    written = reference(tiny_llama(), prompt(), NEW)
    assert result["tokens"] == written.tokens
    passes = ("without_reuse", "from_peer", "from_objects", "damaged_object", "from_ranks")
    assert result["same_tokens"] == dict.fromkeys(passes, True)
    assert result["same_bytes"] == dict.fromkeys(passes[1:], True)
    assert result["ok"]


def test_full_pages_are_reused_and_times_to_the_first_token_are_told(result: dict[str, Any]) -> None:
    assert result["blocks"] == FULL
    whole = dict.fromkeys(("from_peer", "from_objects", "from_ranks"), FULL)
    assert result["reused_blocks"] == whole | {"without_reuse": 0, "damaged_object": FULL // 2}
    assert all(seconds > 0 for seconds in result["first_token_s"].values())
    assert set(result["onboard_s"]) == set(result["reused_blocks"]) - {"without_reuse"}


def test_damaged_object_is_a_miss_and_what_follows_it_is_computed(result: dict[str, Any]) -> None:
    ((name, (miss,)),) = result["misses"].items()
    assert (name, miss["block"]) == ("damaged_object", FULL // 2)
    assert "checksum" in miss["why"]


def test_heads_are_divided_among_ranks_and_joined_byte_by_byte(result: dict[str, Any]) -> None:
    same_bytes = dict.fromkeys(("divided", "joined", "divided_again"), True)
    assert result["tensor_parallel"] == {"ranks": 2, "same_bytes": same_bytes}


def test_tokens_show_when_a_page_is_not_what_it_should_be() -> None:
    model, tokens = tiny_llama(), prompt()
    pages = Pages(shape_of(model, num_blocks=2 * FULL + 4, page_size=PAGE))
    table = random.Random(1).sample(range(2 * FULL + 4), FULL + 2)
    expected = greedy(model, paged(pages, table, 0), tokens, NEW).tokens

    def again() -> list[int]:
        return greedy(model, paged(pages, table, FULL * PAGE), tokens[FULL * PAGE :], NEW).tokens

    assert again() == expected
    pages.layers[1][:, table[3]] = 0
    assert again() != expected


def test_digests_show_one_changed_value_in_the_block_and_the_rank_that_hold_it() -> None:
    pages = Pages(PagesShape(num_layers=2, num_blocks=5, page_size=PAGE, num_heads=4, head_dim=8))
    for layer in pages.layers:
        layer.copy_(torch.rand(layer.shape))
    ranks = range(2)
    before = [pages.digests(range(5), rank, 2) for rank in ranks]
    assert len({digest for digests in before for digest in digests}) == 10
    pages.layers[1][1, 3, 7, 2, 5] += 1
    after = [pages.digests(range(5), rank, 2) for rank in ranks]
    assert [(rank, block) for rank in ranks for block in range(5) if before[rank][block] != after[rank][block]] == [
        (1, 3)
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tiny", "--prompt-tokens", "16"], "longer than one page"),
        (["--tiny", "--new-tokens", "0"], "at least one token"),
        (["--model", "nowhere"], "no config.json"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_reuse.main(arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("number", "divisor"), [(1, 1), (2, 2), (3, 3), (4, 2), (9, 3), (25, 5)])
def test_fewest_ranks_that_divide_the_heads(number: int, divisor: int) -> None:
    assert kv_reuse.smallest_divisor(number) == divisor


def test_agent_that_can_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AYNI_TOKEN", TOKEN)

    async def start() -> None:
        shape = {"num_layers": 1, "num_blocks": 2, "page_size": 3, "num_heads": 1, "head_dim": 8}
        agent = await AgentProcess.start("rank 7", {"root": str(tmp_path), "name": "none", "shape": shape})
        try:
            await agent.ready()
        finally:
            await agent.close()

    with pytest.raises(AgentFailed, match="rank 7 ended"):
        asyncio.run(start())
    said = capfd.readouterr().err
    assert "page_size must be a power of two" in said
    assert "Traceback" not in said


def prompt() -> list[int]:
    """The prompt that the program makes for the tiny model."""
    noise = random.Random(PROMPT)
    return [noise.randrange(kv_reuse.TINY_VOCABULARY) for _ in range(PROMPT)]
