"""One cache, divided by heads among the ranks of a group, joined, and divided again: for `kv_reuse.py`."""

from typing import Any

from ayni.blocks.layouts import Tier
from scripts.kv_reuse_passes import Passes, say
from scripts.kv_reuse_processes import G1, G2, Group


class Ranks:
    """A tensor parallel group whose agents hold some heads each, beside agents that hold all."""

    def __init__(self, group: Group, passes: Passes) -> None:
        self._group, self._passes = group, passes
        self._blocks = passes.task.reusable
        self.same_bytes: dict[str, bool] = {}
        """Whether each rank's blocks, or the joined ones, hold what they should, by direction."""

    async def run(self, engine: str) -> dict[str, Any]:
        """Moves the blocks to the ranks, from them, and to them again."""
        passes, size = self._passes, len(self._group.agents)
        await self._divide("divided", passes.first, passes.task.table, engine)
        await self._group.leader.execute_local_transfer(G1, G2, self._held_in(passes.task.table), self._blocks)
        await passes.second.connect(self._group, engine)
        await passes.go_on("from_ranks", lambda: passes.from_peer(self._group))
        self.same_bytes["joined"] = passes.done["from_ranks"].same_bytes
        await passes.second.leader.execute_local_transfer(G1, G2, self._held_in(passes.task.table), self._blocks)
        await self._divide("divided_again", passes.second, passes.task.other_table, engine)
        return {"ranks": size, "same_bytes": self.same_bytes}

    async def _divide(self, name: str, source: Group, table: tuple[int, ...], engine: str) -> None:
        """Has each rank pull its heads out of a single agent's host memory."""
        await self._group.clear()
        await self._group.connect(source, engine)
        blocks = self._held_in(table)
        await self._group.leader.execute_remote_onboard_for_instance(
            source.instance_id, Tier.HOST, self._blocks, G1, blocks
        )
        self.same_bytes[name] = await self._group.digests(blocks) == await self._originals()
        verdict = "each has its heads, byte by byte" if self.same_bytes[name] else "OTHER BYTES"
        say(f"{name.replace('_', ' ')} among {len(self._group.agents)} ranks: {verdict}")

    async def _originals(self) -> list[list[str]]:
        """Returns checksums of each rank's heads, as the first agent computed them."""
        size, (agent,) = len(self._group.agents), self._passes.first.agents
        blocks = list(self._held_in(self._passes.task.table))
        answers = [await agent.ask("digests", blocks=blocks, rank=rank, num_ranks=size) for rank in range(size)]
        return [answer["digests"] for answer in answers]

    def _held_in(self, table: tuple[int, ...]) -> tuple[int, ...]:
        return table[: len(self._blocks)]
