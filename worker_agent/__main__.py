"""python -m worker_agent: joins a run and trains until it is over.  [shell]"""

import os
import sys
from collections.abc import Sequence

DESCRIPTION = """Joins a run and trains until it is over. Model and data come from the coordinator. Exit codes: 0 the
run is finished, 1 failed or interrupted, 2 wrong use, 75 the coordinator could not be reached (a supervisor may try
again)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.process import FAILED, exit_code_of, on_signal
    from worker_agent.config import WorkerConfig

    config = read_command_line(WorkerConfig, arguments, prog="python -m worker_agent", description=DESCRIPTION)
    logs.configure(config.log_format, config.log_level.upper())

    def work() -> int:
        # Until the agent takes care of signals there is nothing to leave.
        with on_signal(lambda _: os._exit(FAILED)):
            # Not before the flags are read: gRPC and torch take their time.
            from ayni.rpc import tune_allocator
            from worker_agent.agent import Agent

            tune_allocator()
            return Agent(config).run()

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
