"""What a launcher's environment says: rank, world size, the coordinator's address, attempt.  [core]

A launcher starts many agents with one command and tells each of them its place in environment variables of its own. All
of it is a hint: the coordinator gives ranks in its own order, and the world is whoever has joined. A hint names an
agent, picks an accelerator of its host, and says which agent starts the coordinator. What was given explicitly, as a
flag, as a variable AYNI_... or in a file, wins.

Adding a launcher is a row in LAUNCHERS. Of nested launchers the innermost counts, so the order of the rows matters.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ayni.endpoints import Address, parse_address
from ayni.settings import Hint, SettingsError

DEFAULT_PORT = 50051
LARGEST_WORLD = 1 << 20
_AUTO, _NONE = "auto", "none"

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """A worker's place among those that the same command has started."""

    by: str = _AUTO
    """Whose variables to believe: auto (looks for each), none, ray, torchrun, openmpi, slurm or kubernetes."""
    rank: int | None = None
    """Place among the workers of the same start, from 0; a hint, for the name and for `run`."""
    world_size: int | None = None
    """How many were started together; a hint, for `run`."""
    local_rank: int | None = None
    """Place among those of the same host; picks the accelerator where several are visible."""
    attempt: int = 0
    """How often the launcher had started this worker before."""
    run: Path | None = None
    """Run file. The worker with rank 0 starts the coordinator with it, beside itself, and ends it when it ends."""
    port: int = DEFAULT_PORT
    """Port of the coordinator where the launcher names only its host."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        allowed = (_AUTO, _NONE, *LAUNCHERS)
        if self.by not in allowed:
            raise ValueError(f"launch.by is {self.by!r}; it must be one of {', '.join(allowed)}")
        for name, least in (("rank", 0), ("world_size", 1), ("local_rank", 0), ("attempt", 0), ("port", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= (65535 if name == "port" else LARGEST_WORLD):
                raise ValueError(f"launch.{name} is {value}; it is out of range")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"launch.rank is {self.rank}; it must be below launch.world_size, {self.world_size}")
        if self.run and self.rank is None:
            raise ValueError("launch.run needs launch.rank, to know who starts the coordinator; no launcher was found")

    @property
    def starts_coordinator(self) -> bool:
        """Whether this worker has to start the coordinator."""
        return self.run is not None and self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a launcher says that rank 0 runs."""

    name: str
    variable: str
    """The variable that said so."""


def _no_host(_: Environ) -> Host | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """How one launcher tells a process its place."""

    title: str
    """Its name, for people."""
    mark: str
    """The variable by which it is recognised."""
    variables: Mapping[str, tuple[str, ...]]
    """For each value the variables that hold it; the first that is set counts."""
    host: Callable[[Environ], Host | None] = _no_host
    """Finds rank 0's host; raises ValueError with a sentence where what it finds makes no sense."""
    advice: str = ""
    """What to do where the launcher names no host."""


def hints(given: Mapping[str, Any], environ: Environ) -> dict[str, Hint]:
    """Returns what the environment says of each value of a worker's configuration.

    Args:
        given: the values that were given explicitly, nested.
        environ: the process's environment.
    """
    section = given.get("launch")
    launch: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    by = launch.get("by", _AUTO)
    name = _find(by, environ)
    if not name:
        missing = f"{LAUNCHERS[by].title} was named, but {LAUNCHERS[by].mark} is not set" if by in LAUNCHERS else ""
        return {"launch.rank": Hint(text="", origin="", problem=missing)} if missing else {}
    launcher = LAUNCHERS[name]
    result = {"launch.by": Hint(text=name, origin=_origin(launcher.mark, launcher))}
    for path, variables in launcher.variables.items():
        for variable in (variable for variable in variables if environ.get(variable)):
            result.setdefault(path, Hint(text=environ[variable], origin=_origin(variable, launcher)))
    if (coordinator := _coordinator(launcher, launch.get("port", DEFAULT_PORT), environ)) is not None:
        result.setdefault("coordinator", coordinator)
    return result


