"""Secrets show nowhere: a run over mTLS at debug level, with refusals of all kinds; all that it wrote is searched."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from ayni import PROTOCOL_VERSION
from ayni.channels import HeaderChannel, open_channel
from ayni.endpoints import ClientTls
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from scripts import make_certs
from tests.support.agents import TOY, agent
from tests.support.coordinator import TOKEN, coordinator, environment

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 3,
    "min_workers": 2,
    "task": {"name": TOY},
    "batch": {"samples": 10, "microbatches": 5},
    "timeouts": {"shutdown": "5s"},
}
OTHER_TOKEN = "another-token-for-tests"
WORD = "hunter2-and-some-more"
CREDENTIALS = {"AWS_SECRET_ACCESS_KEY": WORD, "AWS_ACCESS_KEY_ID": "somebody"}

PATIENCE = 100.0

_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""What the secret of a membership looks like; hashes are longer."""


def certificates(folder: Path, *workers: str) -> Path:
    names = [argument for name in workers for argument in ("--worker", name)]
    assert make_certs.main(["--out", str(folder), "--host", "127.0.0.1", *names]) == 0
    return folder


def server_flags(certs: Path) -> list[str]:
    files = {"certificate": "server.pem", "key": "server.key", "client-ca": "ca.pem"}
    return [part for name, file in files.items() for part in (f"--tls-{name}", str(certs / file))]


def client_flags(certs: Path, worker: str) -> list[str]:
    files = {"ca": "ca.pem", "certificate": f"worker-{worker}.pem", "key": f"worker-{worker}.key"}
    return [part for name, file in files.items() for part in (f"--tls-{name}", str(certs / file))]


def key_lines(certs: Path) -> set[str]:
    """The lines of the private keys."""
    texts = [path.read_text() for path in certs.glob("*.key")]
    return {line for text in texts for line in text.splitlines() if not line.startswith("-----")}


class Provocateur:
    """A member that is refused in as many ways as there are, and keeps all that it was told."""

    def __init__(self, channel: HeaderChannel) -> None:
        self._channel = channel
        self._stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self.told: list[str] = []
        self.session = ""

    async def provoke(self) -> None:
        asked: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "worker_name": "cat", "backend": "cpu"}
        joined = await self._stub.Join(pb.JoinRequest(**asked, join_nonce="n"), timeout=20)
        self.session = joined.session
        await self._refused(self._stub.Join(pb.JoinRequest(**asked, join_nonce="other"), timeout=20))
        await self._refused(self._stub.Join(pb.JoinRequest(**asked | {"run_id": "other"}), timeout=20))
        for session in (self.session, self.session[:-1], f"{self.session} ", ""):
            self._channel.headers["ayni-session"] = session
            for request in (pb.HeartbeatRequest(worker_id=77), pb.HeartbeatRequest(worker_id=joined.worker_id)):
                await self._refused(self._stub.Heartbeat(request, timeout=20))
            await self._refused(self._stub.CommitStep(pb.CommitStepRequest(worker_id=joined.worker_id), timeout=20))
        for token in (TOKEN[:-1], TOKEN.upper()):
            await self._refused(self._stub.GetRun(pb.GetRunRequest(), metadata=(("authorization", f"Bearer {token}"),)))
        self.told.append(str(await self._stub.GetRun(pb.GetRunRequest(), timeout=20)))
        self._channel.headers["ayni-session"] = self.session
        await self._stub.Leave(pb.LeaveRequest(worker_id=joined.worker_id), timeout=20)

    async def _refused(self, call: Any) -> None:
        try:
            self.told.append(str(await call))
        except grpc.aio.AioRpcError as error:
            self.told.append(f"{error.details()} {error.trailing_metadata()!r} {error!r}")


async def provoke(address: str, certs: Path) -> Provocateur:
    tls = ClientTls(ca=certs / "ca.pem", certificate=certs / "worker-cat.pem", key=certs / "worker-cat.key")
    async with open_channel(address, TOKEN, tls) as channel:
        provocateur = Provocateur(channel)
        await provocateur.provoke()
    return provocateur


@pytest.mark.timeout(300)
def test_no_secret_is_in_a_log_a_refusal_or_a_file_that_a_run_leaves(tmp_path: Path):
    certs = certificates(tmp_path / "certs", "ant", "bee", "cat")
    runs = tmp_path / "runs"
    debug = ("--log-level", "debug")
    with coordinator(runs / "coordinator", RUN, *server_flags(certs), *debug) as server:
        cat = asyncio.run(asyncio.wait_for(provoke(server.address, certs), PATIENCE))
        flags = {name: (*client_flags(certs, name), *debug) for name in ("ant", "bee")}
        with agent(server.address, "dog", runs / "dog", *flags["ant"], AYNI_TOKEN=OTHER_TOKEN) as dog:
            assert dog.end(PATIENCE) != 0
        with (
            agent(server.address, "ant", runs / "ant", *flags["ant"], **CREDENTIALS) as ant,
            agent(server.address, "bee", runs / "bee", *flags["bee"], "--log-format", "json", **CREDENTIALS) as bee,
        ):
            assert (ant.end(PATIENCE), bee.end(PATIENCE)) == (0, 0), ant.read_log() + bee.read_log()
        assert server.process.wait(PATIENCE) == 0, server.read_log()
    logs = {worker.name: worker.read_log() for worker in (ant, bee, dog)} | {"coordinator": server.read_log()}
    assert any(" DEBUG " in log for log in logs.values()), "nothing was said at debug level"
    assert len(cat.told) > 10
    assert any("TOKEN_REFUSED" in text for text in cat.told)
    texts = logs | {f"told {number}": text for number, text in enumerate(cat.told[1:])}
    files = {str(path): path.read_bytes().decode("latin-1") for path in runs.rglob("*") if path.is_file()}
    secrets = {TOKEN, OTHER_TOKEN, WORD, *key_lines(certs)}
    for name, text in (texts | files).items():
        assert not [secret for secret in secrets if secret in text], f"a secret is in {name}"
        assert cat.session not in text, f"a session is in {name}"
    for name, log in logs.items():
        assert "earer" not in log, f"{name} logs a header"
        assert not _HEX.findall(log), f"{name} logs what may be the secret of a membership"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path, level: str):
    pytest.importorskip("psycopg")
    address = f"postgresql://ayni:{WORD}@127.0.0.1:1/runs"
    for flags in ((), ("--print-config",)):
        command = [sys.executable, "-m", "coordinator_service", "--run-id", "x", "--num-steps", "1", *flags]
        result = subprocess.run(
            [*command, "--database", address, "--log-level", level],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "127.0.0.1:1" in result.stdout + result.stderr
        assert WORD not in result.stdout + result.stderr
        assert TOKEN not in result.stdout + result.stderr
