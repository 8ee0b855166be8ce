"""Members of torch groups: in this process, or each in a process of its own that does what it is told.

A process prints where its store is, then reads one JSON object a line and answers each with one: {"group": [addresses],
"generation": G} makes it member `--rank` of a group; {"reduce": {...}} has it bring one bucket, and says what came out.
"""

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

# Has an effect where torch is not loaded yet. The names of C++ frames, which it saves, take seconds to find.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))

from ayni.errors import AyniError
from ayni.step_values import ExchangeGroup, GroupMember
from tests.support.torch_offers import offer
from worker_agent.changes import Change
from worker_agent.contributions import Offer
from worker_agent.exchange import Outcome
from worker_agent.group_exchange import Brought
from worker_agent.slice_offers import Moment, Terms
from worker_agent.torch_exchange import TorchConfig, TorchExchange
from worker_agent.torch_store import RendezvousStore

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0


def group_of(stores: Sequence[str], generation: int = 1, secret: str = "5ec2e7") -> ExchangeGroup:
    """Members 10, 11, ... by rank."""
    members = tuple(
        GroupMember(worker_id=10 + rank, worker_name=f"worker-{rank}", is_owner=True, store_address=store)
        for rank, store in enumerate(stores)
    )
    return ExchangeGroup(generation=generation, topology="torch", members=members, secret=secret, chunk_bytes=1 << 20)


def terms_of(group: ExchangeGroup, place: int, step: int = 0, attempt: int = 0) -> Terms:
    """What the member at a place was told."""
    moment = Moment(generation=group.generation, epoch=1, step=step, attempt=attempt)
    return Terms(moment=moment, group=group, worker_id=10 + place, wire_type="float32", num_microbatches=1)


def brought(offer: Offer, on_sent: Callable[[], None] = lambda: None) -> Brought:
    return Brought(offer=offer, has_mean=False, on_sent=on_sent)


@dataclass
class Members:
    """Members of one group in this process, by rank."""

    exchanges: list[TorchExchange] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    broken: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Rank, generation and suspects of each group that was said to be broken."""
    change: Change = field(default_factory=Change)
    """Announced with each."""

    def regroup(self, ranks: Sequence[int], generation: int) -> None:
        """Has some of them form a group, in this order."""
        group = group_of([self.stores[rank] for rank in ranks], generation)
        for place, rank in enumerate(ranks):
            self.exchanges[rank].regroup(terms_of(group, place))

    async def reduce(self, rank: int, offer: Offer) -> Outcome:
        """Has one of them bring something."""
        return await self.exchanges[rank].reduce(brought(offer))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(exchange.close() for exchange in self.exchanges))


def members(count: int, **changes: Any) -> Members:
    """Members without a group. Call on the event loop."""
    made = Members()

    def note(rank: int, generation: int, suspects: Sequence[int]) -> None:
        made.broken.append((rank, generation, list(suspects)))
        made.change.announce()

    for rank in range(count):
        store = RendezvousStore("127.0.0.1")
        config = TorchConfig(**{"worker_name": f"worker-{rank}", "build_s": 10.0, "reduce_s": 20.0, **changes})
        made.exchanges.append(TorchExchange(config, store, partial(note, rank)))
        made.stores.append(store.address)
    return made


@dataclass
class Member:
    """A member in a process of its own."""

    process: subprocess.Popen
    store: str = ""
    unread: bytes = b""

    @classmethod
    def start(cls, rank: int, reduce_s: float, failpoints: str = "") -> Self:
        command = [sys.executable, __file__, "--rank", str(rank), "--reduce-s", str(reduce_s)]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        others = {"OMP_NUM_THREADS": "1", "AYNI_FAILPOINTS": failpoints}
        environment = {**os.environ, **paths, **others}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )
        return cls(process)

    def ready(self) -> Self:
        """Waits until its store is open."""
        self.store = self.answer()["store"]
        return self

    def tell(self, **what: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        """Returns the next line; not through a file of Python's, which may hold a line that no select sees."""
        assert self.process.stdout
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            ready, _, _ = select.select([pipe], [], [], seconds)
            assert ready, f"a member said nothing for {seconds:g} s"
            read = os.read(pipe, 1 << 16)
            assert read, "a member has ended"
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Has it end by itself; returns its exit code."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


async def _live(rank: int, reduce_s: float) -> None:
    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    store = RendezvousStore("127.0.0.1")
    config = TorchConfig(worker_name=f"worker-{rank}", build_s=10.0, reduce_s=reduce_s)
    exchange = TorchExchange(config, store, lambda generation, ids: say(broken=generation))
    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task] = set()

    async def reduce(given: dict[str, Any]) -> None:
        own = offer(*given.pop("range"), **given)
        try:
            outcome = await exchange.reduce(brought(own, lambda: say(sent=own.assignment.step)))
        except AyniError as error:
            say(error=error.reason, detail=error.message)
        else:
            say(mean=float(own.out[-1]), weight=outcome.total_weight)

    say(store=store.address)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        told = json.loads(line)
        if "group" in told:
            place = told["group"].index(store.address)
            exchange.regroup(terms_of(group_of(told["group"], told["generation"]), place))
        if "reduce" in told:
            pending.add(asyncio.create_task(reduce(told["reduce"])))
    await exchange.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--reduce-s", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(_live(given.rank, given.reduce_s))


if __name__ == "__main__":
    main()
