"""One agent of `kv_reuse.py`, which starts it: pages of a KV cache that a leader may move, and a model that uses them.

Blocks move over the agent's own gRPC service, as in any agent. What only this demonstration needs goes through standard
input and output: each line is a JSON object, {"do": NAME, ...} and its answer. The agent ends with its standard input,
so it never outlives the process that started it.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ayni import logs
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.endpoints import ClientTls, ServerTls
from ayni.process import exit_code_of, load_token
from ayni.rpc import tune_allocator
from ayni.settings import SettingsError
from scripts.paged_cache import Pages, PagesShape
from worker_agent.blocks_config import BlocksConfig
from worker_agent.serving import ServiceConfig, serving

Answer = dict[str, Any]


class Agent:
    """What an agent can be asked to do with its pages and its model."""

    def __init__(self, pages: Pages, name: str, model: Any = None) -> None:
        self.pages, self.name, self._model = pages, name, model
        self.commands: dict[str, Callable[..., Answer]] = {
            "clear": self.clear,
            "digests": self.digests,
            "generate": self.generate,
            "reference": self.reference,
        }

    @classmethod
    def with_model(cls, *, folder: str, num_blocks: int, page_size: int) -> "Agent":
        """Loads the model of a folder, or the tiny one, and makes pages for it."""
        # Here, since it takes seconds to load and agents that only hold pages do without.
        from scripts.kv_reuse_model import load, name_of, shape_of

        try:
            model = load(folder)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return cls(Pages(shape_of(model, num_blocks, page_size)), name_of(folder), model)

    @classmethod
    def with_pages(cls, *, name: str, shape: Answer) -> "Agent":
        """Makes pages alone, for a model of this name."""
        return cls(Pages(PagesShape(**shape)), name)

    def generate(self, tokens: list[int], table: list[int], held: int, count: int) -> Answer:
        """Continues a prompt greedily. The first `held` blocks of its table hold the prompt's beginning already."""
        from scripts.kv_reuse_model import greedy, paged

        length = held * self.pages.shape.page_size
        new = greedy(self._model, paged(self.pages, table, length), tokens[length:], count)
        return {"tokens": new.tokens, "first_token_s": new.first_token_s}

    def reference(self, tokens: list[int], count: int) -> Answer:
        """Continues a prompt greedily without pages."""
        from scripts.kv_reuse_model import reference

        new = reference(self._model, tokens, count)
        return {"tokens": new.tokens, "first_token_s": new.first_token_s}

    def digests(self, blocks: list[int], rank: int = 0, num_ranks: int = 1) -> Answer:
        """Returns checksums of blocks, or of one rank's part of them."""
        return {"digests": self.pages.digests(blocks, rank, num_ranks)}

    def clear(self) -> Answer:
        """Empties all pages."""
        self.pages.clear()
        return {}


async def serve() -> None:
    """Serves until standard input ends. The first line says what the agent has; the first answer where it listens."""
    given = await _next_line()
    if given is None:
        return
    root = Path(given.pop("root"))
    agent = await asyncio.to_thread(_make, given)
    service = ServiceConfig(
        listen="127.0.0.1:0",
        token=load_token(),
        blocks=BlocksConfig(root=root),
        tls=ClientTls(),
        server_tls=ServerTls(),
        insecure=False,
        model=agent.name,
    )
    async with serving(service) as worker:
        worker.register(LocalLayout(tier=Tier.DEVICE), agent.pages.as_memory())
        _answer({"address": worker.bound, "name": agent.name, "shape": agent.pages.shape.to_json()})
        while (command := await _next_line()) is not None:
            # In a thread, so that peers are served meanwhile.
            _answer(await asyncio.to_thread(agent.commands[command.pop("do")], **command))


def _make(given: Answer) -> Agent:
    return Agent.with_model(**given) if "folder" in given else Agent.with_pages(**given)


async def _next_line() -> Answer | None:
    line = await asyncio.to_thread(sys.stdin.readline)
    read: Answer | None = json.loads(line) if line else None
    return read


def _answer(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    logs.configure("text", "WARNING")
    tune_allocator()
    sys.exit(exit_code_of(lambda: asyncio.run(serve())))
