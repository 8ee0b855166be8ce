"""mTLS: a worker joins under a name of its certificate, and under no other."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from ayni import PROTOCOL_VERSION
from ayni.channels import open_channel
from ayni.endpoints import ClientTls
from ayni.errors import IdentityRefused
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc
from scripts import make_certs
from tests.support.coordinator import RUN, TOKEN, coordinator


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    names = ["--worker", "ant", "--worker", "bee.example.org"]
    assert make_certs.main(["--out", str(folder), "--host", "127.0.0.1", *names]) == 0
    assert make_certs.main(["--out", str(folder), "--ca", str(folder), "--worker", "late"]) == 0
    return folder


def test_who_makes_certificates_is_told_what_each_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_certs.main(["--out", str(tmp_path), "--host", "127.0.0.1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"status command: --tls-certificate {tmp_path}/client.pem --tls-key {tmp_path}/client.key" in said
    assert said[-1].startswith("worker: ")
    assert said[-1].endswith(f"--ca {tmp_path} --worker NAME")


def server_flags(certs: Path, *, mutual: bool = True) -> list[str]:
    own = ["--tls-certificate", str(certs / "server.pem"), "--tls-key", str(certs / "server.key")]
    return [*own, "--tls-client-ca", str(certs / "ca.pem")] if mutual else own


async def join(address: str, certs: Path, certificate: str, worker_name: str) -> pb.JoinResponse:
    own: dict[str, Any] = (
        {"certificate": certs / f"{certificate}.pem", "key": certs / f"{certificate}.key"} if certificate else {}
    )
    async with open_channel(address, TOKEN, ClientTls(ca=certs / "ca.pem", **own)) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION, worker_name=worker_name, join_nonce=worker_name, backend="cpu"
        )
        return await stub.Join(request, timeout=20)


async def members(address: str, certs: Path) -> list[str]:
    own: dict[str, Any] = {"certificate": certs / "client.pem", "key": certs / "client.key"}
    async with open_channel(address, TOKEN, ClientTls(ca=certs / "ca.pem", **own)) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        answer = await stub.GetRun(pb.GetRunRequest(), timeout=20)
        return sorted(worker.worker_name for worker in answer.snapshot.workers)


def test_a_certificate_binds_the_name(tmp_path: Path, certs: Path):
    allowed = [
        ("worker-ant", "ant"),
        ("worker-ant", "ant-4711"),
        ("worker-bee.example.org", "bee.example.org-1"),
        ("worker-late", "late"),
    ]
    refused = [("worker-ant", "bee"), ("worker-ant", "antler"), ("client", "cat"), ("worker-late", "ant-2")]
    with coordinator(tmp_path, RUN, *server_flags(certs)) as server:
        for certificate, name in allowed:
            asyncio.run(join(server.address, certs, certificate, name))
        for certificate, name in refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                asyncio.run(join(server.address, certs, certificate, name))
            error = error_from(caught.value)
            assert isinstance(error, IdentityRefused)
            owner = certificate.removeprefix("worker-").replace("client", "ayni client")
            assert error.metadata == {"worker_name": name, "certificate": owner}
        assert asyncio.run(members(server.address, certs)) == sorted(name for _, name in allowed)


def test_binding_can_be_switched_off(tmp_path: Path, certs: Path):
    with coordinator(tmp_path, RUN, *server_flags(certs), "--no-tls-bind-names") as server:
        asyncio.run(join(server.address, certs, "worker-ant", "bee"))
        assert asyncio.run(members(server.address, certs)) == ["bee"]


def test_without_client_certificates_any_name_is_taken(tmp_path: Path, certs: Path):
    with coordinator(tmp_path, RUN, *server_flags(certs, mutual=False)) as server:
        asyncio.run(join(server.address, certs, "", "bee"))
        asyncio.run(join(server.address, certs, "worker-ant", "cat"))
