"""Named places where a process can be made to fail, for tests of what a crash leaves behind.  [shell]

Off unless AYNI_FAILPOINTS is set when the process starts: "NAME=ACTION" or "NAME=ACTION@N", separated by commas. The
action happens the N-th time that the place is reached (default: the first), and only then.

Actions: kill (SIGKILL, as a power cut), stop (SIGSTOP, as a machine that freezes), fail (OSError, as a full disk).
"""

import errno
import logging
import os
import signal
import threading
from dataclasses import dataclass

from ayni.settings import SettingsError

VARIABLE = "AYNI_FAILPOINTS"

NAMES = {
    "coordinator.join.admitted": "a worker is a member, and has not been told",
    "coordinator.epoch.stored": "a new epoch is on disk, and nobody has been told",
    "coordinator.assignment.sent": "some workers of a step have been given their lease, and others have not",
    "coordinator.contribution.complete": "a contribution is there whole, and its mean has not been sent",
    "coordinator.extra.leased": "micro-batches of a dead or late worker were given to another, which has not been told",
    "coordinator.commit.ready": "a step has everything that it needs, and is not on disk",
    "coordinator.commit.stored": "a step is on disk, and no worker has been told",
    "coordinator.commit.told": "one worker has been told of a commit, and others have not",
    "coordinator.offer.sent": "a worker was offered a state, and has not taken it",
    "coordinator.state.blocks_put": "all blocks of a state but the first are stored",
    "coordinator.state.stored": "a state is stored whole, and the coordinator has not noted it",
    "worker.joined": "the worker is a member, and has not said that it is ready",
    "worker.lease.taken": "the worker has a lease, and has computed nothing",
    "worker.contribution.half": "half of a contribution's chunks have left",
    "worker.contribution.sent": "the last chunk of a contribution has left",
    "worker.commit.asked": "the worker has said that its lease is done, and has no answer",
    "worker.commit.received": "the worker knows the commit, and has not updated its parameters",
    "worker.updated": "the parameters are updated, and nothing was said since",
    "worker.state.published": "the state is in the host tier, and the coordinator does not know",
    "worker.onboarding.half": "a part of the run's state has arrived from another worker",
    "worker.onboarding.done": "the run's state is here, and the coordinator does not know",
    "worker.checkpoint.written": "a checkpoint is on disk beside its place",
    "worker.checkpoint.moved": "the checkpoint before is out of the way, and the new one not in its place",
}
"""Every place, and what has happened there and what has not."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Armed:
    action: str
    left: int


def hit(name: str) -> None:
    """Marks a place. Does nothing unless the process was started with this failpoint.

    Raises:
        OSError: the action is "fail".
    """
    if not _armed:
        return
    assert name in NAMES, name
    armed = _armed.get(name)
    if armed is None:
        return
    armed.left -= 1
    if armed.left == 0:
        _act(name, armed.action)


def is_armed(name: str) -> bool:
    """Returns whether something will happen at a place: then what is said to have left must have left."""
    return name in _armed


def _act(name: str, action: str) -> None:
    _log.warning("failpoint %s: %s", name, action)
    if action == "fail":
        raise OSError(errno.ENOSPC, f"failpoint {name}")
    # To this very thread: it may not go on for the moment that another thread would take to receive it.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def parse(text: str) -> dict[str, tuple[str, int]]:
    """Returns action and count for each name.

    Raises:
        SettingsError: a name, an action or a count that there is not.
    """
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, what = entry.partition("=")
        action, _, count = what.partition("@")
        if name not in NAMES or action not in ("kill", "stop", "fail") or not (count or "1").isdecimal():
            raise SettingsError(
                f"{VARIABLE} has {entry!r}; it must be NAME=kill, stop or fail, with @N for the N-th time, and "
                f"NAME one of {', '.join(NAMES)}"
            )
        found[name] = (action, int(count or 1))
    return found


_armed = {name: _Armed(action, count) for name, (action, count) in parse(os.environ.get(VARIABLE, "")).items()}
