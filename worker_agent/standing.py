"""What a worker is in its run, whichever membership it has at the moment.  [shell]

Written on the event loop; read from any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ayni.step_values import Origin
from worker_agent.changes import Change
from worker_agent.exchange import Traffic
from worker_agent.faults import START_AGAIN
from worker_agent.group_exchange import Peers
from worker_agent.messages import NO_FAILURE, FailedOffer, SignOfLife
from worker_agent.same_host import SharedVectors
from worker_agent.session import Commit, Report, ShardAssignment


@dataclass(kw_only=True, slots=True)
class Standing:
    """What outlives a membership, and what every heartbeat says."""

    worker_name: str = ""
    elastic: bool = False
    """Whether it takes extra leases, contributes again when told, and comes back when it was lost."""
    lost_advice: str = START_AGAIN
    """What to do once the coordinator is gone."""
    completed_steps: int = 0
    """Updates that its parameters have had, or are about to have: a commit that is here counts."""
    origin: Origin | None = None
    """Where the last of them came from; None for not known."""
    parameters_sha256: str = ""
    """Hash of the parameters that it joined with; empty once they have changed."""
    activity: str = "loading"
    published_steps: int = 0
    """Steps behind the state that its host tier holds."""
    settled_steps: int = 0
    """Steps behind the newest state that was stored, or given up."""
    is_awaiting_settled: bool = False
    settled: Change = field(default_factory=Change)
    """Announced when `settled_steps` has changed, and when nobody says so any more."""
    failed_offer: FailedOffer = NO_FAILURE
    """Offer that it could not take, until the coordinator has heard of it."""
    checkpoint_writer: str = ""
    """Name of the worker that writes checkpoints, as the coordinator said last."""
    traffic: Traffic = field(default_factory=Traffic)
    vectors: SharedVectors = field(default_factory=SharedVectors)
    """What a coordinator of this host can read in place."""
    peers: Peers = field(default_factory=Peers)
    """How it takes part in exchanges among workers."""
    generation: int = 0
    """Exchange group that the next two speak of; 0 for none."""
    contributed_leases: tuple[int, ...] = ()
    """Leases whose contributions have left whole."""
    lost_owners: tuple[int, ...] = ()
    """Owners that it could not reach."""
    failed_reduction: str = ""
    """Why a reduction of that group failed for good."""
    fallbacks: Callable[[], int] = lambda: 0
    """Counts the operations that the accelerator has given back to the CPU."""

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this worker is the one that writes checkpoints now."""
        return bool(self.worker_name) and self.checkpoint_writer == self.worker_name

    def progress(self, completed_steps: int, origin: Origin | None = None) -> None:
        """Notes how many updates the parameters have had, and where the last one came from."""
        if completed_steps != self.completed_steps:
            self.completed_steps, self.parameters_sha256 = completed_steps, ""
        self.origin = origin

    def note_commit(self, assignment: ShardAssignment, report: Report, commit: Commit) -> None:
        """Notes a commit that is here: its update is about to be applied, unless the worker only keeps the means."""
        self.checkpoint_writer = commit.checkpoint_writer
        if assignment.kind == "train" and not report.following:
            self.progress(assignment.step + 1, assignment.origin)

    def sign_of_life(self, taken: ShardAssignment | None) -> SignOfLife:
        """Returns what the next heartbeat says."""
        return SignOfLife(
            epoch=taken.epoch if taken else 0,
            step=taken.step if taken else -1,
            activity=self.activity,
            published_steps=self.published_steps,
            completed_steps=self.completed_steps if self.elastic else 0,
            origin=self.origin if self.elastic else None,
            failed_offer=self.failed_offer,
            generation=self.generation,
            contributed_leases=self.contributed_leases,
            lost_owners=self.lost_owners,
            failed_reduction=self.failed_reduction,
            cpu_fallbacks=self.fallbacks(),
        )
