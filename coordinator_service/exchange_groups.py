"""Who reduces an attempt's gradients among themselves, and under which number.  [core]

Theory of operation. A *generation* numbers one group: members by rank, owners, a secret. Numbers only grow, over
restarts too, because the epoch is their upper half and no epoch's number is ever used again. In a sharded group an
*owner* reduces its slice of every bucket: a member that has the run's parameters, says that it takes part, and can be
dialed. One that somebody could not reach owns nothing for the rest of the epoch. In a torch group everybody takes part;
there a loss costs one of a few tries that an epoch has. Where no group can be formed the coordinator reduces: the
reason comes with it.

Secrets come from outside. Does not know steps, leases or who is late.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ayni.step_values import ExchangeGroup, GroupMember
from coordinator_service.membership import Epoch, Member

EPOCH_BITS = 32
"""Bits below the epoch's number in a generation."""

_TRIES = 4
"""Times that members of a torch group may lose one another in an epoch before the coordinator reduces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formed:
    """A group, or none and why."""

    group: ExchangeGroup | None
    reason: str = ""


class ExchangeGroups:
    """Forms one group after the other."""

    def __init__(self, chunk_bytes: int, max_bucket_bytes: int, *, shares_memory: bool = True) -> None:
        """Starts without a group.

        Args:
            chunk_bytes: length of a chunk among workers.
            max_bucket_bytes: length of the longest bucket.
            shares_memory: whether members of one host may share memory.
        """
        self._chunk_bytes, self._max_bucket_bytes = chunk_bytes, max_bucket_bytes
        self._shares_memory = shares_memory
        self._epoch = 0
        self._newest = 0
        self._unreachable: set[int] = set()
        self._losses = 0

    def enter(self, epoch: Epoch) -> None:
        """Notes the epoch in force; a new one forgets who could not be reached."""
        if epoch.number != self._epoch:
            self._epoch, self._losses = epoch.number, 0
            self._unreachable.clear()

    def lose(self, group: ExchangeGroup, worker_ids: Iterable[int]) -> list[GroupMember]:
        """Notes that members could not be reached; returns those that this is news of, by rank.

        Args:
            group: in force.
            worker_ids: as a member says; others than owners, with topology "torch" than members, mean nothing.
        """
        named = set(worker_ids)
        concerned = group.owners if group.topology == "sharded" else group.members
        lost = [member for member in concerned if member.worker_id in named]
        if lost and group.topology == "torch":
            self._losses += 1
        elif lost:
            self._unreachable.update(member.worker_id for member in lost)
        return lost

    def form(self, topology: str, members: Sequence[Member], secret: str) -> Formed:
        """Returns the next group.

        Args:
            topology: "sharded" or "torch".
            members: all workers of the attempt that are left, by rank.
            secret: a new one.
        """
        reason = self.obstacle(topology, members)
        if reason:
            return Formed(group=None, reason=reason)
        self._newest = max(self._newest, self._epoch << EPOCH_BITS) + 1
        group = ExchangeGroup(
            generation=self._newest,
            topology=topology,
            members=tuple(self._member(topology, member) for member in members),
            secret=secret,
            chunk_bytes=self._chunk_bytes,
            max_bucket_bytes=self._max_bucket_bytes,
        )
        return Formed(group=group)

    def owners(self, members: Iterable[Member]) -> list[Member]:
        """Returns the members that can reduce slices."""
        return [member for member in members if self._can_own(member)]

    def share_memory(self, members: Sequence[Member]) -> bool:
        """Returns whether all members can share memory with one another."""
        offers = [member.applicant.shared_memory for member in members]
        return self._shares_memory and None not in offers and len({offer.host for offer in offers if offer}) == 1

    def obstacle(self, topology: str, members: Sequence[Member]) -> str:
        """Returns why there can be no group, or nothing."""
        outside = [m.name for m in members if topology not in m.applicant.topologies or not m.applicant.elastic]
        if outside or not members:
            return f"{', '.join(outside) or 'nobody'} takes part in no exchange among workers"
        if topology == "torch" and self._losses >= _TRIES:
            return f"members of the torch group lost one another {self._losses} times in this epoch"
        if topology == "torch" and not members[0].applicant.store_address:
            return f"the rendezvous store of {members[0].name} can't be dialed"
        if topology == "sharded" and not self.owners(members):
            return "there is no worker that the others can dial"
        return ""

    def _can_own(self, member: Member) -> bool:
        is_reachable = bool(member.applicant.peer_address) and member.worker_id not in self._unreachable
        return is_reachable and not member.following and "sharded" in member.applicant.topologies

    def _member(self, topology: str, member: Member) -> GroupMember:
        is_torch = topology == "torch"
        return GroupMember(
            worker_id=member.worker_id,
            worker_name=member.name,
            address=member.applicant.peer_address,
            is_owner=not member.following if is_torch else self._can_own(member),
            store_address=member.applicant.store_address if is_torch else "",
            shared_memory=member.applicant.shared_memory if self._shares_memory and not is_torch else None,
        )
