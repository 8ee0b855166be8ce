"""Members, leases and epochs.  [core]

Theory of operation. A worker is *admitted* by Join, *ready* once its assignment stream is open (it can compute), and
gone when it leaves, its stream breaks or its lease runs out. A ready member may be a *follower*: its parameters lag
behind the run. An epoch is one fixed set of ready members; its number only grows. The epoch in force ends when one of
its members goes or another member becomes ready; the next one forms when at least `min_workers` are ready (the first
one: `start_workers`) and one of them does not follow. Rank is the position by worker id.

Time comes in as `now`, seconds on any steady clock. Reasons go out as sentences.

Does not know steps, streams or what a worker computes. Ugly: identity (names, nonces) and compatibility (fingerprints)
are checked here together, because both decide the same thing: whether a Join makes a member.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ayni.errors import IdentityTaken, Incompatible, Quarantined, UnknownWorker, WorldFull
from ayni.shm.host import SharedMemoryOffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Applicant:
    """What a worker says of itself in Join."""

    name: str
    nonce: str
    session: str
    peer: str
    backend: str = "cpu"
    gpu_count: int = 0
    device_names: tuple[str, ...] = ()
    address: str = ""
    """Where its own service can be dialled; empty when nobody can."""
    peer_address: str = ""
    """Where other workers can dial it to have slices reduced; empty when nobody can."""
    store_address: str = ""
    """Where its rendezvous store listens; empty for none."""
    shared_memory: SharedMemoryOffer | None = None
    """Where other workers of its host can share memory with it; None for nowhere."""
    topologies: tuple[str, ...] = ()
    """Ways of exchange among workers that it takes part in."""
    elastic: bool = False
    """Whether it takes extra leases, contributes again when told, and can be handed the run's state."""
    max_microbatches: int = 0
    """Most micro-batches of a step that it takes; 0 for no limit."""
    memory_bytes: int = 0
    wire_types: tuple[str, ...] = ("float32",)
    """Element types that its gradients can travel in."""
    follows_wire_type: bool = False
    """Whether it contributes to each step in the type that its lease says."""
    agreements: dict[str, str] = field(default_factory=dict)
    """Values that all workers must share, by name; empty text means not said."""
    summaries: dict[str, str] = field(default_factory=dict)
    """Text for people that goes with an agreement, by the agreement's name."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A live worker."""

    worker_id: int
    applicant: Applicant
    last_seen: float
    ready: bool = False
    following: bool = False
    """Whether its parameters lag behind the run."""
    activity: str = "joining"

    @property
    def name(self) -> str:
        """The worker's own name."""
        return self.applicant.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One fixed membership."""

    number: int
    workers: tuple[int, ...]
    """Worker ids, by rank."""


class Membership:
    """Decides who is a member and which epoch is in force."""

    def __init__(
        self, *, min_workers: int, start_workers: int, max_workers: int, lease: float, epoch: int = 0, next_id: int = 0
    ) -> None:
        """Starts without members.

        Args:
            min_workers: ready members that an epoch needs.
            start_workers: ready members that the first epoch needs.
            max_workers: members that may be admitted at one time.
            lease: seconds that a member is believed alive without a sign of life.
            epoch: number of the newest epoch; 0 before the first.
            next_id: id of the next worker.
        """
        self.members: dict[int, Member] = {}
        self.epoch = Epoch(number=epoch, workers=())
        self.shut_out: dict[str, int] = {}
        """Names of workers that may not join again, with the strikes that they had."""
        self.strikes: Counter[str] = Counter()
        """By worker name, micro-batches that were not finite."""
        self.agreed: dict[str, str] = {}
        """Agreements, by name; the first worker's value, or the coordinator's own."""
        self._summaries: dict[str, str] = {}
        self._min_workers = min_workers
        self._start_workers = start_workers
        self._max_workers = max_workers
        self._lease = lease
        self.next_id = next_id
        """Id of the next worker; never used before."""

    def admit(self, now: float, applicant: Applicant) -> Member:
        """Makes a worker a member. The same nonce gives the same member again.

        Raises:
            Quarantined: it was shut out.
            IdentityTaken: a live member of another process start has this name.
            Incompatible: an agreement differs.
            WorldFull: `max_workers` are members.
        """
        self._refuse_shut_out(applicant)
        holder = next((m for m in self.members.values() if m.name == applicant.name), None)
        if holder and holder.applicant.nonce == applicant.nonce:
            holder.last_seen = now
            return holder
        if holder:
            raise IdentityTaken(
                f"worker name {applicant.name!r} belongs to live worker {holder.worker_id} at {holder.applicant.peer}; "
                "give this one another --name, or wait until the other's lease ends",
                worker_name=applicant.name,
                worker_id=holder.worker_id,
                peer=holder.applicant.peer,
            )
        self._check_agreements(applicant)
        if len(self.members) >= self._max_workers:
            raise WorldFull(f"the run has {self._max_workers} workers and takes no more", max_workers=self._max_workers)
        self._agree(applicant)
        member = Member(worker_id=self.next_id, applicant=applicant, last_seen=now)
        self.next_id += 1
        self.members[member.worker_id] = member
        return member

    def member(self, worker_id: int, session: str) -> Member:
        """Returns the live member with this id and session.

        Raises:
            UnknownWorker: there is none.
        """
        member = self.members.get(worker_id)
        if member is None or member.applicant.session != session:
            raise UnknownWorker(
                f"worker {worker_id} is not a member: it never joined, has left, or its lease ended; join again",
                worker_id=worker_id,
            )
        return member

    def renew(self, now: float, worker_id: int, activity: str = "") -> None:
        """Notes a sign of life."""
        member = self.members[worker_id]
        member.last_seen = now
        member.activity = activity or member.activity

    def remove(self, worker_id: int) -> Member | None:
        """Ends a membership; None when it has already ended."""
        return self.members.pop(worker_id, None)

    def expired(self, now: float) -> list[Member]:
        """Returns the members whose lease has run out."""
        return [member for member in self.members.values() if now - member.last_seen > self._lease]

    def form_epoch(self) -> tuple[Epoch | None, str]:
        """Returns the epoch in force, forming the next one if the ready members changed, and a sentence.

        Returns:
            (None, reason) when too few members are ready.
        """
        ready = tuple(sorted(worker_id for worker_id, member in self.members.items() if member.ready))
        needed = self._min_workers if self.epoch.workers else self._start_workers
        able = sum(not self.members[worker_id].following for worker_id in ready)
        if len(ready) < needed or not able:
            return None, self._shortage(min(able, len(ready)), needed)
        if ready != self.epoch.workers:
            self.epoch = Epoch(number=self.epoch.number + 1, workers=ready)
            workers = f"{len(ready)} worker{'s' if len(ready) > 1 else ''}"
            return self.epoch, f"epoch {self.epoch.number} formed with {workers}"
        return self.epoch, f"epoch {self.epoch.number} goes on"

    def names(self, worker_ids: Iterable[int]) -> list[str]:
        """Returns the names of members, in the given order; the number where a member is gone."""
        return [self.members[w].name if w in self.members else f"worker {w}" for w in worker_ids]

    def _shortage(self, num_ready: int, needed: int) -> str:
        missing = needed - num_ready
        sentence = f"waiting for {missing} more worker{'s' if missing > 1 else ''} ({num_ready} of {needed})"
        loading = [m.name for m in self.members.values() if not m.ready]
        behind = [m.name for m in self.members.values() if m.ready and m.following]
        sentence += f"; loading: {', '.join(loading)}" if loading else ""
        return sentence + (f"; without the run's newest state: {', '.join(behind)}" if behind else "")

    def _refuse_shut_out(self, applicant: Applicant) -> None:
        if applicant.name in self.shut_out:
            strikes = self.shut_out[applicant.name]
            raise Quarantined(
                f"worker {applicant.name!r} was shut out of this run: {strikes} of its micro-batches were not finite; "
                "see what is wrong with its device, then let it join under another --name",
                worker_name=applicant.name,
                strikes=strikes,
            )

    def _check_agreements(self, applicant: Applicant) -> None:
        for name, theirs in applicant.agreements.items():
            ours = self.agreed.get(name, "")
            if ours and theirs and ours != theirs:
                raise Incompatible(
                    f"{name} differs: this run has {self._described(name, ours)}, worker {applicant.name!r} has "
                    f"{_with_summary(theirs, applicant.summaries.get(name, ''))}",
                    field=name,
                    coordinator=ours,
                    worker=theirs,
                )

    def _agree(self, applicant: Applicant) -> None:
        for name, theirs in applicant.agreements.items():
            if theirs and not self.agreed.get(name):
                self.agreed[name] = theirs
                self._summaries[name] = applicant.summaries.get(name, "")

    def _described(self, name: str, value: str) -> str:
        return _with_summary(value, self._summaries.get(name, ""))


def _with_summary(value: str, summary: str) -> str:
    return f"{value} ({summary})" if summary else value
