"""What the dashboard answers over HTTP: to whom, what, and how much of it."""

import asyncio
import functools
import importlib.util
import json
import re
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ayni.settings import SettingsError
from coordinator_service.watch.feed import MOST_READERS
from coordinator_service.watch.serving import check_dashboard
from scripts import make_certs
from tests.support.coordinator import RUN, TOKEN, coordinator, environment
from tests.support.watched_run import Watched, watched_run

ROOT = Path(__file__).parents[2]
BEARER = {"Authorization": f"Bearer {TOKEN}"}
WAIT = aiohttp.ClientTimeout(total=30)


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 90))

    return run


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_run(tmp_path_factory.mktemp("watched"), ["ant", "bee", "cat", "dog"]) as run:
        yield run


async def ask(method: str, url: str, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=WAIT) as session,
        session.request(
            method, url, headers={name.replace("_", "-"): value for name, value in headers.items()}
        ) as said,
    ):
        return said.status, await said.text()


@asynchronous
async def test_page_is_whole_and_may_load_nothing_from_elsewhere(watched: Watched) -> None:
    async with aiohttp.ClientSession(timeout=WAIT) as session, session.get(watched.url) as said:
        text, policy = await said.text(), said.headers["Content-Security-Policy"]
    assert said.headers["X-Frame-Options"] == "DENY"
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", text)
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text


@asynchronous
async def test_view_is_what_the_status_command_prints(watched: Watched) -> None:
    _, text = await ask("GET", f"{watched.url}view.json")
    view = json.loads(text)
    command = ["-m", "coordinator_service", "status", watched.coordinator.address, "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment(), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    same = json.loads(printed)
    assert view.keys() == same.keys()
    assert [worker["name"] for worker in view["workers"]] == [worker["name"] for worker in same["workers"]]
    assert same["training"][: len(view["training"][:5])] == view["training"][:5]
    assert view["state"] == "running"


@pytest.mark.parametrize("path", ["checkpoint", "workers/0/drain"])
@asynchronous
async def test_buttons_need_the_token_on_loopback_too(watched: Watched, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"token={TOKEN}"}, {"Authorization": TOKEN}):
        status, text = await ask("POST", watched.url + path, **headers)
        assert status == 401, (headers, text)
    assert (await ask("GET", watched.url + path, **BEARER))[0] == 405
    assert not watched.drained


@asynchronous
async def test_a_site_with_a_name_that_leads_here_sees_nothing(watched: Watched) -> None:
    for path in ("view.json", "events", "metrics"):
        status, text = await ask("GET", watched.url + path, Host="rebound.example.org")
        assert (status, "127.0.0.1" in text) == (401, True), path
        assert (await ask("GET", watched.url + path.replace("events", "view.json"), Host="x.org", **BEARER))[0] == 200


@asynchronous
async def test_what_is_no_worker_or_too_long_is_refused(watched: Watched) -> None:
    status, text = await ask("POST", f"{watched.url}workers/999/drain", **BEARER)
    assert (status, text) == (409, '{"sentence": "worker 999 is no member of the run any more"}')
    for odd in ("-1", "1e3", "99999999999999999999", "%00", ".."):
        assert (await ask("POST", f"{watched.url}workers/{odd}/drain", **BEARER))[0] in (404, 405)
    status, text = await ask("POST", f"{watched.url}checkpoint", **BEARER)
    assert (status, "store_every is 0" in text) == (409, True)


@asynchronous
async def test_health_is_open_and_says_the_state(watched: Watched) -> None:
    assert await ask("GET", f"{watched.url}healthz", Host="anything") == (200, '{"state": "running"}')


@asynchronous
async def test_metrics_have_help_units_and_one_sample_for_each_worker(watched: Watched) -> None:
    status, text = await ask("GET", f"{watched.url}metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {name: family for name, family in families.items() if name.startswith("ayni_")}
    assert all(family.documentation.endswith(".") for family in ours.values())
    counters = [name for name, family in ours.items() if family.type == "counter"]
    assert "ayni_gradient_received_bytes" in counters
    shares = {sample.labels["worker"]: sample.value for sample in ours["ayni_worker_share_ratio"].samples}
    assert shares.keys() == {"ant", "bee", "cat", "dog"}
    assert sum(shares.values()) == pytest.approx(1.0)
    phases = [sample.labels["phase"] for sample in ours["ayni_worker_phase_seconds"].samples]
    assert sorted(set(phases)) == ["apply", "compute", "send", "wait"]
    counted = {
        sample.name: sample.value for sample in ours["ayni_step_duration_seconds"].samples if "le" not in sample.labels
    }
    assert counted["ayni_step_duration_seconds_count"] > 0
    assert "process_resident_memory_bytes" in families


@asynchronous
async def test_every_panel_of_the_grafana_dashboard_shows_metrics_that_there_are(watched: Watched) -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "ayni.json").read_text())
    _, text = await ask("GET", f"{watched.url}metrics")
    names = set(re.findall(r"^(\w+)(?:\{| )", text, re.MULTILINE))
    names |= {"ayni_evaluation_loss", "ayni_evaluation_accuracy_ratio"}  # There once something was evaluated.
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 10
    assert len({panel["id"] for panel in panels}) == len(panels)
    used = {name for expression in asked for name in re.findall(r"\b(?:ayni|process)_\w+", expression)}
    assert used <= names, used - names
    assert all(re.findall(r"\b(?:ayni|process)_\w+", expression) for expression in asked)


