"""python -m coordinator_service: serves a run, or shows one.  [shell]"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["status"]:
        from coordinator_service.status_command import show

        return show(given[1:])
    return _serve(given)


def _serve(arguments: Sequence[str]) -> int:
    from ayni import logs
    from ayni.flags import read_command_line
    from ayni.process import run_until_signal
    from ayni.rpc import tune_allocator
    from coordinator_service.config import RunFile
    from coordinator_service.server import serve

    file = read_command_line(RunFile, arguments, prog="python -m coordinator_service", description=_DESCRIPTION)
    logs.configure(file.log_format, file.log_level.upper())
    tune_allocator()
    return run_until_signal(lambda stop: serve(file, stop))


_DESCRIPTION = (
    "Serves one training run to workers. To see a run: python -m coordinator_service status HOST:PORT "
    "--token-file FILE [--watch]"
)


if __name__ == "__main__":
    sys.exit(main())
