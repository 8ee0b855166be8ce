"""Signals and exit codes of real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 30.0
"""Seconds for one process."""

SERVICE = """
import asyncio, sys
from ayni.process import run_until_signal

async def serve(stop):
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if {stuck}:
        await asyncio.Event().wait()
    return {code}

sys.exit(run_until_signal(serve))
"""

LOOP = """
import sys
from ayni.process import exit_code_of, on_signal

def work():
    received = []
    with on_signal(received.append):
        print("ready", flush=True)
        while not received:
            pass
    print(received[0], flush=True)

sys.exit(exit_code_of(work))
"""


RAISING = """
import sys
from ayni.process import Stopped, exit_code_of, on_signal

def stop(name):
    raise Stopped(name)

def work():
    with on_signal(stop):
        print("ready", flush=True)
        exec("while True: pass")

sys.exit(exit_code_of(work))
"""


@contextmanager
def started(program: str) -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_signal_sets_the_stop_event(number: signal.Signals, code: int) -> None:
    with started(SERVICE.format(stuck=False, code=code)) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert (out, err) == ("stopping\n", f"{number.name}: stopping; again to exit at once\n")
    assert process.returncode == code


def test_a_second_signal_ends_the_process_at_once() -> None:
    with started(SERVICE.format(stuck=True, code=0)) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 1


def test_a_loop_without_events_learns_the_name_of_the_signal() -> None:
    with started(LOOP) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT)
    assert (out, process.returncode) == ("SIGINT\n", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_code_that_is_text_ends_the_process_with_its_own_code(number: signal.Signals) -> None:
    """Python itself would end it by SIGINT after a KeyboardInterrupt there, caught or not."""
    with started(RAISING) as process:
        process.send_signal(number)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 1
