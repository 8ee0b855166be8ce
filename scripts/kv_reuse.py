"""Reuses a long prompt's KV cache in another process: what one agent computed, a second one continues from.

    python scripts/kv_reuse.py [--model FOLDER | --tiny] [--prompt-tokens 1024] [--new-tokens 32]

The first agent reads a long prompt into a paged KV cache, tier G1. A leader moves its full pages to host memory (G2),
to disk (G3) and into an object store (G4, under hashes of the prompt's tokens). A second agent, another process, takes
them from the first one's host memory, then from the object store, then from a store with a damaged object, computes
what is missing, and goes on decoding. Each time its tokens must be those of a model that never moved anything. Then
the pages are divided by heads among the ranks of a tensor parallel group, joined again, and divided once more; each
rank's bytes must be the same every time.

The model is SmolLM2-135M where `scripts/prepare_data.py smollm2` has prepared it, else a tiny Llama with random
weights; both need the extra `train`. Progress goes to standard error, one JSON object to standard output. The exit code
is 0 when all of this holds.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ayni.blocks.sequence_hash import hash_tokens
from ayni.blocks.transfers import TransferFailed
from ayni.errors import AyniError
from scripts.kv_reuse_passes import Passes, Task, damage_object, say
from scripts.kv_reuse_processes import OBJECTS, ROOT, AgentFailed, AgentProcess, Group, close_all, lead
from scripts.kv_reuse_ranks import Ranks

SMOLLM2 = ROOT / ".data" / "smollm2" / "model"
TINY_VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Everybody who takes part."""

    first: Group
    """An agent with the model; it reads the prompt."""
    second: Group
    """Another one; it goes on."""
    ranks: Group
    """Agents without a model; each holds some of the heads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        folder = _model_folder(given)
        tokens = _prompt(given, folder)
    except (OSError, ValueError) as error:
        print(f"kv_reuse: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("AYNI_TOKEN", secrets.token_urlsafe())
    try:
        with _interruptible(), tempfile.TemporaryDirectory(prefix="kv-reuse-") as root:
            result = asyncio.run(_run(given, folder, tokens, Path(root)))
    except (AgentFailed, AyniError, TransferFailed, KeyboardInterrupt, OSError) as error:
        print(f"kv_reuse: {str(error) or 'interrupted'}", file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0 if result["ok"] else 1


@contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM do what Ctrl-C does, so that it leaves nothing behind either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="FOLDER", help=f"a Llama's folder (default: {SMOLLM2} if there)")
    model.add_argument("--tiny", action="store_true", help="use the tiny Llama with random weights")
    parser.add_argument("--text", type=Path, help="the prompt's text (default: heldout.txt beside the model's folder)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="length of the prompt (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to write each time (default: 32)")
    parser.add_argument("--page-size", type=int, default=16, choices=(16, 32, 64, 128), help="tokens of a page")
    parser.add_argument("--engine", default="", choices=("shm", "grpc"), help="how blocks travel (default: the best)")
    return parser


def _model_folder(given: argparse.Namespace) -> Path | None:
    """Returns the folder of the model, None for the tiny one."""
    if given.model and not (given.model / "config.json").is_file():
        raise ValueError(f"{given.model} is not a model's folder: it has no config.json")
    if given.model or (SMOLLM2.is_dir() and not given.tiny):
        return given.model or SMOLLM2
    if not given.tiny:
        say("SmolLM2 is not prepared here (python scripts/prepare_data.py smollm2); a tiny random Llama stands in")
    return None


def _prompt(given: argparse.Namespace, folder: Path | None) -> list[int]:
    """Returns the prompt's tokens: a text for a real model, noise for the tiny one."""
    if given.prompt_tokens <= given.page_size or given.new_tokens < 1:
        raise ValueError("the prompt must be longer than one page, and at least one token must be written")
    if folder is None:
        noise = random.Random(given.prompt_tokens)
        return [noise.randrange(TINY_VOCABULARY) for _ in range(given.prompt_tokens)]
    tokens = _tokenizer(folder).encode((given.text or folder.parent / "heldout.txt").read_text(encoding="utf-8")).ids
    if len(tokens) < given.prompt_tokens:
        raise ValueError(f"the text has {len(tokens)} tokens; --prompt-tokens asks for {given.prompt_tokens}")
    return list(tokens[: given.prompt_tokens])


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


