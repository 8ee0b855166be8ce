"""The same blocks by Mooncake's transfer engine over TCP, and by our gRPC engine, in one run.

As a program it is the other end: `python blocks_mooncake.py COUNT BLOCK_BYTES` prints "listening on SESSION/ADDRESS".
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import blocks_agents as agents
from tests.bench.blocks_measure import CPU_UNIT, CaseResult, Contender, Scale, blocking, compared, limited, measure
from tests.bench.blocks_remote import COUNT, SIZES, repeats, size_text
from tests.bench.blocks_stage import stage
from tests.bench.processes import Program
from worker_agent.blocks.memory import Bytes

LARGEST_BATCH = 2048
"""Requests; it refuses more without a reason."""
_GOAL = 1.2


async def mooncake(folder: Path, scale: Scale) -> CaseResult:
    result = CaseResult()
    try:
        import mooncake.engine
    except ImportError as error:
        result.skip("mooncake", f"mooncake-transfer-engine-non-cuda can't be loaded: {error}")
        return result
    for block_bytes in SIZES:
        count = scale.count(COUNT)
        place = folder / str(block_bytes)
        async with stage(place, count, block_bytes, ("grpc",)) as two:
            command = [str(Path(__file__)), str(count), str(block_bytes)]
            with Program.start("mooncake", command, place) as program:
                session, _, address = program.word().partition("/")
                reader = Reader(mooncake.engine.TransferEngine(), session, int(address), two.data)
                contenders = [reader.contender(program.pid), two.pulling("grpc")]
                samples = await measure(contenders, repeats(scale, block_bytes))
        size = size_text(count, block_bytes)
        ours, theirs = samples["grpc pull"], samples["mooncake"]
        result.rows += [
            compared(f"grpc pull, {size}", ours.rate, "mooncake over tcp", theirs.rate, "GB/s", _GOAL),
            compared(f"grpc pull, {size}", ours.cpu_per_gb, "mooncake over tcp", theirs.cpu_per_gb, CPU_UNIT),
            limited(f"mooncake pull over tcp, {size}", theirs.cpu_per_gb, CPU_UNIT),
        ]
        result.keep(f"mooncake {size}", samples)
    return result


@dataclass
class Reader:
    """This end: reads all blocks of the other one into its own, to shuffled places."""

    engine: Any
    session: str
    address: int
    data: Bytes
    """What the other end has."""

    def __post_init__(self) -> None:
        start(self.engine)
        self.out = np.zeros_like(self.data)
        register(self.engine, self.out)
        count, block_bytes = self.data.shape
        self.source, self.destination = (agents.shuffled(count, seed) for seed in (1, 2))
        self.lengths = [block_bytes] * min(count, LARGEST_BATCH)

    def contender(self, pid: int) -> Contender:
        return Contender(
            name="mooncake",
            num_bytes=self.data.nbytes,
            prepare=blocking(self._roll),
            work=blocking(self._read),
            check=blocking(self._check),
            pids=(pid,),
        )

    def _roll(self) -> None:
        self.destination = np.roll(self.destination, 1)

    def _read(self) -> None:
        size = self.data.shape[1]
        for first in range(0, len(self.data), LARGEST_BATCH):
            places = slice(first, first + LARGEST_BATCH)
            here = (self.out.ctypes.data + self.destination[places] * size).tolist()
            there = (self.address + self.source[places] * size).tolist()
            code = self.engine.batch_transfer_sync_read(self.session, here, there, self.lengths[: len(here)])
            assert code == 0, f"mooncake's read failed with {code}"

    def _check(self) -> None:
        assert all(map(np.array_equal, self.out[self.destination], self.data[self.source])), "mooncake read other bytes"


def start(engine: Any) -> None:
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert code == 0, f"mooncake did not start: {code}"


def register(engine: Any, data: Bytes) -> None:
    code = engine.register_memory(data.ctypes.data, data.nbytes)
    assert code == 0, f"mooncake did not register memory: {code}"


def _serve(count: int, block_bytes: int) -> None:
    import mooncake.engine

    engine, data = mooncake.engine.TransferEngine(), agents.pattern(count, block_bytes)
    start(engine)
    register(engine, data)
    print(f"listening on 127.0.0.1:{engine.get_rpc_port()}/{data.ctypes.data}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
