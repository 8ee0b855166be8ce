"""gRPC's own lines don't get into our processes' logs, unless somebody asks for them."""

import subprocess
import sys

import pytest

from tests.support.coordinator import environment

LOOK = """
import os, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))

sys.meta_path.insert(0, Look())
"""


def verbosity(module: str, **extra: str) -> str:
    """What gRPC is told when a module loads it."""
    code = f"{LOOK}\nimport {module}"
    given = {name: value for name, value in environment(**extra).items() if name != "GRPC_VERBOSITY" or name in extra}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=given, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["coordinator_service.server", "coordinator_service.status_command", "worker_agent.client"]
)
def test_it_is_told_to_write_errors_only(module: str):
    assert verbosity(module) == "ERROR"


def test_what_somebody_has_set_stays():
    assert verbosity("coordinator_service.status_command", GRPC_VERBOSITY="debug") == "debug"
