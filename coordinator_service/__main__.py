"""python -m coordinator_service: serves a run, shows one, or looks into what is kept of it.  [shell]"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    match given[:1]:
        case ["status"]:
            from coordinator_service.status_command import show

            return show(given[1:])
        case ["ledger"]:
            from coordinator_service.ledger_command import show

            return show(given[1:])
        case ["replay"]:
            from coordinator_service.replay_command import replay

            return replay(given[1:])
    return _serve(given)


def _serve(arguments: Sequence[str]) -> int:
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.kernels import loading
    from ayni.process import Stop, run_until_signal
    from ayni.rpc import tune_allocator
    from coordinator_service.config import RunFile
    from coordinator_service.run_places import with_database
    from coordinator_service.server import serve

    given = with_database(arguments)
    file = read_command_line(RunFile, given, prog="python -m coordinator_service", description=_DESCRIPTION)
    logs.configure(file.log_format, file.log_level.upper())
    tune_allocator()

    async def serving(stop: Stop) -> int:
        loading.choose()
        return await serve(file, stop)

    return run_until_signal(serving)


_DESCRIPTION = (
    "Serves one training run to workers. To see a run: python -m coordinator_service status HOST:PORT "
    "--token-file FILE [--watch]. What a run was made of: python -m coordinator_service ledger --help. To make steps "
    "again and compare: python -m coordinator_service replay --help. --state postgresql://... means --database."
)


if __name__ == "__main__":
    sys.exit(main())
