"""The process group of one generation: Gloo, and what the accelerators have beside it; and how to end it.  [shell]

Legend: N elements in a bucket.

Gloo does not know how to abort: `abort` and `shutdown` of its process group do nothing, and a collective that waits for
a peer which was stopped waits until its time is up. What ends it is the end of its connections. So the connections of
the group are known by the addresses at which its members listen (each says its own in the store), and to abort is to
shut them down: every collective fails at once, here and, because they see the connections end, at all others.

Where open files can't be looked through (no /proc), a collective that was given up ends by its own time only.
"""

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from ayni.buckets import Bucket
from worker_agent import own_sockets
from worker_agent.own_sockets import Place
from worker_agent.session import Vector

Integers = npt.NDArray[np.int64]

_FINDING = threading.Lock()
"""Held while a group begins to listen, so that no other group's address is taken for its own."""
_ACCELERATED = {"cuda": "ProcessGroupNCCL", "xpu": "ProcessGroupXCCL"}
"""For each kind of accelerator, the class of its collectives."""


@dataclass(slots=True)
class Buffers:
    """Vectors that a group adds in: nobody else writes to them, so that a turn that is given up harms nobody."""

    _vectors: dict[Bucket, Vector] = field(default_factory=dict)

    def of(self, bucket: Bucket, num_elements: int) -> Vector:
        """Returns the bucket's vector; the one of the attempt before, where it fits."""
        vector = self._vectors.get(bucket)
        if vector is None or vector.size != num_elements:
            vector = self._vectors[bucket] = np.empty(num_elements, np.float32)
        return vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One accelerator."""

    kind: str
    """"cuda" or "xpu", as torch names its devices."""
    unit: str
    """Tells it from all others, without spaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """What a member must know to build its part of the group."""

    generation: int
    prefix: str
    """Begins the group's keys in the store."""
    host: str
    """Own host, as the others dial it."""
    rank: int
    """Place in the group."""
    size: int
    """Members of the group."""
    accelerator: "Accelerator | None" = None
    """What this member would add on; the group does if all have the same kind and nobody's is anybody else's too."""
    build_s: float = 30.0
    """Longest wait for the others while the group is built."""
    reduce_s: float = 2400.0
    """Longest wait for the others in a collective."""


class Collectives:
    """A process group that was built. Belongs to one thread, but for `abort`."""

    def __init__(self, plan: GroupPlan, store: Any) -> None:
        """Builds it together with the others. Blocks.

        Args:
            plan: what to build.
            store: the group's, for its keys alone.

        Raises:
            RuntimeError: somebody did not come in time, or a connection broke.
        """
        import torch.distributed as dist

        self.name = plan.prefix
        """Tells it from every other group."""
        self.buffers = Buffers()
        self._dist: Any = dist
        self._accelerated: Any = None
        listening, place = _listening(self._dist.ProcessGroupGloo, plan.host)
        own = plan.accelerator or Accelerator(kind="cpu", unit="-")
        store.set(f"member/{plan.rank}", f"{own.kind} {own.unit} {place[0]} {place[1]}")
        self._gloo: Any = self._connect(plan, store, listening)
        said = [one.decode().split() for one in store.multi_get([f"member/{rank}" for rank in range(plan.size)])]
        self._places = {(host, int(port)) for _, _, host, port in said if int(port)}
        self.device = common_kind([(kind, unit) for kind, unit, _, _ in said])
        """Kind of device that vectors are added on."""
        if self.device in _ACCELERATED:
            self._accelerated = self._accelerate(plan, store)

    def broadcast(self, values: Integers) -> None:
        """Gives the lowest rank's numbers to all, in place.

        Raises:
            RuntimeError: a peer was lost, or the group was aborted.
        """
        self._gloo.broadcast([_tensor(values)], self._dist.BroadcastOptions()).wait()

    def all_reduce(self, total_N: Vector) -> None:
        """Adds everybody's vectors, in place, shape [N].

        Raises:
            RuntimeError: a peer was lost, or the group was aborted.
        """
        tensor = _tensor(total_N)
        if self._accelerated is None:
            self._gloo.allreduce([tensor], self._dist.AllreduceOptions()).wait()
            return
        there = tensor.to(self.device)
        self._accelerated.allreduce([there], self._dist.AllreduceOptions()).wait()
        tensor.copy_(there)

    def abort(self) -> None:
        """Ends every collective at once, from any thread. The group can't be used afterwards."""
        own_sockets.shut_down(self._places)
        if self._accelerated is not None:
            self._accelerated.abort()

    def _connect(self, plan: GroupPlan, store: Any, listening: Any) -> Any:
        options = self._dist.ProcessGroupGloo._Options()
        # One collective at a time, so one thread.
        options._devices, options._threads = [listening], 1
        options._timeout = timedelta(seconds=plan.build_s)
        gloo = self._dist.ProcessGroupGloo(store, plan.rank, plan.size, options)
        gloo._set_default_timeout(timedelta(seconds=plan.reduce_s))
        return gloo

    def _accelerate(self, plan: GroupPlan, store: Any) -> Any:
        made = getattr(self._dist, _ACCELERATED[self.device])
        options = made.Options()
        options._timeout = timedelta(seconds=plan.reduce_s)
        return made(self._dist.PrefixStore(self.device, store), plan.rank, plan.size, options)


def common_kind(said: Sequence[tuple[str, str]]) -> str:
    """Returns the kind of device that a group adds on, of what its members have (kind and unit): "cpu" for no other."""
    kinds, units = {kind for kind, _ in said}, {unit for _, unit in said}
    # Two processes on one accelerator can't be in one group of its library.
    return kinds.pop() if len(kinds) == 1 and len(units) == len(said) else "cpu"


def own_accelerator(backend: str) -> Accelerator | None:
    """Returns what this process computes on; None for the CPU, or where torch has no collectives for it."""
    import torch
    import torch.distributed as dist

    if backend != "cuda" or not dist.is_nccl_available():
        return None
    device = torch.cuda.current_device()
    unit = getattr(torch.cuda.get_device_properties(device), "uuid", f"{socket.gethostname()}/{device}")
    return Accelerator(kind="cuda", unit=str(unit))


def _tensor(values: "npt.NDArray[Any]") -> Any:
    import torch

    return torch.from_numpy(values)


def _listening(kind: Any, host: str) -> tuple[Any, Place]:
    """Makes a device at an own address; returns it and where it listens, port 0 for not found."""
    with _FINDING:
        before = own_sockets.listening()
        device = kind.create_device(hostname=host)
        found = own_sockets.listening() - before
    return device, found.pop() if len(found) == 1 else (host, 0)
