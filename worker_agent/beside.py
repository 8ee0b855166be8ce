"""A coordinator that is started beside a worker or a driver, as a process of its own, and ends when they do.  [shell]

For launchers that start the same command everywhere and nothing else. The two die together: the kernel tells the
coordinator when its starter is killed, so that the next attempt finds neither a taken port nor a locked store. Only
SIGTERM reaches it from here, which suspends the run, unless the run is over.
"""

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ayni.endpoints import Address, parse_address
from ayni.process import DONE, FAILED, WRONG_USE, load_yaml
from ayni.settings import SettingsError
from worker_agent.config import WorkerConfig

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""Longest time until it listens."""
_AGAIN_SECONDS = 40.0
"""How long to try where an attempt before this one may not have ended yet."""
_PAUSE_SECONDS = 1.0
_FAREWELL_SECONDS = 60.0
"""Longest time that it takes to end by itself after the run: it waits for the other workers to leave."""
_SIGNAL_SECONDS = 2.0
"""A launcher may have told it to stop when it told this process; a second signal would end it at once."""
_STOP_SECONDS = 30.0

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideConfig:
    """What a coordinator is started with."""

    run: Path
    """The run file."""
    coordinator: str
    """The address under which others dial it."""
    world_size: int | None
    """How many workers were started; None: not known."""
    token_file: Path | None
    insecure: bool
    log_format: str
    log_level: str
    is_again: bool = False
    """Whether the one of an attempt before this one may not have ended yet."""


def beside_config(config: WorkerConfig) -> BesideConfig:
    """Returns what a worker with rank 0 starts its coordinator with."""
    assert config.launch.run
    return BesideConfig(
        run=config.launch.run,
        coordinator=config.coordinator,
        world_size=config.launch.world_size,
        token_file=config.token_file,
        insecure=config.insecure,
        log_format=config.log_format,
        log_level=config.log_level,
        is_again=config.launch.attempt > 0,
    )


def with_coordinator(config: BesideConfig, work: Callable[[], int]) -> int:
    """Does some work with a coordinator beside it; returns the exit code.

    Args:
        config: what to start it with.
        work: returns 0 when the run is over, and the coordinator may take its time to end.

    Raises:
        ChildProcessError: the coordinator did not start. It has said why.
        SettingsError: the run file can't be read, or the coordinator ended because of wrong use. It has said why.
    """
    process = _start_patiently(config)
    code = FAILED
    try:
        code = work()
    finally:
        ended = _end(process, _FAREWELL_SECONDS if code == DONE else _SIGNAL_SECONDS)
    if code == DONE and ended != DONE:
        _log.error(
            "the run is over here, but the coordinator beside it ended with code %d; what it said is above", ended
        )
        return FAILED
    return code


def command(config: BesideConfig, start_workers: int | None) -> list[str]:
    """Returns the command line of the coordinator; the token is never in it, only the name of its file."""
    result = [sys.executable, "-m", "coordinator_service", "--config", str(config.run)]
    result += ["--listen", str(listen_address(config.coordinator))]
    for flag, value in (
        ("--start-workers", start_workers),
        ("--token-file", config.token_file),
        ("--log-format", config.log_format if config.log_format != "text" else None),
        ("--log-level", config.log_level if config.log_level != "info" else None),
    ):
        result += [flag, str(value)] if value is not None else []
    return [*result, "--insecure"] if config.insecure else result


def listen_address(coordinator: str) -> Address:
    """Returns where a coordinator listens that others dial under an address: there, or on all interfaces."""
    address = parse_address(coordinator)
    if address.is_loopback:
        return address
    return Address(host="::" if ":" in address.host else "0.0.0.0", port=address.port)


def _start_patiently(config: BesideConfig) -> "subprocess.Popen[str]":
    """Starts it; tries again for a while where the one of an attempt before may still hold port and store."""
    deadline = time.monotonic() + (_AGAIN_SECONDS if config.is_again else 0.0)
    while True:
        try:
            return _start(config)
        except ChildProcessError as error:
            if time.monotonic() >= deadline:
                raise
            _log.warning("%s; the one of the attempt before may not have ended yet: trying again", error)
            time.sleep(_PAUSE_SECONDS)


def _start(config: BesideConfig) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        command(config, _start_workers(config.run, config.world_size)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        # A signal to the process group of this worker is passed on from here, once.
        start_new_session=True,
        preexec_fn=_ending_with_starter(),
    )
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    line = process.stdout.readline() if ready else ""
    process.stdout.close()
    if not line.startswith("listening on "):
        code = _end(process, _SIGNAL_SECONDS)
        sentence = (
            f"the coordinator of run file {config.run}, which had to be started here, did not listen "
            f"within {_START_SECONDS:.0f} s or ended, with code {code}; what it said is above"
        )
        raise SettingsError(sentence) if code == WRONG_USE else ChildProcessError(sentence)
    _log.info("started the coordinator beside this process: process %d, %s", process.pid, line.strip())
    return process


def _start_workers(run: Path, world_size: int | None) -> int | None:
    """Returns how many workers the run has to wait for where it does not say so itself: all that were started."""
    is_said = "start_workers" in load_yaml(run) or "AYNI_START_WORKERS" in os.environ
    return None if is_said else world_size


def _environment() -> dict[str, str]:
    # Those of the worker name what it shows and trusts as a client; the run file names the coordinator's.
    return {name: value for name, value in os.environ.items() if not name.startswith("AYNI_TLS_")}


def _ending_with_starter() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: "subprocess.Popen[str]", patience: float) -> int:
    """Waits for the process to end, tells it to, and at last kills it; returns its exit code."""
    for seconds, then in ((patience, signal.SIGTERM), (_STOP_SECONDS, signal.SIGKILL)):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(then)
    return process.wait(_STOP_SECONDS)
