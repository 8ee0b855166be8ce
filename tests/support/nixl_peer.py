"""A worker reduced to its lent memory and engine "nixl", as a program.

It prints what it exports, then obeys: "read" prints all bytes of its blocks as a digest, "heard" the numbers it was
told. Traffic stays on loopback.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from tests.support.block_peer import HANDLE, INSTANCE, descriptor, filled
from worker_agent.blocks.engines.nixl_agent import NixlSettings
from worker_agent.blocks.engines.nixl_engine import NixlEngine
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory

ROOT = Path(__file__).parents[2]
NEEDED = pytest.mark.skipif(
    not (os.environ.get("CI") or any(map(find_spec, ("nixl", "nixl_cu12", "nixl_cu13")))),
    reason="NIXL is not installed: the extras nixl-cu12 and nixl-cu13 bring it",
)
"""In continuous integration what is missing is a failure."""
LOOPBACK = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}
TCP = LOOPBACK | {"UCX_TLS": "tcp"}


def digest(memory: Any) -> str:
    return hashlib.sha256(b"".join(buffer.tobytes() for buffer in memory.buffers)).hexdigest()


def worker(geometry: Geometry, export: EngineExport) -> WorkerMetadata:
    """Returns what a worker with one layout exports."""
    return WorkerMetadata(
        instance_id=INSTANCE,
        epoch=1,
        rank=0,
        owner_id=HANDLE.owner_id,
        incarnation=1,
        address="",
        layouts=(descriptor(geometry),),
        engines=(export,),
    )


class Program:
    """The peer as a process."""

    def __init__(self, geometry: Geometry, environment: dict[str, str], seed: int = 1, hears: bool = False) -> None:
        settings = {
            "config": dataclasses.asdict(geometry.config),
            "kind": geometry.kind.value,
            "order": geometry.axis_order.value,
            "seed": seed,
            "hears": hears,
        }
        command = [sys.executable, "-m", "tests.support.nixl_peer", json.dumps(settings)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment | {"PYTHONPATH": paths},
            cwd=ROOT,
        )
        said = json.loads(self._line())
        self.export = EngineExport(name="nixl", version=1, data=bytes.fromhex(said["data"]), crc32=said["crc32"])
        self.metadata = worker(geometry, self.export)

    def ask(self, word: str) -> Any:
        """Returns the answer to a word."""
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait()}"
        return line

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _answer(word: str, memory: Memory, heard: list[int]) -> Any:
    return {"read": lambda: digest(memory), "heard": lambda: heard}[word]()


async def _main() -> None:
    settings = json.loads(sys.argv[1])
    geometry = Geometry(
        config=LayoutConfig(**settings["config"]),
        kind=LayoutKind(settings["kind"]),
        axis_order=AxisOrder(settings["order"]),
    )
    memory, heard = filled(geometry, settings["seed"]), list[int]()
    engine = NixlEngine(NixlSettings())
    if settings["hears"]:
        engine.on_notify = heard.append
    engine.register(HANDLE, memory)
    export = engine.export()
    assert export
    print(json.dumps({"data": export.data.hex(), "crc32": export.crc32}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(_answer(line.strip(), memory, heard)), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
