"""python -m worker_agent doctor: what this machine can compute with, and what its connection carries.  [shell]"""

import asyncio
import json
import platform
import sys
from datetime import timedelta
from functools import partial

import torch

from ayni.channels import open_channel
from ayni.errors import AyniError
from ayni.process import DONE, FAILED, TEMPORARY, load_token
from worker_agent import backend
from worker_agent.contact import first_contact
from worker_agent.coordinator import Coordinator
from worker_agent.doctor_config import DoctorConfig
from worker_agent.doctor_report import Findings, Link, as_json_values, exit_is_good, lines
from worker_agent.faults import CoordinatorUnreachable, NotACoordinator, TransportBroken
from worker_agent.link_rate import measure
from worker_agent.portable.probing import Choice, Probe, choose


def examine(config: DoctorConfig, probe: Probe | None = None) -> int:
    """Looks, prints, and returns the exit code.

    Args:
        config: what the process was started with.
        probe: replaces the child process that probes an engine.

    Raises:
        SettingsError: a coordinator is to be asked, and there is no token.
    """
    token = load_token(config.token_file) if config.coordinator else ""
    _say(config, "trying the GPU engines that are there")
    choice = _choice(config, probe)
    code, link = DONE, None
    if config.coordinator:
        _say(config, f"measuring the connection to {config.coordinator}")
        code, link = asyncio.run(_link(config, token))
    cpu = backend.resolve("cpu")
    found = Findings(
        asked=config.backend,
        system=f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"{platform.machine()}",
        processor=cpu.device_names[0],
        host_memory_bytes=cpu.memory_bytes,
        cuda_devices=backend.resolve("cuda").device_names if torch.cuda.is_available() else (),
        no_cuda="" if torch.cuda.is_available() else backend.why_no_cuda(),
        engines=choice.findings,
        refusals=choice.refusals,
        link=link,
    )
    print(json.dumps(as_json_values(found)) if config.json else "\n".join(lines(found)), flush=True)
    return code or (DONE if exit_is_good(found) else FAILED)


def _choice(config: DoctorConfig, probe: Probe | None) -> Choice:
    # As a worker does: only where wgpu was asked for by name is a software driver taken.
    allow_software = config.allow_software_gpu and config.backend == "wgpu"
    return choose(config.wgpu_engine, allow_software=allow_software, probe=probe, all_of_them=True)


async def _link(config: DoctorConfig, token: str) -> tuple[int, Link]:
    """Returns the exit code and what is known of the connection."""
    address, allowance = config.coordinator, config.connect_timeout
    coordinator = Coordinator(open_channel(address, token, config.tls, config.insecure), address)
    try:
        run = await first_contact(partial(coordinator.get_run, ""), address, allowance)
        limit = 2 * config.measure_for + timedelta(seconds=30)
        async with asyncio.timeout(limit.total_seconds()):
            return DONE, await measure(coordinator, run.run_id, config.measure_for)
    except AyniError as error:
        return FAILED, Link(coordinator=address, problem=f"it refused: {error}")
    except NotACoordinator as error:
        return FAILED, Link(coordinator=address, problem=str(error))
    except (CoordinatorUnreachable, TransportBroken) as error:
        return TEMPORARY, Link(coordinator=address, problem=str(error))
    except TimeoutError:
        return TEMPORARY, Link(coordinator=address, problem="measuring it did not end in time")
    finally:
        await coordinator.close()


def _say(config: DoctorConfig, what: str) -> None:
    if not config.json and sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
