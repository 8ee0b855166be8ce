"""A Slurm cluster of two nodes on this host, without root's services: munged, slurmctld and two slurmd."""

import contextlib
import os
import pwd
import secrets
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.launching import Place, free_port, program, start

CONFIG = """
ClusterName=ayni
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/slurm-state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=127.0.0.[2-3] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODES = ("127.0.0.2", "127.0.0.3")
"""The nodes are called after addresses of loopback, so that agents can dial them by name."""


@dataclass
class Cluster:
    where: Place
    config: Path

    def ask(self, *command: str, **extra: str) -> str:
        """Runs one of Slurm's commands and returns what it says."""
        environment = self.where.environment(SLURM_CONF=str(self.config), **extra)
        name, *arguments = command
        done = subprocess.run(
            [program(name), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            cwd=self.where.folder,
            check=False,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stderr}{self.logs()}"
        return done.stdout

    def submit(self, *arguments: str, **extra: str) -> str:
        """Submits a batch job and returns its number. (sbatch --wait looks once in half a minute.)"""
        return self.ask("sbatch", "--parsable", *arguments, **extra).strip()

    def wait_for_end(self, job: str, timeout: float = 180.0) -> str:
        """Waits for the end of a job; returns its state and exit code, as COMPLETED 0:0."""

        def state() -> str:
            said = self.ask("scontrol", "show", "job", job)
            words = dict(word.partition("=")[::2] for word in said.split())
            return f"{words['JobState']} {words['ExitCode']}"

        is_over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        self.where.wait_for(lambda: state().startswith(is_over), f"the end of job {job}", timeout)
        return state()

    def logs(self) -> str:
        return "".join(f"\n{log.name}:\n{log.read_text()}" for log in sorted(self.where.folder.glob("s*d*.log")))


@contextlib.contextmanager
def slurm_cluster(where: Place) -> Iterator[Cluster]:
    """A cluster that is ready to run jobs; its processes carry the place's mark."""
    folder, host = where.folder, socket.gethostname().partition(".")[0]
    first = _two_ports()
    config = folder / "slurm.conf"
    values = {"host": host, "folder": folder, "user": pwd.getpwuid(os.getuid()).pw_name}
    config.write_text(CONFIG.format(**values, control_port=free_port(), ports=f"[{first}-{first + 1}]"))
    (folder / "slurm-state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    munge = [program("munged"), "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed"]
    cluster = Cluster(where, config)
    with contextlib.ExitStack() as stack:

        def serve(name: str, *command: str) -> None:
            log = folder / f"{name}.log"
            stack.enter_context(start(where, log, *command, SLURM_CONF=str(config)))

        serve("slurm-munged", *munge)
        where.wait_for(lambda: (folder / "munge.socket").exists(), "munged listens", 20.0)
        serve("slurmctld", program("slurmctld"), "-D", "-f", str(config))
        for number, node in enumerate(NODES):
            serve(f"slurmd-{number}", program("slurmd"), "-D", "-N", node, "-f", str(config))
        where.wait_for(lambda: _are_idle(cluster), "both nodes are idle", 30.0)
        yield cluster


def _are_idle(cluster: Cluster) -> bool:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        return cluster.ask("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"]
    return False


def _two_ports() -> int:
    """Finds two neighbouring ports, as one line of Slurm's configuration asks for."""
    for _ in range(20):
        first = free_port()
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", first + 1))
            return first
    raise AssertionError("no two neighbouring ports are free")
