"""Two processes that move blocks: an agent, and a worker in this process that is connected with it."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import LayoutHandle
from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.transfers import RemoteBlocks, TransferOptions
from ayni.endpoints import ClientTls
from scripts import make_certs
from tests.bench import blocks_agents as agents
from tests.bench.blocks_agents import HOST
from tests.bench.blocks_measure import Contender
from tests.bench.processes import Program
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker


@dataclass(frozen=True)
class Certificates:
    """A server's certificate, and who issued it."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        with contextlib.redirect_stdout(io.StringIO()):
            assert make_certs.main(["--out", str(folder)]) == 0
        return cls(folder)

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the agent."""
        return (
            f"--server-tls-certificate={self.folder / 'server.pem'}",
            f"--server-tls-key={self.folder / 'server.key'}",
        )

    @property
    def client(self) -> ClientTls:
        return ClientTls(ca=self.folder / "ca.pem")


@dataclass
class Stage:
    """An agent and a worker in this process that is connected with it; each has 2 N blocks.

    Blocks 0 to N - 1 of the agent hold `data` and are pulled; N to 2 N - 1 are pushed into. Those of the worker are
    pulled into and pushed likewise.
    """

    agent: Program
    worker: LocalBlockWorker
    peer: WorkerMetadata
    data: Bytes
    """Shape [N, block bytes]."""

    def __post_init__(self) -> None:
        count = len(self.data)
        self._pull_from, self._pull_into = agents.shuffled(count, 1), agents.shuffled(count, 2)
        self._push_from, self._push_into = agents.shuffled(count, 3) + count, agents.shuffled(count, 4) + count

    @property
    def _layout(self) -> LayoutHandle:
        return self.peer.layouts[0].handle

    async def fill(self) -> None:
        """Gives the agent's blocks their bytes."""
        count = len(self.data)
        here = as_ids(range(count, 2 * count))
        await self.worker.write(HOST, here, self.data)
        there = RemoteBlocks(layout=self._layout, blocks=as_ids(range(count)))
        await self.worker.execute_remote_offload(HOST, here, there)

    def pulling(self, engine: str, name: str = "") -> Contender:
        return self._contender(name or f"{engine} pull", lambda: self._pull(engine), self._roll, self._check_pull)

    def pushing(self, engine: str) -> Contender:
        return self._contender(f"{engine} push", lambda: self._push(engine), self._roll, self._check_push)

    def both_ways(self, engine: str) -> Contender:
        async def work() -> None:
            await asyncio.gather(self._pull(engine), self._push(engine))

        return self._contender(f"{engine} both ways", work, self._roll, self._check_both, 2)

    def _contender(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        prepare: Callable[[], Awaitable[object]],
        check: Callable[[], Awaitable[object]],
        directions: int = 1,
    ) -> Contender:
        num_bytes = directions * self.data.nbytes
        return Contender(
            name=name, num_bytes=num_bytes, work=work, prepare=prepare, check=check, pids=(self.agent.pid,)
        )

    async def _roll(self) -> None:
        """Gives every block another destination, so that what an earlier transfer left there would be found."""
        self._pull_into, self._push_into = np.roll(self._pull_into, 1), np.roll(self._push_into, 1)

    async def _pull(self, engine: str, source: Ids | None = None) -> None:
        notification = self.worker.execute_remote_onboard_for_instance(
            self.peer.instance_id,
            HOST.tier,
            self._pull_from if source is None else source,
            HOST,
            self._pull_into,
            TransferOptions(engine=engine),
        )
        assert (await notification).outcomes[0].engines == (engine,)

    async def _push(self, engine: str) -> None:
        there = RemoteBlocks(layout=self._layout, blocks=self._push_into)
        notification = self.worker.execute_remote_offload(HOST, self._push_from, there, TransferOptions(engine=engine))
        assert (await notification).outcomes[0].engines == (engine,)

    async def _check_pull(self) -> None:
        await self._compare(self._pull_from)

    async def _check_push(self) -> None:
        # What was pushed is known only once it has come back.
        await self._pull("grpc", self._push_into)
        await self._compare(self._push_from - len(self.data))

    async def _check_both(self) -> None:
        await self._check_pull()
        await self._check_push()

    async def _compare(self, expected: Ids) -> None:
        await agents.check(self.worker, HOST, self._pull_into, self.data, expected)


@contextlib.asynccontextmanager
async def stage(
    folder: Path, count: int, block_bytes: int, engines: tuple[str, ...], tls: Certificates | None = None
) -> AsyncIterator[Stage]:
    layouts = [agents.entry(2 * count, block_bytes)]
    flags = tls.flags if tls else ()
    async with contextlib.AsyncExitStack() as stack:
        agent = stack.enter_context(agents.agent(folder, layouts, engines, *flags))
        client_tls = tls.client if tls else None
        worker = await stack.enter_async_context(agents.local_worker(folder, engines, client_tls))
        await worker.allocate(HOST, agents.geometry(2 * count, block_bytes))
        peer = await agents.connect(worker, agent.word(), client_tls)
        made = Stage(agent, worker, peer, agents.pattern(count, block_bytes))
        await made.fill()
        yield made
