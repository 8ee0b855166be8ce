"""Builds the coordinator, starts it and stops it; the only wiring.  [shell]"""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path

from ayni.channels import open_channel
from ayni.errors import UnknownWorker
from ayni.logs import set_fields
from ayni.process import DONE, FAILED, TEMPORARY, Stop, load_token
from ayni.servers import TokenInterceptor, add_health_and_reflection, add_service, bind, make_server
from ayni.settings import SettingsError
from ayni.tracing import open_tracing
from coordinator_service import collectives, status
from coordinator_service.artifacts import Artifacts
from coordinator_service.attachments import Attachments
from coordinator_service.collectives import CollectiveServicer
from coordinator_service.config import RunFile
from coordinator_service.driver import FINISHED, Driver
from coordinator_service.epochs import Seat
from coordinator_service.onboarding import Onboarding
from coordinator_service.recovery import Recovery
from coordinator_service.relay import add_relay
from coordinator_service.replay import FINAL_PARAMETERS, FINAL_STEPS
from coordinator_service.resume import resumable
from coordinator_service.run import Run
from coordinator_service.same_host import SameHost
from coordinator_service.service import RAW_METHODS, CoordinatorServicer
from coordinator_service.shared_regions import SharedRegions
from coordinator_service.state_keeper import StateKeeper
from coordinator_service.store import RunStore, open_store
from coordinator_service.watch.event_log import event_log
from coordinator_service.watch.serving import check_dashboard, dashboard
from coordinator_service.watch.step_spans import StepSpans
from coordinator_service.worker_stub import GrpcBlockWorker

_log = logging.getLogger(__name__)

SERVICE = "ayni.v1.CoordinatorService"

_ARTIFACTS = "artifacts"
"""Fact of the store: the folder with the run's files, for those who make its steps again."""
_CONFIG = "config"
"""Fact of the store: the run file's shared values, as JSON."""


async def serve(file: RunFile, stop: Stop) -> int:
    """Serves one run until it ends or `stop` is set; returns the process's exit code.

    SIGINT ends the run: the workers are told and leave. SIGTERM only ends this process: the workers wait for the next
    one, which goes on from the store.

    Prints one line, "listening on HOST:PORT", to standard output once it can be called.

    Raises:
        SettingsError: the run file asks for something that is not there.
        OSError: the port is in use, or the state can't be written.
    """
    token = load_token(file.token_file)
    check_dashboard(file.dashboard)
    set_fields(run=file.run_id)
    spans = StepSpans(open_tracing(file.traces, "ayni-coordinator", {"ayni.run": file.run_id}))
    artifacts = await asyncio.to_thread(_artifacts, file.artifacts)
    store = await asyncio.to_thread(open_store, file)
    try:
        _refuse_to_resume(file, store)
        run = Run(file, store)
        folder = str(file.artifacts.resolve()) if file.artifacts else ""
        store.set_facts({_CONFIG: json.dumps(status.config_of(file)), _ARTIFACTS: folder})
        if file.gradients == "auto":
            run.same_host = SameHost(SharedRegions(None, run.epochs.find, 4 * file.max_bucket_bytes))
        attachments = Attachments()
        dial = partial(_dial, file, token, attachments)
        keeper = StateKeeper(run, dial)
        driver = Driver(run, Recovery(run, store), keeper, Onboarding(run, attachments, dial), spans)
        servicer = CoordinatorServicer(run, artifacts, attachments)
        with event_log(run.progress):
            async with dashboard(run, token, keeper.ask) as page:
                await _serve(run, driver, servicer, token, stop, page)
        return await _outcome(run)
    finally:
        store.close()
        await asyncio.to_thread(spans.close)


