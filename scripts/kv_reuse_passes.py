"""The passes of `kv_reuse.py`: the leader moves blocks, the second agent goes on, and both are judged each time."""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ayni.blocks.layouts import Tier
from ayni.blocks.objects import KeyOutcome, PresenceState
from ayni.blocks.sequence_hash import SequenceHash
from scripts.kv_reuse_processes import G1, G2, G3, AgentFailed, Group

_BEGAN = time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A prompt, how long to go on, and where its pages are."""

    tokens: list[int]
    count: int
    """Tokens to write."""
    page_size: int
    keys: list[SequenceHash]
    """Of each page that can be reused: those that the prompt fills, but for its last token."""
    table: tuple[int, ...]
    """Blocks of the prompt, and of what follows, in order."""
    other_table: tuple[int, ...]
    """Other blocks for the same, so that nothing is in its place by accident."""

    @property
    def reusable(self) -> range:
        """The pages that can be reused; also their blocks in host memory and on disk."""
        return range(len(self.keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Which of a prompt's pages an agent was given."""

    held: int
    """Pages from the first one on; what comes after a missing page is of no use."""
    misses: tuple[dict[str, Any], ...] = ()
    """Pages that are not in the object store, or not whole."""


Load = Callable[[], Awaitable[Loaded]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """How the second agent went on."""

    loaded: Loaded
    onboard_s: float
    compute_s: float
    """Time that the model took for its first token."""
    same_bytes: bool
    """Whether the pages that were loaded hold what the first agent's hold."""
    same_tokens: bool
    """Whether the tokens are those of a model that never moved anything."""

    @property
    def holds(self) -> bool:
        return self.same_bytes and self.same_tokens

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.onboard_s + self.compute_s


class Passes:
    """Two agents with the same model. The first one reads the prompt; the second one goes on, again and again."""

    def __init__(self, first: Group, second: Group, task: Task) -> None:
        self.first, self.second, self.task = first, second, task
        self.tokens: list[int] = []
        """What the model writes with the cache that transformers has, where nothing is ever moved."""
        self.done: dict[str, Pass] = {}
        self._digests: list[str] = []

    async def read_prompt(self) -> None:
        """Fills the first agent's pages.

        Raises:
            AgentFailed: the model writes something else with pages than without.
        """
        task, (agent,) = self.task, self.first.agents
        # What a model does for the first time takes longer; the second agent is to be measured.
        await self.second.agents[0].ask("reference", tokens=task.tokens[: task.page_size], count=2)
        self.tokens = (await agent.ask("reference", tokens=task.tokens, count=task.count))["tokens"]
        with_pages = await agent.ask("generate", tokens=task.tokens, table=task.table, held=0, count=task.count)
        if with_pages["tokens"] != self.tokens:
            raise AgentFailed(f"{agent.name} writes {with_pages['tokens']} with pages, but {self.tokens} without")
        (self._digests,) = await self.first.digests(task.table[: len(task.keys)])
        say(f"the first agent has read {len(task.tokens)} tokens into pages")

    async def offload(self) -> dict[str, float]:
        """Moves the prompt's pages down all tiers; returns how long each way took.

        Raises:
            TransferFailed, AgentFailed: a block did not arrive.
        """
        leader, blocks = self.first.leader, self.task.reusable
        times = [time.perf_counter()]
        await leader.execute_local_transfer(G1, G2, self.task.table[: len(blocks)], blocks)
        times.append(time.perf_counter())
        await leader.execute_local_transfer(G2, G3, blocks, blocks)
        times.append(time.perf_counter())
        report = await leader.put_blocks(G3, blocks, self._keys)
        if not report.is_done:
            raise AgentFailed(f"not all blocks are in the object store: {_misses(report.outcomes)}")
        times.append(time.perf_counter())
        say(f"{len(blocks)} blocks went to host memory, to disk and to the object store")
        ways = ("to_host", "to_disk", "to_objects")
        return {way: round(after - before, 4) for way, before, after in zip(ways, times, times[1:], strict=False)}

    async def go_on(self, name: str, load: Load | None = None) -> None:
        """Has the second agent write the tokens that follow the prompt.

        Args:
            name: of the pass.
            load: gives the agent pages of the prompt; None: it reads all of the prompt.
        """
        task, (agent,) = self.task, self.second.agents
        await self.second.clear()
        began = time.perf_counter()
        loaded = await load() if load else Loaded(held=0)
        onboard_s = time.perf_counter() - began
        (digests,) = await self.second.digests(task.table[: loaded.held])
        new = await agent.ask("generate", tokens=task.tokens, table=task.table, held=loaded.held, count=task.count)
        self.done[name] = Pass(
            loaded=loaded,
            onboard_s=onboard_s,
            compute_s=new["first_token_s"],
            same_bytes=digests == self._digests[: loaded.held],
            same_tokens=new["tokens"] == self.tokens,
        )
        say(_describe(name, self.done[name]))

    async def from_peer(self, peer: Group) -> Loaded:
        """Loads the pages from another group's host memory."""
        blocks = self.task.reusable
        await self.second.leader.execute_remote_onboard_for_instance(
            peer.instance_id, Tier.HOST, blocks, G1, self.task.table[: len(blocks)]
        )
        return Loaded(held=len(blocks))

    async def from_objects(self) -> Loaded:
        """Loads what the object store has of the pages."""
        leader, keys = self.second.leader, self._keys
        presences = (await leader.has_blocks(G1, keys)).presences
        there = len(list(takewhile(lambda one: one.state is PresenceState.PRESENT, presences)))
        report = await leader.get_blocks(keys[:there], G1, self.task.table[:there])
        held = len(list(takewhile(lambda outcome: outcome.is_success, report.outcomes)))
        absent = tuple({"block": place, "why": presences[place].state.value} for place in range(there, len(keys)))
        return Loaded(held=held, misses=_misses(report.outcomes) + absent)

    @property
    def _keys(self) -> list[bytes]:
        return [bytes(key) for key in self.task.keys]


def damage_object(store: Path, key: SequenceHash) -> None:
    """Changes one byte in the middle of a stored object."""
    (path,) = store.rglob(str(key))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def _misses(outcomes: Sequence[KeyOutcome]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"block": place, "why": str(outcome.failure or outcome.state.value)}
        for place, outcome in enumerate(outcomes)
        if not outcome.is_success
    )


def _describe(name: str, one: Pass) -> str:
    verdict = "the same tokens" if one.same_tokens else "OTHER TOKENS"
    bytes_verdict = "" if one.same_bytes else ", OTHER BYTES"
    misses = "".join(f"; block {miss['block']} was a miss ({miss['why']})" for miss in one.loaded.misses)
    seconds = f"{one.first_token_s:.3f} s to the first token"
    return f"{name.replace('_', ' ')}: {one.loaded.held} blocks reused, {seconds}, {verdict}{bytes_verdict}{misses}"
