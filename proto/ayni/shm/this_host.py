"""What this process has in common with those that it can share memory with.  [shell]"""

import os
from pathlib import Path

from ayni.errors import Unsupported
from ayni.shm.host import HostIdentity
from ayni.shm.memory import can_share


def this_host() -> HostIdentity:
    """Returns what only processes of this host, process namespace and user have in common."""
    assert can_share(), "the identity of a host that can't share memory is asked for"
    return HostIdentity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        uid=os.geteuid(),
    )


def check_host(theirs: HostIdentity, peer: str) -> None:
    """Refuses a peer that this process can't share memory with; `peer` names it in errors.

    Raises:
        Unsupported: it is elsewhere, or this system has no such memory.
    """
    if not can_share():
        raise Unsupported("this system can't share memory", field="engine", detail="system")
    if (ours := this_host()) != theirs:
        detail = f"{peer} is {theirs}, this process is {ours}"
        raise Unsupported(
            f"shared memory needs one host, process namespace and user: {detail}", field="engine", detail=detail
        )
