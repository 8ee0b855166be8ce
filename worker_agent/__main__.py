"""python -m worker_agent: joins a run and trains until it is over, or serves blocks.  [shell]"""

import os
import sys
from collections.abc import Sequence

DESCRIPTION = """Joins a run and trains until it is over. Model and data come from the coordinator. Exit codes: 0 the
run is finished, 1 failed or interrupted, 2 wrong use, 75 the coordinator could not be reached or the device was lost (a
supervisor may try again). To serve blocks and train nothing: python -m worker_agent serve --layouts FILE. To see what
this machine can compute with: python -m worker_agent doctor. To start agents on a Ray cluster: python -m worker_agent
ray --help."""
SERVE_DESCRIPTION = """Serves blocks: has the layouts that a file names and carries out what a leader asks for. Joins no
run. Exit codes: 0 stopped by a signal, 1 failed, 2 wrong use."""
RAY_DESCRIPTION = """Starts agents as actors on a Ray cluster, and with --run the coordinator beside this process, and
waits until the run is over. What comes after -- are flags of the agents. Exit codes: 0 the run is finished, 1 failed or
interrupted, 2 wrong use."""
DOCTOR_DESCRIPTION = """Says what this machine can compute with and why, after trying it, and what the connection to a
coordinator carries. Trains nothing and joins nothing. Exit codes: 0 all is well, 1 the backend can't be used or the
coordinator refused, 2 wrong use, 75 the coordinator could not be reached."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"serve": _serve, "ray": _ray, "doctor": _doctor}
    if given and given[0] in commands:
        return commands[given[0]](given[1:])
    return _train(given, owns_process=arguments is None)


def _train(arguments: Sequence[str], owns_process: bool) -> int:
    import argparse
    import logging

    from ayni import logs
    from ayni.flags import resolve_or_exit
    from ayni.process import FAILED, exit_code_of, on_signal
    from worker_agent import launchers
    from worker_agent.beside import beside_config, with_coordinator
    from worker_agent.config import WorkerConfig

    parser = argparse.ArgumentParser("python -m worker_agent", "%(prog)s [options]", DESCRIPTION, allow_abbrev=False)
    resolved = resolve_or_exit(parser, WorkerConfig, arguments, hints=lambda given: launchers.hints(given, os.environ))
    config = resolved.config
    logs.configure(config.log_format, config.log_level.upper())
    if taken := resolved.hinted_values():
        logging.getLogger("worker_agent").info("%s", launchers.described(taken, resolved.origins))

    def work() -> int:
        # Until the agent takes care of signals there is nothing to leave.
        with on_signal(lambda _: os._exit(FAILED)):
            return with_coordinator(beside_config(config), agent) if config.launch.starts_coordinator else agent()

    def agent() -> int:
        # Not before the flags are read: gRPC and torch take their time.
        from ayni.kernels import loading
        from ayni.rpc import tune_allocator
        from worker_agent.agent import Agent
        from worker_agent.lost_device import DeviceLost, go_on_without

        tune_allocator()
        loading.choose()
        try:
            return Agent(config).run()
        except DeviceLost as error:
            # A program that has called this, or a coordinator beside it, would not outlive it.
            if config.backend == "auto" and owns_process and not config.launch.starts_coordinator:
                go_on_without(error)
            raise

    return exit_code_of(work)


def _ray(arguments: Sequence[str]) -> int:
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.process import exit_code_of
    from worker_agent.ray_config import RayConfig, split_arguments

    own, of_agents = split_arguments(arguments)
    config = read_command_line(RayConfig, own, prog="python -m worker_agent ray", description=RAY_DESCRIPTION)
    logs.configure(config.log_format, config.log_level.upper())

    def work() -> int:
        from worker_agent.ray_agents import run_agents

        return run_agents(config, of_agents)

    return exit_code_of(work)


def _serve(arguments: Sequence[str]) -> int:
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.process import run_until_signal
    from worker_agent.blocks_config import ServeConfig

    config = read_command_line(
        ServeConfig, arguments, prog="python -m worker_agent serve", description=SERVE_DESCRIPTION
    )
    logs.configure(config.log_format, config.log_level.upper())
    from ayni.rpc import tune_allocator
    from worker_agent.serve import serve

    tune_allocator()
    return run_until_signal(lambda stop: serve(config, stop))


def _doctor(arguments: Sequence[str]) -> int:
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.process import exit_code_of
    from worker_agent.doctor_config import DoctorConfig

    config = read_command_line(
        DoctorConfig, arguments, prog="python -m worker_agent doctor", description=DOCTOR_DESCRIPTION
    )
    logs.configure("text", "WARNING")
    from worker_agent.doctor import examine

    return exit_code_of(lambda: examine(config))


if __name__ == "__main__":
    sys.exit(main())
