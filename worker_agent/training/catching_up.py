"""Decides whether a replica lags behind the run, and brings it up to date when a state has come.  [shell]"""

from collections.abc import Mapping

from ayni.buckets import Bucket
from worker_agent.session import Commit, Session, ShardAssignment, Vector
from worker_agent.training.contributing import Contributor
from worker_agent.training.following import Follower
from worker_agent.training.replica import Replica


class CatchingUp:
    """A replica and, where it can follow, what it follows with."""

    def __init__(self, replica: Replica, contributor: Contributor, follower: Follower | None) -> None:
        """Takes the replica, what may have kept its gradients, and None where no state can come from."""
        self._replica, self._contributor, self._follower = replica, contributor, follower

    @property
    def is_following(self) -> bool:
        """Whether the parameters lag behind the run, as far as is known."""
        return self._follower is not None and self._follower.is_active

    def lags(self, session: Session, lease: ShardAssignment) -> bool:
        """Returns whether the parameters are not those that a lease is about, and do not become so now.

        Raises:
            RuntimeError: they are not, and this worker can't follow, or has got micro-batches.
        """
        if lease.discard_state:
            self._replica.discard("they differ from the other workers'")
            session.caught_up(self._replica.completed_steps)
        lag = self._replica.lag(lease.step)
        if lag and self._follower is not None:
            self._follower.follow(lease.step, lag)
            self.take_state(lease.step)
            lag = self._replica.lag(lease.step)
        if lag and (self._follower is None or lease.microbatches):
            raise RuntimeError(
                f"{lag}, but the coordinator leased it step {lease.step}; it needs the state of a worker that is up to "
                "date"
            )
        return bool(lag)

    def keep(self, lease: ShardAssignment, commit: Commit, means: Mapping[Bucket, Vector]) -> str:
        """Keeps a step that can't be applied yet; returns a note about it."""
        assert self._follower is not None
        self._follower.keep(lease, commit, means)
        return f"following: this worker's parameters have had {self._replica.completed_steps} updates"

    def take_state(self, open_step: int | None = None) -> bool:
        """Takes a state that has come, and makes the updates since; returns whether there was one.

        Args:
            open_step: the step that is under way; None for none.
        """
        follower = self._follower
        if follower is None or (state := follower.take_state(open_step)) is None:
            return False
        self._contributor.start_over()
        try:
            self._replica.restore(f"the state behind step {state.completed_steps}", state.tensors, state.facts)
        except ValueError as error:
            follower.reject(str(error))
            return False
        for kept in follower.steps_from(state.completed_steps):
            self._replica.apply(kept.lease, kept.commit, kept.means)
        follower.caught_up(state, self._replica.completed_steps)
        return True
