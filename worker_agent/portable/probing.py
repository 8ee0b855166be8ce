"""Probes engines in child processes, and chooses.  [shell]"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from worker_agent.portable.engines import Finding, engines_to_try, refusal_of
from worker_agent.portable.opening import absence
from worker_agent.portable.probe import ALLOW_SOFTWARE

PROBE_SECONDS = 120.0
"""Longest time for one probe; the first use of a driver compiles shaders, which takes its time on a busy machine."""

Probe = Callable[[str, bool], Finding]
"""Takes an engine, and whether a software device is probed as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What became of the engines that were tried, in order."""

    findings: tuple[Finding, ...]
    refusals: tuple[str, ...]
    """One for each finding; empty text for the engine that is taken."""

    @property
    def taken(self) -> Finding | None:
        """The first usable engine."""
        usable = (finding for finding, refusal in zip(self.findings, self.refusals, strict=True) if not refusal)
        return next(usable, None)

    def reasons(self) -> str:
        """Returns why no other engine was taken, for people."""
        told = zip(self.findings, self.refusals, strict=True)
        return "; ".join(f"{finding.engine}: {refusal}" for finding, refusal in told if refusal)


def choose(engine: str, *, allow_software: bool, probe: "Probe | None" = None, all_of_them: bool = False) -> Choice:
    """Probes one engine after another until one is usable.

    Args:
        engine: "auto", or the only one to try.
        allow_software: whether a device that is a program on the CPU will do.
        probe: replaces the child process.
        all_of_them: go on after a usable one, to be able to tell of all.

    Raises:
        ValueError: there is no such engine.
    """
    found = list(_tried(engine, allow_software, probe or probe_in_child, all_of_them))
    return Choice(findings=tuple(one for one, _ in found), refusals=tuple(refusal for _, refusal in found))


def _tried(engine: str, allow_software: bool, probe: Probe, all_of_them: bool) -> Iterator[tuple[Finding, str]]:
    for name in engines_to_try(engine):
        finding = probe(name, allow_software)
        refusal = refusal_of(finding, allow_software=allow_software)
        yield finding, refusal
        if not refusal and not all_of_them:
            return


def probe_in_child(engine: str, allow_software: bool) -> Finding:
    """Probes an engine in a process of its own; whatever that does, there is a finding."""
    if reason := absence(engine):
        return Finding(engine=engine, refusal=reason)
    command = [sys.executable, "-m", "worker_agent.portable.probe", engine, *[ALLOW_SOFTWARE] * allow_software]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        reason = f"its probe did not end within {PROBE_SECONDS:g} s: its driver hangs, or this machine is too busy"
        return Finding(engine=engine, refusal=reason)
    return _finding(engine, ended)


def _finding(engine: str, ended: "subprocess.CompletedProcess[str]") -> Finding:
    if ended.returncode == 0 and ended.stdout.strip():
        # Drivers may have printed before.
        return Finding(**json.loads(ended.stdout.splitlines()[-1]))
    last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
    how = f"exit code {ended.returncode}" if ended.returncode >= 0 else signal.Signals(-ended.returncode).name
    return Finding(engine=engine, refusal=f"its probe ended with {how}: {last[:300]}")