@asynchronous
async def test_a_reader_that_takes_nothing_costs_the_others_nothing_and_is_dropped(watched: Watched) -> None:
    host, port = re.findall(r"http://(.*):(\d+)/", watched.url)[0]
    before = json.loads((await ask("GET", f"{watched.url}view.json"))[1])
    stuck = []
    for _ in range(3):
        stopped = socket.create_connection((host, int(port)))
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stopped.sendall(f"GET /events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        stuck.append(stopped)
    try:
        views = await _views(f"{watched.url}events", 4)
        assert views[-1]["committed_steps"] > before["committed_steps"]
    finally:
        for stopped in stuck:
            stopped.close()


@asynchronous
async def test_there_are_no_more_readers_than_may_be(watched: Watched) -> None:
    async with aiohttp.ClientSession(timeout=WAIT, connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*(session.get(f"{watched.url}events") for _ in range(MOST_READERS + 3)))
        assert sorted(answer.status for answer in answers)[-3:] == [503] * 3
        assert [answer.status for answer in answers].count(200) <= MOST_READERS
        for answer in answers:
            answer.close()
    deadline = time.monotonic() + 20
    while (await _status(f"{watched.url}events")) != 200:
        assert time.monotonic() < deadline, "those who left still count"


@asynchronous
async def test_elsewhere_everything_needs_the_token(tmp_path: Path) -> None:
    with coordinator(tmp_path, RUN, "--dashboard", "0.0.0.0:0", "--insecure") as server:
        server.wait_for_log("the dashboard is at ")
        url = server.read_log().partition("the dashboard is at ")[2].split()[0].replace("0.0.0.0", "127.0.0.1")
        for path in ("view.json", "events", "metrics"):
            assert (await ask("GET", url + path))[0] == 401
        assert (await ask("GET", f"{url}metrics", **BEARER))[0] == 200
        assert (await ask("GET", url))[0] == 200  # The page alone, which shows nothing.
        assert (await ask("GET", f"{url}healthz"))[0] == 200


@asynchronous
async def test_with_tls_it_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert make_certs.main(["--out", str(certs), "--host", "127.0.0.1"]) == 0
    flags = ("--tls-certificate", str(certs / "server.pem"), "--tls-key", str(certs / "server.key"))
    with coordinator(tmp_path, RUN, "--dashboard", "0.0.0.0:0", *flags) as server:
        server.wait_for_log("the dashboard is at https://")
        url = server.read_log().partition("the dashboard is at ")[2].split()[0].replace("0.0.0.0", "127.0.0.1")
        trust = ssl.create_default_context(cafile=str(certs / "ca.pem"))
        async with aiohttp.ClientSession(timeout=WAIT) as session:
            async with session.get(f"{url}view.json", headers=BEARER, ssl=trust) as said:
                assert (await said.json())["run_id"] == RUN["run_id"]
            with pytest.raises(aiohttp.ClientError):
                await session.get(url.replace("https:", "http:"))


@asynchronous
async def test_elsewhere_in_clear_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**RUN, "state_dir": str(tmp_path / "state")}))
    command = ["-m", "coordinator_service", "--config", str(config), "--dashboard", "0.0.0.0:0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment(), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"listening on 0.0.0.0:0 without TLS" in said


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    check_dashboard("")
    check_dashboard("127.0.0.1:0")
    with pytest.raises(SettingsError, match="is not an address"):
        check_dashboard("8080")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs aiohttp and prometheus_client: pip install 'ayni\[dashboard\]'"):
        check_dashboard("127.0.0.1:0")


async def _views(url: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(timeout=WAIT, read_bufsize=1 << 22) as session, session.get(url) as said:
        async for line in said.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                break
    return found


async def _status(url: str) -> int:
    async with aiohttp.ClientSession(timeout=WAIT) as session, session.get(url) as said:
        return said.status


async def first_line(watched: Watched, request: str) -> str:
    _, _, address = watched.url.rstrip("/").rpartition("/")
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    line = await reader.readline()
    writer.close()
    return line.decode()


@asynchronous
async def test_headers_that_can_not_be_read_are_no_fault_of_the_server(watched: Watched) -> None:
    status, _ = await ask("GET", f"{watched.url}view.json", Host="127.0.0.1:" + "0" * 5000)
    assert status == 401
    status, _ = await ask("GET", f"{watched.url}metrics", Accept="application/openmetrics-text; version=abc")
    assert status == 200


@asynchronous
async def test_what_is_no_http_does_not_fill_the_log(watched: Watched) -> None:
    for request in ("FOO / HTTP/1.1\r\n\r\n", "POST /checkpoint HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        assert " 400 " in await first_line(watched, request)
    assert "Traceback" not in watched.coordinator.read_log()


@asynchronous
@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_a_reader_of_status_sees_changes_and_may_go(watched: Watched, flags: tuple[str, ...]) -> None:
    command = ["-m", "coordinator_service", "status", watched.coordinator.address, "--watch", *flags]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment(), stdout=pipe, stderr=pipe, limit=1 << 22
    )
    assert process.stdout
    assert process.stderr
    for _ in range(2):
        while b"watched" not in await process.stdout.readline():
            pass
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    assert await process.wait() == 0
    assert await process.stderr.read() == b""
