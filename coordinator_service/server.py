"""Builds the coordinator, starts it and stops it; the only wiring.  [shell]"""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path

from ayni.channels import open_channel
from ayni.process import DONE, FAILED, load_token
from ayni.servers import TokenInterceptor, add_health_and_reflection, add_service, bind, make_server
from ayni.settings import SettingsError
from coordinator_service import status
from coordinator_service.artifacts import Artifacts
from coordinator_service.config import RunFile
from coordinator_service.driver import Driver
from coordinator_service.run import Run
from coordinator_service.service import RAW_METHODS, CoordinatorServicer
from coordinator_service.state_keeper import StateKeeper
from coordinator_service.store import RunStore
from coordinator_service.worker_stub import GrpcBlockWorker

_log = logging.getLogger(__name__)

SERVICE = "ayni.v1.CoordinatorService"


async def serve(file: RunFile, stop: asyncio.Event) -> int:
    """Serves one run until it ends or `stop` is set; returns the process's exit code.

    Prints one line, "listening on HOST:PORT", to standard output once it can be called.

    Raises:
        SettingsError: the run file asks for something that is not there.
        OSError: the port is in use, or the state can't be written.
    """
    token = load_token(file.token_file)
    artifacts = await asyncio.to_thread(_artifacts, file.artifacts)
    store = RunStore(file.state_dir / file.run_id, fresh=file.fresh)
    try:
        _refuse_to_resume(file, store)
        run = Run(file)
        store.set_facts({"config": json.dumps(status.shared_config(run))})
        keeper = StateKeeper(run, partial(_dial, file, token))
        await _serve(run, Driver(run, store, keeper), CoordinatorServicer(run, artifacts), token, stop)
        return _outcome(run, store)
    finally:
        store.close()


async def _serve(run: Run, driver: Driver, servicer: CoordinatorServicer, token: str, stop: asyncio.Event) -> None:
    file = run.file
    server = make_server(TokenInterceptor(token))
    add_service(server, SERVICE, servicer, raw=RAW_METHODS)
    health = await add_health_and_reflection(server, [SERVICE])
    address = bind(server, file.listen, file.tls, file.insecure)
    await server.start()
    print(f"listening on {address}", flush=True)
    _log.info("run %s is served at %s; %s", file.run_id, address, _goal(file))
    try:
        await _drive(run, driver, stop)
    finally:
        await health.enter_graceful_shutdown()
        await server.stop(grace=2.0)


async def _drive(run: Run, driver: Driver, stop: asyncio.Event) -> None:
    driving = asyncio.create_task(driver.drive())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not driving.done():
        run.stop("the coordinator was interrupted")
    try:
        await driving
    finally:
        stopping.cancel()


def _outcome(run: Run, store: RunStore) -> int:
    hashes = run.final_hashes()
    if len(set(hashes.values())) > 1:
        _log.error("the workers' final parameters differ: %s", hashes)
        return FAILED
    if hashes:
        store.set_facts({"final_parameters_sha256": next(iter(hashes.values()))})
    return DONE if run.progress.state == "finished" else FAILED


def _dial(file: RunFile, token: str, address: str, rank: int) -> GrpcBlockWorker:
    return GrpcBlockWorker(open_channel(address, token, file.worker_tls, file.insecure), rank=rank)


def _artifacts(folder: Path | None) -> Artifacts:
    try:
        return Artifacts(folder)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _refuse_to_resume(file: RunFile, store: RunStore) -> None:
    steps = store.committed_steps()
    if steps:
        raise SettingsError(
            f"{store.path} holds {steps} committed steps of an earlier run {file.run_id!r}, and this version can't go "
            "on from there: give another run_id, or --fresh to throw them away"
        )


def _goal(file: RunFile) -> str:
    steps = f"{file.num_steps} steps" if file.num_steps else "no last step"
    return f"{steps}, waits for {file.num_starters} workers"
