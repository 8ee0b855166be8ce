"""A coordinator whose state is in a PostgreSQL server: its commits, its ledger, its end when the server is gone."""

import asyncio
import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ayni.errors import Quarantined
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.store import open_database
from tests.support import postgres
from tests.support.coordinator import (
    ROOT,
    RUN,
    coordinator,
    environment,
    make_step,
    microbatches,
    raw_worker,
    raw_workers,
    refusal,
)


@pytest.fixture
def url() -> Iterator[str]:
    with postgres.server().database("coordinator") as url:
        yield url


def command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "coordinator_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT)


def test_a_run_is_kept_in_the_database_and_nowhere_else(url, tmp_path: Path):
    flags = ("--state", url, "--log-level", "debug")
    with coordinator(tmp_path, RUN, *flags) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                await make_step(workers, microbatches(5, 1000))
                for worker in workers:
                    await worker.next_frame()
                refused = await asyncio.to_thread(command, "--config", str(tmp_path / "run.yaml"), *flags)
                await make_step(workers, microbatches(5, 1000))
                for worker in workers:
                    assert (await worker.next_frame()).shutdown.finished
                    await worker.leave()
                return refused

        refused = asyncio.run(scenario())
        assert process.process.wait(20) == 0
        log = process.read_log()
    assert refused.returncode == 1
    assert "another coordinator has postgresql://127.0.0.1" in refused.stderr
    for text in (log, refused.stderr):
        assert postgres.PASSWORD not in text
        assert url not in text
    assert not (tmp_path / "state").exists()
    checked = command("ledger", "--database", url, "--run-id", "raw", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["steps"] == 2


def test_a_step_outlasts_a_lost_connection(url, tmp_path: Path):
    with coordinator(tmp_path, RUN, "--database", url) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                postgres.server().execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ayni coordinator'"
                )
                await make_step(workers, microbatches(5, 1000))

        asyncio.run(scenario())
        log = process.read_log()
    assert "step 0 can't be written, and is tried again: " in log
    assert "connected again to postgresql://127.0.0.1" in log
    assert postgres.PASSWORD not in log
    with contextlib.closing(open_database(url, "raw")) as store:
        assert [record.step for record in store.commits()] == [0]


def test_help_names_the_database():
    result = command("--help")
    assert "--database" in result.stdout
    assert "--state postgresql://... means --database" in " ".join(result.stdout.split())


@contextlib.contextmanager
def cutting(table: str, name: str = "%") -> Iterator[None]:
    """Cuts the connection whenever it writes one row of a table."""
    where = "to_jsonb(new) ->> 'name' LIKE" if table == "facts" else "'' LIKE"
    postgres.server().execute(
        f"CREATE FUNCTION ayni.cut() RETURNS trigger AS $$ BEGIN IF {where} '{name}' THEN "
        "PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN new; END $$ LANGUAGE plpgsql; "
        f"CREATE TRIGGER cut BEFORE INSERT ON ayni.{table} FOR EACH ROW EXECUTE FUNCTION ayni.cut()",
        "coordinator",
    )
    try:
        yield
    finally:
        postgres.server().execute("DROP FUNCTION ayni.cut() CASCADE", "coordinator")


def wait_for_fact(url: str, name: str, value: str) -> None:
    """Waits until the coordinator has written a fact."""
    with contextlib.closing(open_database(url, "raw", to_read=True)) as store:
        deadline = time.monotonic() + 20
        while store.facts().get(name) != value:
            assert time.monotonic() < deadline, store.facts()
            select.select([], [], [], 0.05)


def test_a_membership_waits_for_a_lost_connection(url, tmp_path: Path):
    """Also the number of the worker that joins meanwhile is written later."""

    async def scenario(process):
        async with raw_worker(process.address, "ant") as ant, raw_worker(process.address, "bee") as bee:
            with cutting("facts", "next_worker_id"):
                await ant.join()
                await bee.join()
            with cutting("epochs"):
                for worker in (ant, bee):
                    worker.open_assignments()
                await asyncio.to_thread(process.wait_for_log, "epoch 1 can't be written, and is tried again: ")
                told = await ant.next_frame(waiting=True)
                while "epoch 1 can't be written" not in told.waiting.reason:
                    told = await ant.next_frame(waiting=True)
            for worker in (ant, bee):
                assert (await worker.next_frame()).HasField("assignment")
            await make_step([ant, bee], microbatches(5, 1000))

    with coordinator(tmp_path, RUN, "--database", url) as process:
        asyncio.run(scenario(process))
        assert "the number of worker ant is not kept yet: " in process.read_log()
        wait_for_fact(url, "next_worker_id", "2")


def test_a_worker_is_shut_out_at_once_though_the_connection_is_lost(url, tmp_path: Path):
    run = {**RUN, "min_workers": 1, "start_workers": 2, "non_finite": "quarantine", "quarantine_after": 1}

    async def scenario(address):
        async with raw_workers(address, "ant", "bee") as (ant, bee):
            spoilt = [pb.MicrobatchStats(microbatch=m, loss_sum=0.0, non_finite=True) for m in ant.leased]
            whole = bee.stats(dict.fromkeys(bee.leased, 0))
            await asyncio.gather(ant.commit({}, 0, microbatches=spoilt), bee.commit({}, 0, microbatches=whole))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.next_frame()
            assert isinstance(refusal(caught), Quarantined)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.join()
            assert isinstance(refusal(caught), Quarantined)
            assert (await bee.next_frame()).assignment.step == 1
            await bee.commit({}, 0, microbatches=bee.stats(dict.fromkeys(bee.leased, 0)))
            assert (await bee.next_frame()).shutdown.finished
            await bee.leave()
            return len(spoilt)

    with coordinator(tmp_path, {**run, "timeouts": {"shutdown": "20s"}}, "--database", url) as process:
        with cutting("facts", "shut_out/%"):
            strikes = asyncio.run(scenario(process.address))
            process.wait_for_log("shut_out/ant: kept later: ")
        assert process.process.wait(30) == 0, process.read_log()
    wait_for_fact(url, "shut_out/ant", str(strikes))


@pytest.mark.parametrize("fact", ["finished_steps", "final_parameters_sha256"])
def test_the_end_of_a_run_waits_for_a_lost_connection(url, tmp_path: Path, fact: str):
    async def scenario(process):
        async with raw_workers(process.address, "ant", "bee") as workers:
            await make_step(workers, microbatches(5, 1000))
            for worker in workers:
                await worker.next_frame()
            with cutting("facts", fact):
                await make_step(workers, microbatches(5, 1000))
                if fact == "finished_steps":
                    await asyncio.to_thread(process.wait_for_log, "that the run is finished can't be written, and is ")
                else:
                    await leave(workers)
                    await asyncio.to_thread(process.wait_for_log, f"{fact}, final_parameters_steps: kept later: ")
            if fact == "finished_steps":
                await leave(workers)

    async def leave(workers):
        for worker in workers:
            assert (await worker.next_frame()).shutdown.finished
            request = pb.LeaveRequest(worker_id=worker.worker_id, parameters_sha256="ab")
            await worker.stub.Leave(request, timeout=20)

    with coordinator(tmp_path, {**RUN, "timeouts": {"shutdown": "20s"}}, "--database", url) as process:
        asyncio.run(scenario(process))
        assert process.process.wait(30) == 0, process.read_log()
    with contextlib.closing(open_database(url, "raw", to_read=True)) as store:
        facts = store.facts()
    assert (facts["finished_steps"], facts["final_parameters_sha256"], facts["final_parameters_steps"]) == (
        "2",
        "ab",
        "2",
    )
