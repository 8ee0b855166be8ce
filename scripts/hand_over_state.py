"""Shows that a run's state can be handed to a newcomer: the third process goes on where two left off, byte for byte.

Two agents train a run to its end. On the way, after step K, a third process reads their state (parameters, optimizer
moments) out of one agent's host tier, through a leader, and goes on alone, as the only worker of a second coordinator.
Both runs must end with the same parameters. The last line on standard output is one JSON object.

Usage: `python scripts/hand_over_state.py --run runs/pretrain.yaml --steps 30 --at 20`
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.1
_READY = "waiting for"
_LONGEST_WAIT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration, or its third process; returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.from_agent:
        return _go_on(given)
    # A signal unwinds the stack, which ends all processes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _demonstrate(given)
    except KeyboardInterrupt:
        print("hand_over_state: interrupted", file=sys.stderr)
        return 1


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "pretrain.yaml", help="run file (YAML)")
    parser.add_argument("--steps", type=int, default=30, help="steps of the whole run (default: 30)")
    parser.add_argument("--at", type=int, default=20, help="step behind which the state is handed over (default: 20)")
    parser.add_argument("--output-dir", type=Path, default=Path("out/hand-over"), help="folder for state and logs")
    parser.add_argument("--from-agent", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    return parser


def _demonstrate(given: argparse.Namespace) -> int:
    if not given.steps < 2 * given.at < 2 * given.steps:
        text = f"--at ({given.at}) must be more than half of --steps ({given.steps}) and less than it"
        print(f"hand_over_state: {text}: a state is published every --at steps", file=sys.stderr)
        return 2
    output = given.output_dir.resolve()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"hand_over_state: {output} can't be made: {error.strerror}", file=sys.stderr)
        return 2
    os.environ.setdefault("AYNI_TOKEN", secrets.token_urlsafe())
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        start = _Starter(stack, output)
        first = start.coordinator("first", given, 2, "--state-publish-every", str(given.at))
        ant = start.agent("ant", first)
        second = start.coordinator("second", given, 1, "--state-resume-step", str(given.at))
        start.newcomer(second, ant, given)
        # The first run begins now that the newcomer waits for its state. The agents stay until it has been read.
        start.agent("bee", first)
        if start.failed():
            print(f"hand_over_state: a process failed; see {output}", file=sys.stderr)
            return 1
    whole, again = (_final_hash(output, name) for name in ("first", "second"))
    result = {
        "steps": given.steps,
        "handed_over_at": given.at,
        "parameters_sha256": whole,
        "parameters_sha256_of_newcomer": again,
        "identical": bool(whole) and whole == again,
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result), flush=True)
    return 0 if result["identical"] else 1


class _Starter:
    """Starts processes whose logs go into files, and ends them all."""

    def __init__(self, stack: contextlib.ExitStack, output: Path) -> None:
        self._stack, self._output = stack, output
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._agents: list[str] = []

    def coordinator(self, name: str, given: argparse.Namespace, workers: int, *flags: str) -> str:
        command = [
            *("-m", "coordinator_service", "--config", str(given.run), "--run-id", name, "--fresh"),
            *("--num-steps", str(given.steps), "--min-workers", str(workers), "--start-workers", str(workers)),
            *("--state-dir", str(self._output / "state"), *flags),
        ]
        return self._start(f"coordinator-{name}", command)

    def agent(self, name: str, coordinator: str) -> str:
        command = ["-m", "worker_agent", "--coordinator", coordinator, "--name", name, "--serve-after", "1h"]
        self._agents.append(name)
        return self._start(name, [*command, "--output-dir", str(self._output / name), "--no-tensorboard"])

    def newcomer(self, coordinator: str, agent: str, given: argparse.Namespace) -> None:
        """Starts the third process and waits until it is ready to read."""
        options = ["--coordinator", coordinator, "--from-agent", agent, "--at", str(given.at)]
        command = [str(Path(__file__).resolve()), *options, "--output-dir", str(self._output / "newcomer")]
        process = self._spawn("newcomer", command)
        assert process.stdout
        if not any(line.startswith(_READY) for line in iter(process.stdout.readline, "")):
            raise SystemExit(f"hand_over_state: the newcomer did not start; see {self._output / 'newcomer'}.log")

    def failed(self) -> bool:
        """Waits until the coordinators and the newcomer have ended, or one process has failed; says whether one has."""
        began = time.monotonic()
        while time.monotonic() - began < _LONGEST_WAIT_S:
            codes = {name: process.poll() for name, process in self._running.items()}
            if any(codes.values()):
                return True
            if all(code == 0 for name, code in codes.items() if name not in self._agents):
                return self._end_agents()
            time.sleep(_POLL_S)
        return True

    def _end_agents(self) -> bool:
        for name in self._agents:
            self._running[name].terminate()
        return any([self._running[name].wait(_LONGEST_WAIT_S) for name in self._agents])

    def _start(self, name: str, command: list[str]) -> str:
        """Starts a process that says where it listens; returns the address."""
        process = self._spawn(name, command)
        assert process.stdout
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"hand_over_state: {name} did not start; see {self._output / name}.log")
        return line.split()[-1]

    def _spawn(self, name: str, command: list[str]) -> "subprocess.Popen[str]":
        paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
        log = self._stack.enter_context((self._output / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        print(f"started {name}", file=sys.stderr, flush=True)
        self._running[name] = process
        self._stack.callback(_end, process)
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def _final_hash(output: Path, run_id: str) -> str:
    from coordinator_service.store import open_folder

    with contextlib.closing(open_folder(output / "state" / run_id, to_read=True)) as store:
        return str(store.facts().get("final_parameters_sha256", ""))


def _go_on(given: argparse.Namespace) -> int:
    """Joins the second coordinator with the state of the first one's agent."""
    from ayni import logs
    from ayni.process import exit_code_of, load_token
    from ayni.rpc import tune_allocator
    from worker_agent.agent import Agent
    from worker_agent.blocks.worker import LocalBlockWorker
    from worker_agent.bridge import shared
    from worker_agent.config import WorkerConfig
    from worker_agent.train_state import TrainState

    logs.configure("text", "INFO")
    tune_allocator()
    token = load_token()

    def fill(worker: LocalBlockWorker, state: TrainState) -> None:
        num_blocks = shared().wait(_await_state(given.from_agent, token, given.at), _LONGEST_WAIT_S, "the state")
        state.use_layout(num_blocks)
        shared().wait(_onboard(given.from_agent, token, worker, num_blocks), _LONGEST_WAIT_S, "the state's blocks")

    config = WorkerConfig(
        coordinator=given.coordinator, name="newcomer", output_dir=given.output_dir, tensorboard=False
    )
    return exit_code_of(Agent(config, fill).run)