async def _serve(run: Run, driver: Driver, servicer: CoordinatorServicer, token: str, stop: Stop, page: str) -> None:
    file = run.file
    server = make_server(TokenInterceptor(token, file.limits), limits=file.limits)
    add_service(server, SERVICE, servicer, raw=RAW_METHODS)
    add_relay(server, servicer.attachments, run.epochs.has_session)
    waits = file.timeouts.accept.total_seconds(), file.timeouts.group.total_seconds()
    passing_on = CollectiveServicer(file.max_workers, *waits)
    add_service(server, collectives.SERVICE, passing_on, raw=collectives.RAW_METHODS)
    health = await add_health_and_reflection(server, [SERVICE, collectives.SERVICE])
    address = bind(server, file.listen, file.tls, file.insecure)
    await server.start()
    print(f"listening on {address}", flush=True)
    _log.info("run %s is served at %s; %s", file.run_id, address, _goal(run))
    if page:
        print(f"dashboard at {page}", flush=True)
        _log.info("the dashboard is at %s", page)
    if file.topology == "torch":
        _log.warning("topology torch: the bytes of a mean depend on who computed what, and so do the parameters")
    try:
        await _drive(run, driver, stop)
    finally:
        if run.progress.state == "suspended":
            sentence = "this coordinator is ending, and the next one goes on with the run; join that one"
            run.epochs.dismiss(UnknownWorker(sentence, worker_id="all"))
        await health.enter_graceful_shutdown()
        await server.stop(grace=2.0)
        await run.same_host.close()


async def _drive(run: Run, driver: Driver, stop: Stop) -> None:
    driving = asyncio.create_task(driver.drive())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not driving.done() and stop.signal == "SIGTERM":
        driver.suspend()
    elif not driving.done():
        run.stop("the coordinator was interrupted")
    try:
        await driving
    finally:
        stopping.cancel()


async def _outcome(run: Run) -> int:
    hashes = run.final_hashes()
    is_equal = len(set(hashes.values())) == 1
    if is_equal:
        sha256, steps = next(iter(hashes.values())), run.progress.committed_steps
        run.notes.add({FINAL_PARAMETERS: sha256, FINAL_STEPS: str(steps)})
    await run.notes.settle(run.file.timeouts.shutdown.total_seconds())
    if hashes and not is_equal:
        _log.error("the workers' final parameters differ: %s", hashes)
        return FAILED
    if run.progress.state == "suspended":
        return TEMPORARY
    return DONE if run.progress.state == "finished" else FAILED


def _dial(file: RunFile, token: str, attachments: Attachments, seat: Seat, rank: int) -> GrpcBlockWorker:
    """Returns a stub of a member: over the stream that it has opened, or behind its address."""
    member = seat.member
    if attachments.is_attached(member.worker_id):
        return GrpcBlockWorker(attachments.channel(member.worker_id), rank=rank, name=member.name)
    channel = open_channel(member.applicant.address, token, file.worker_tls, file.insecure)
    return GrpcBlockWorker(channel, rank=rank, name=member.name)


def _artifacts(folder: Path | None) -> Artifacts:
    try:
        return Artifacts(folder)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _refuse_to_resume(file: RunFile, store: RunStore) -> None:
    """Refuses to go on with a run that was made with other settings.

    Raises:
        SettingsError: says which.
    """
    facts, steps = store.facts(), store.committed_steps()
    if FINISHED in facts and int(facts[FINISHED]) >= file.num_steps:
        raise SettingsError(
            f"run {file.run_id!r} in {store.path} is finished, after {steps} steps: give another run_id, or --fresh to "
            "throw its steps away"
        )
    if not steps or _CONFIG not in facts:
        return
    problems = resumable(json.loads(facts[_CONFIG]), status.config_of(file))
    if problems:
        raise SettingsError(
            f"{store.path} holds {steps} committed steps of run {file.run_id!r}, which can't go on with other "
            f"settings: {'; '.join(problems)}. Use the run file that it was started with, or another run_id, or "
            "--fresh to throw the steps away"
        )
    _log.info("going on with run %s after step %d, from %s", file.run_id, steps - 1, store.path)


def _goal(run: Run) -> str:
    file, state = run.file, run.file.state
    parts = [f"{file.num_steps} step{'s' if file.num_steps > 1 else ''}" if file.num_steps else "no last step"]
    if state.resume_step and not run.progress.has_begun:
        parts.append(
            f"goes on from the state behind step {state.resume_step} of run {state.resume_run_id or file.run_id}"
        )
    if run.wire_types.now != file.wire_type:
        parts.append(f"gradients travel in {run.wire_types.now}, as was chosen before")
    parts.append(f"waits for {file.num_starters} worker{'s' if file.num_starters > 1 else ''}")
    return ", ".join(parts)
