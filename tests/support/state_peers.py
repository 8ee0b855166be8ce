"""Workers that publish a train state and workers that are handed one, without a run: in this process or as programs."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ayni.blocks.metadata import WorkerMetadata
from ayni.endpoints import ClientTls, ServerTls
from ayni.run_config import StateConfig
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.coordinator import ROOT, TOKEN, environment
from worker_agent.assignment_frames import StateOffer
from worker_agent.blocks_config import BlocksConfig
from worker_agent.bridge import Bridge, shared
from worker_agent.onboarding import Onboarding, RelayConfig
from worker_agent.serving import BlockService, ServiceConfig, block_service
from worker_agent.train_state import TrainState
from worker_agent.train_state_format import MODEL

RUN_ID = "handed"
BLOCK_BYTES = 1 << 16
LIMIT_S = 30.0


def tensors_of(steps: int, num_elements: int = 100_000) -> dict[str, torch.Tensor]:
    """A state that only so many steps lead to."""
    generator = torch.Generator().manual_seed(steps)
    return {
        "parameter/weight": torch.randn(num_elements, generator=generator),
        "parameter/bias": torch.randn(7, generator=generator).to(torch.float16),
        "optimizer/steps": torch.tensor(steps),
    }


def facts_of(steps: int) -> dict[str, str]:
    return {"completed_steps": str(steps), "seed": "0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePeer:
    """A worker that serves blocks and has a place for a train state."""

    network: Bridge
    service: BlockService
    state: TrainState

    def publish(self, steps: int, num_elements: int = 100_000) -> None:
        self.state.publish(tensors_of(steps, num_elements), facts_of(steps))

    def metadata(self) -> WorkerMetadata:
        (metadata,) = self.network.wait(self.service.worker.export_metadata(), LIMIT_S, "metadata")
        return metadata

    def offer(self, steps: int, offer_id: int = 1, **changes: Any) -> StateOffer:
        """What a coordinator would offer of this worker's state."""
        fields: dict[str, Any] = {"worker_id": 0, "worker_name": "ant", "metadata": self.metadata(), **changes}
        return StateOffer(offer_id=offer_id, completed_steps=steps, **fields)

    def onboarding(self, within_s: float = LIMIT_S, coordinator: str = "", session: str = "") -> Onboarding:
        relay = RelayConfig(coordinator=coordinator, relays=self.service.relays, session=lambda: session)
        return Onboarding(self.network, self.state, relay, timedelta(seconds=within_s))


@contextlib.contextmanager
def state_peer(folder: Path, *engines: str, config: StateConfig | None = None) -> Iterator[StatePeer]:
    """A worker in this process; its network runs on the bridge's thread."""
    network = shared()
    service = block_service(
        ServiceConfig(
            listen="127.0.0.1:0",
            token=TOKEN,
            blocks=BlocksConfig(root=folder, engines=engines or ("grpc",)),
            tls=ClientTls(),
            server_tls=ServerTls(),
            insecure=False,
            model=MODEL,
        )
    )
    entered = network.wait(service.__aenter__(), LIMIT_S, "a service")
    state = TrainState(network, entered.worker, config or StateConfig(block_bytes=BLOCK_BYTES), RUN_ID)
    try:
        yield StatePeer(network=network, service=entered, state=state)
    finally:
        network.wait(service.__aexit__(None, None, None), LIMIT_S, "the end of a service")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateProgram:
    """A worker in a process of its own that has published a state."""

    process: subprocess.Popen
    address: str

    def offer(self, steps: int, offer_id: int = 1) -> StateOffer:
        metadata = shared().wait(_exported(self.address), LIMIT_S, "metadata")
        return StateOffer(offer_id=offer_id, completed_steps=steps, worker_id=0, worker_name="ant", metadata=metadata)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def state_program(folder: Path, steps: int, num_elements: int, *engines: str) -> Iterator[StateProgram]:
    settings = {"folder": str(folder), "steps": steps, "num_elements": num_elements, "engines": engines}
    command = [sys.executable, "-m", "tests.support.state_peers", json.dumps(settings)]
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address, "the peer did not start"
        yield StateProgram(process=process, address=address)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


async def _exported(address: str) -> WorkerMetadata:
    stub = GrpcBlockWorker.dial(address, TOKEN)
    try:
        (metadata,) = await asyncio.wait_for(stub.export_metadata(), LIMIT_S)
    finally:
        await stub.close()
    return metadata


def _main(settings: dict[str, Any]) -> None:
    with state_peer(Path(settings["folder"]), *settings["engines"]) as peer:
        peer.publish(settings["steps"], settings["num_elements"])
        print(peer.service.worker.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