def described(shown: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Returns one sentence that says which values came from which variables.

    Args:
        shown: the values that came from hints, by path.
        origins: where each of them came from.
    """
    values = ", ".join(f"{path} {value} [{origins[path]}]" for path, value in shown.items())
    return f"taken from the environment: {values}"


def worker_name(config: LaunchConfig, host: str, process_id: int) -> str:
    """Returns the name of a worker that was given none: unique, and beginning with its host's name."""
    if config.rank is None:
        return f"{host}-{process_id}"
    again = f".{config.attempt}" if config.attempt else ""
    return f"{host}-r{config.rank}{again}-{process_id}"


def ray_environment(rank: int, world_size: int, attempt: int) -> dict[str, str]:
    """Returns the variables of an agent in an actor of Ray, which has none of its own for this."""
    return {"AYNI_RAY_RANK": str(rank), "AYNI_RAY_WORLD_SIZE": str(world_size), "AYNI_RAY_ATTEMPT": str(attempt)}


def first_host(hostlist: str) -> str:
    """Returns the first host of a Slurm list, such as n01 of "n[01-03,7],m4".

    Raises:
        ValueError: it is no such list.
    """
    first = re.match(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+(?=,|$)", hostlist)
    name = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", first.group()) if first else ""
    if not name or "[" in name:
        raise ValueError(f"{hostlist!r} is no list of hosts such as n[01-03],m4")
    return name


def _find(by: object, environ: Environ) -> str:
    possible = (name for name in LAUNCHERS if by in (name, _AUTO) and environ.get(LAUNCHERS[name].mark))
    return next(possible, "")


def _origin(variable: str, launcher: Launcher) -> str:
    return f"{variable} of {launcher.title}"


def _coordinator(launcher: Launcher, port: object, environ: Environ) -> Hint | None:
    try:
        host = launcher.host(environ)
        if host is None:
            return Hint(text="", origin="", problem=launcher.advice) if launcher.advice else None
        text = str(Address(host=host.name, port=port if isinstance(port, int) else DEFAULT_PORT))
        parse_address(text)
    except (ValueError, SettingsError) as error:
        problem = f"{launcher.title}'s variables name no host: {error}; give --coordinator or AYNI_COORDINATOR"
        return Hint(text="", origin="", problem=problem)
    return Hint(text=text, origin=f"{_origin(host.variable, launcher)} and launch.port")


def _named(variable: str) -> Callable[[Environ], Host | None]:
    return lambda environ: Host(name=environ[variable], variable=variable) if environ.get(variable) else None


def _slurm_host(environ: Environ) -> Host | None:
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(variable):
            return Host(name=first_host(environ[variable]), variable=variable)
    return None


def _openmpi_host(environ: Environ) -> Host | None:
    here, all_ranks = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"), environ.get("OMPI_COMM_WORLD_SIZE")
    return Host(name="127.0.0.1", variable="OMPI_COMM_WORLD_LOCAL_SIZE") if here and here == all_ranks else None


LAUNCHERS: dict[str, Launcher] = {
    "ray": Launcher(
        title="Ray",
        mark="AYNI_RAY_RANK",
        variables={
            "launch.rank": ("AYNI_RAY_RANK",),
            "launch.world_size": ("AYNI_RAY_WORLD_SIZE",),
            "launch.attempt": ("AYNI_RAY_ATTEMPT",),
        },
    ),
    "torchrun": Launcher(
        title="torchrun",
        mark="TORCHELASTIC_RUN_ID",
        variables={
            "launch.rank": ("RANK",),
            "launch.world_size": ("WORLD_SIZE",),
            "launch.local_rank": ("LOCAL_RANK",),
            "launch.attempt": ("TORCHELASTIC_RESTART_COUNT",),
        },
        host=_named("MASTER_ADDR"),
    ),
    "openmpi": Launcher(
        title="Open MPI",
        mark="OMPI_COMM_WORLD_RANK",
        variables={
            "launch.rank": ("OMPI_COMM_WORLD_RANK",),
            "launch.world_size": ("OMPI_COMM_WORLD_SIZE",),
            "launch.local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        },
        host=_openmpi_host,
        advice="Open MPI does not tell its processes which host rank 0 is on; give --coordinator HOST:PORT, or "
        "AYNI_COORDINATOR with mpirun -x AYNI_COORDINATOR",
    ),
    "slurm": Launcher(
        title="Slurm",
        mark="SLURM_STEP_ID",
        variables={
            "launch.rank": ("SLURM_PROCID",),
            "launch.world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            "launch.local_rank": ("SLURM_LOCALID",),
            "launch.attempt": ("SLURM_RESTART_COUNT",),
        },
        host=_slurm_host,
    ),
    "kubernetes": Launcher(
        title="Kubernetes",
        mark="JOB_COMPLETION_INDEX",
        variables={"launch.rank": ("JOB_COMPLETION_INDEX",), "launch.attempt": ("JOBSET_RESTART_ATTEMPT",)},
        host=_named("JOBSET_COORDINATOR"),
        advice="an Indexed Job does not say where the coordinator is; give --coordinator HOST:PORT, AYNI_COORDINATOR, "
        "or JOBSET_COORDINATOR from the annotation jobset.sigs.k8s.io/coordinator of a JobSet",
    ),
}
"""Launchers by their names in `launch.by`, innermost first."""
