"""The example worker in Python: what it says when it fails."""

import importlib.util
import threading
from types import ModuleType
from typing import Any

import grpc
import pytest

from tests.unit.test_layers import ROOT


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_client", ROOT / "examples/clients/python/worker.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_gone", [True, False], ids=["the coordinator is gone", "the coordinator is there"])
def test_why_a_run_failed_is_not_hidden_by_the_goodbye(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, is_gone: bool
):
    said: list[Any] = []

    class Stub:
        def Leave(self, request: Any, **_: Any) -> None:  # noqa: N802
            said.append(request)
            if is_gone:
                raise grpc.RpcError("failed to connect to all addresses")

    def fail() -> None:
        raise RuntimeError("this example does not evaluate")

    with grpc.insecure_channel("127.0.0.1:1") as channel:
        worker = program.Worker(channel, "token", "ant")
        monkeypatch.setattr(worker, "_stub", Stub())
        monkeypatch.setattr(worker, "_follow_assignments", fail)
        heart = threading.Thread(target=lambda: None)
        heart.start()
        monkeypatch.setattr(worker, "_join", lambda: heart)
        with pytest.raises(RuntimeError, match="does not evaluate"):
            worker.run()
    [leave] = said
    # Parameters of a worker that failed are not those of the run.
    assert (leave.reason, leave.parameters_sha256) == ("the worker failed", "")
