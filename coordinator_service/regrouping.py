"""Exchange groups of the run: one for each attempt, another one when it loses a member or an owner.  [shell]

A new group is sent to all members that are left before anything else of it: assignments that carry it come later in
the same outboxes. Where none can be formed in the middle of an attempt, the attempt is given up, and the coordinator
reduces the next one.
"""

import logging
import secrets
import time
from collections.abc import Sequence

from ayni.step_values import ExchangeGroup, StepTimes
from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.exchange_groups import ExchangeGroups
from coordinator_service.live import LiveStep
from coordinator_service.membership import Epoch, Member
from coordinator_service.progress import Progress
from coordinator_service.same_host import SameHost
from coordinator_service.topology_plan import Situation, TopologyPlan
from coordinator_service.values import ExchangeNews, Regroup

_log = logging.getLogger(__name__)


class Regrouping:
    """Forms the groups of a run's attempts, and tells the members."""

    def __init__(self, file: RunFile, epochs: Epochs, progress: Progress) -> None:
        """Starts without a group."""
        self._file = file
        self._epochs = epochs
        self._progress = progress
        shares_memory = file.gradients == "auto"
        self._groups = ExchangeGroups(file.chunk_bytes, file.max_bucket_bytes, shares_memory=shares_memory)
        self._plan = TopologyPlan()
        self._told = ""
        """Why there was no group the last time; empty if there was one."""
        self._situation = Situation(num_workers=0, num_owners=0)
        """In which the last attempt was opened."""
        self.group: ExchangeGroup | None = None
        """The newest one; None where the coordinator reduces."""
        self._default = ""

    @property
    def topology(self) -> str:
        """Who reduces in the newest training step; empty before the first."""
        return self.group.topology if self.group else self._default

    @property
    def owners(self) -> set[int]:
        """Workers that reduce slices for the others."""
        group = self.group if self.topology == "sharded" else None
        return {owner.worker_id for owner in group.owners} if group else set()

    def first(self, kind: str, epoch: Epoch, same_host: SameHost) -> ExchangeGroup | None:
        """Returns the first group of an attempt; None where the coordinator reduces."""
        if kind != "train":
            return None
        self._default = "star"
        if self._file.topology == "star":
            return None
        self._groups.enter(epoch)
        members = [self._epochs.seats[worker].member for worker in epoch.workers]
        topology = self._choose(members, same_host) if self._file.topology == "auto" else self._file.topology
        self.group = self._form(topology, members) if topology != "star" else None
        return self.group

    def again(self, live: LiveStep, reason: str) -> None:
        """Replaces the group of an attempt by one of the members that still hold a lease."""
        if live.peers is None or not live.is_open:
            return
        held = {lease.worker_id for lease in live.core.live if not lease.is_extra}
        seats = [self._epochs.seats[w] for w in live.epoch.workers if w in held and w in self._epochs.seats]
        if not seats:
            return
        formed = self._groups.form(live.peers.group.topology, [seat.member for seat in seats], secrets.token_hex(16))
        if formed.group is None:
            live.void(f"its workers can't reduce any more: {formed.reason}, after {reason}")
            return
        self.group = formed.group
        self._progress.regroups += 1
        live.regroup(formed.group)
        told = Regroup(step=live.core.step, attempt=live.core.attempt, group=formed.group, reason=reason)
        for seat in seats:
            seat.outbox.put_nowait(told)
        _log.info("%s: %d workers form another exchange group: %s", live.core.label, len(seats), reason)

    def hear(self, live: LiveStep, seat: Seat, news: ExchangeNews) -> bool:
        """Takes what a member says of the group in force; returns whether more of its leases are contributed."""
        if live.peers is None or news.generation != live.peers.group.generation:
            return False
        worker_id = seat.member.worker_id
        if not live.is_open or live.peers.group.member(worker_id) is None:
            return False
        has_sent = live.peers.note_contributed(worker_id, news.contributed)
        if has_sent:
            live.moved = time.monotonic()
        if lost := self._groups.lose(live.peers.group, news.lost):
            names = ", ".join(member.worker_name for member in lost)
            _log.warning("worker %s can't reach %s", seat.member.name, names)
            self.again(live, f"worker {seat.member.name} can't reach {names}")
        return has_sent

    def observe(self, live: LiveStep, times: Sequence[StepTimes], num_bytes: int) -> None:
        """Takes where the workers' time went in a step that was committed, for the choice of the next topology."""
        if self._file.topology == "auto" and live.core.kind == "train":
            topology = live.peers.group.topology if live.peers else "star"
            said = [time.exchange for time in times if time.compute > 0 or time.exchange > 0]
            self._plan.observe(topology, min(said, default=0.0), num_bytes, self._situation)

    def _choose(self, members: Sequence[Member], same_host: SameHost) -> str:
        self._situation = Situation(
            num_workers=len(members),
            num_owners=len(self._groups.owners(members)),
            obstacle=self._groups.obstacle("sharded", members),
            shares_memory=all(same_host.is_connected(member.worker_id) for member in members),
            peers_share_memory=self._groups.share_memory(members),
        )
        choice = self._plan.choose(self._situation)
        if choice.sentence:
            _log.info("%s", choice.sentence)
        return choice.topology

    def _form(self, topology: str, members: Sequence[Member]) -> ExchangeGroup | None:
        formed = self._groups.form(topology, members, secrets.token_hex(16))
        if formed.reason != self._told:
            self._told = formed.reason
            _log.warning(
                "%s", f"the coordinator reduces: {formed.reason}" if formed.reason else "the workers reduce again"
            )
        return formed.group