async def _await_state(agent: str, token: str, step: int) -> int:
    """Waits until an agent's host tier holds a state; returns its number of blocks."""
    from coordinator_service.worker_stub import GrpcBlockWorker
    from worker_agent.train_state import PLACE

    stub, said = GrpcBlockWorker.dial(agent, token), False
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S):
            while True:
                (metadata,) = await stub.export_metadata()
                for layout in metadata.layouts:
                    if layout.place == PLACE:
                        return layout.config.num_blocks
                if not said:
                    print(f"{_READY} the agent at {agent} to publish the state behind step {step}", flush=True)
                    said = True
                await asyncio.sleep(_POLL_S)
    finally:
        await stub.close()


async def _onboard(agent: str, token: str, worker: "object", num_blocks: int) -> None:
    """Pulls an agent's published state into this process's host tier, through a leader of a group of one."""
    from coordinator_service.leader import SpmdParallelWorkers
    from coordinator_service.worker_stub import GrpcBlockWorker
    from worker_agent.train_state import PLACE

    stub = GrpcBlockWorker.dial(agent, token)
    leader = SpmdParallelWorkers([worker])  # type: ignore[list-item]
    try:
        await leader.export_metadata()
        metadata = await stub.export_metadata()
        instance = metadata[0].instance_id
        await leader.connect_remote(instance, metadata)
        blocks = range(num_blocks)
        result = await leader.execute_remote_onboard_for_instance(instance, PLACE.tier, blocks, PLACE, blocks)
        engines = ", ".join(result.outcomes[0].engines)
        print(f"onboarded {result.transferred_bytes / 1e6:.1f} MB through engine {engines}", file=sys.stderr)
        await leader.disconnect_remote(instance)
    finally:
        await stub.close()


if __name__ == "__main__":
    sys.exit(main())