async def _run(given: argparse.Namespace, folder: Path | None, tokens: list[int], root: Path) -> dict[str, Any]:
    task = _task(given, tokens)
    async with AsyncExitStack() as stack:
        groups = await _start(stack, task, folder, root)
        model = str(folder or groups.first.agents[0].model_name)
        result = {"model": model, **await _demonstrate(groups, task, root, given.engine)}
    written = repr(_tokenizer(folder).decode(result["tokens"])) if folder else result["tokens"]
    say(f"what follows the prompt: {written}")
    return result


def _task(given: argparse.Namespace, tokens: list[int]) -> Task:
    # The last token is read again even where it fills its page: somebody has to say what follows it.
    keys = hash_tokens(tokens[:-1], given.page_size)
    length = -(-(len(tokens) + given.new_tokens) // given.page_size)
    # Blocks in no order, as a cache in use gives them out.
    blocks = random.Random(0).sample(range(2 * length), 2 * length)
    return Task(
        tokens=tokens,
        count=given.new_tokens,
        page_size=given.page_size,
        keys=keys,
        table=tuple(blocks[:length]),
        other_table=tuple(blocks[length:]),
    )


async def _start(stack: AsyncExitStack, task: Task, folder: Path | None, root: Path) -> Groups:
    """Starts all agents and makes them groups."""
    token = os.environ["AYNI_TOKEN"]
    has = {"folder": str(folder or ""), "num_blocks": 2 * len(task.table), "page_size": task.page_size}
    first, second = await _agents(stack, root, {"first agent": has, "second agent": has})
    say(f"two agents are ready, each a process of its own; their model is {first.model_name}")
    heads = first.shape["num_heads"]
    size = smallest_divisor(heads)
    say(f"ranks: {size}, the fewest that divide the model's {heads} heads of keys and values evenly")
    part = {"name": first.model_name, "shape": {**first.shape, "num_heads": heads // size}}
    ranks = await _agents(stack, root, {f"rank {rank}": part for rank in range(size)})
    groups = [await lead(agents, token, len(task.keys)) for agents in ([first], [second], ranks)]
    for group in groups:
        stack.push_async_callback(group.close)
    return Groups(first=groups[0], second=groups[1], ranks=groups[2])


async def _agents(stack: AsyncExitStack, root: Path, wanted: dict[str, dict[str, Any]]) -> list[AgentProcess]:
    agents: list[AgentProcess] = []
    stack.push_async_callback(close_all, agents)
    for name, has in wanted.items():
        agents.append(await AgentProcess.start(name, {"root": str(root), **has}))
    return [await agent.ready() for agent in agents]


async def _demonstrate(groups: Groups, task: Task, root: Path, engine: str) -> dict[str, Any]:
    passes = Passes(groups.first, groups.second, task)
    await passes.read_prompt()
    offload_s = await passes.offload()
    await passes.go_on("without_reuse")
    chosen = await groups.second.connect(groups.first, engine)
    await passes.go_on("from_peer", lambda: passes.from_peer(groups.first))
    await passes.go_on("from_objects", passes.from_objects)
    broken = len(task.keys) // 2
    damage_object(root / OBJECTS, task.keys[broken])
    await passes.go_on("damaged_object", passes.from_objects)
    ranks = await Ranks(groups.ranks, passes).run(engine)
    reused = {name: one.loaded.held for name, one in passes.done.items()}
    expected = {name: len(task.keys) for name in reused} | {"without_reuse": 0, "damaged_object": broken}
    return {
        "prompt_tokens": len(task.tokens),
        "blocks": len(task.keys),
        "engine": chosen,
        "offload_s": offload_s,
        **_report(passes),
        "tensor_parallel": ranks,
        "tokens": passes.tokens,
        "ok": reused == expected
        and all(one.holds for one in passes.done.values())
        and all(ranks["same_bytes"].values()),
    }


def _report(passes: Passes) -> dict[str, Any]:
    done = passes.done
    return {
        "reused_blocks": {name: one.loaded.held for name, one in done.items()},
        "misses": {name: list(one.loaded.misses) for name, one in done.items() if one.loaded.misses},
        "onboard_s": {name: round(one.onboard_s, 4) for name, one in done.items() if one.loaded.held},
        "first_token_s": {name: round(one.first_token_s, 4) for name, one in done.items()},
        "same_tokens": {name: one.same_tokens for name, one in done.items()},
        "same_bytes": {name: one.same_bytes for name, one in done.items() if one.loaded.held},
    }


def smallest_divisor(number: int) -> int:
    """Returns the smallest divisor above 1; of 1 it is 1."""
    return next((divisor for divisor in range(2, number + 1) if number % divisor == 0), 1)


if __name__ == "__main__":
    sys.exit(main())
