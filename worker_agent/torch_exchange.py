"""Reduction through torch.distributed, one group after the other: exchange of topology "torch".  [shell]

Legend: N elements in a bucket.

Every member of the group takes part in every bucket, also with nothing. What comes out is divided by the weight of all
micro-batches and written to where the worker wants its mean; the worker of the lowest rank takes it down for the
coordinator. A group that broke, or was replaced, fails what is under way with `RoundRestarted`: everything is brought
again to the next one. Belongs to the event loop; what blocks is done on threads.

Copies: one per part (into the sum), one out (the quotient, into the prepared vector), and those of torch.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from ayni.endpoints import parse_address
from ayni.errors import Fault, RoundRestarted, StaleEpoch
from ayni.step_values import ExchangeGroup, SliceDigest
from worker_agent.exchange import Outcome
from worker_agent.group_exchange import Brought, OnLost
from worker_agent.session import ExchangeTimes
from worker_agent.slice_offers import Moment, Terms, check_length
from worker_agent.torch_collectives import Accelerator, Collectives, GroupPlan
from worker_agent.torch_generation import Generation
from worker_agent.torch_group import TorchGroup
from worker_agent.torch_rounds import Total
from worker_agent.torch_store import LeaseCount, RendezvousStore, StoreClients

_log = logging.getLogger(__name__)

WARNING = (
    "topology torch: the bytes of a mean depend on which worker computed what, so two runs with the same seed need not "
    "give the same parameters; with topology star or sharded they do"
)

MOST_LINGERING = 8
"""Groups that were given up and whose threads have not ended yet: each holds a few connections and its vectors."""
_PATIENCE_S = 1.0
"""How long a group is broken before the coordinator is told: mostly it knows already, and better."""
_END_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchConfig:
    """How this worker takes part in torch groups."""

    worker_name: str
    accelerator: Accelerator | None = None
    """What to add on, if all members have one of this kind."""
    build_s: float = 30.0
    """Longest wait for the others while a group is built."""
    reduce_s: float = 2400.0
    """Longest wait for the others in one bucket."""


class TorchExchange:
    """This worker's part in the torch groups of a run."""

    def __init__(self, config: TorchConfig, store: RendezvousStore, on_lost: OnLost) -> None:
        """Takes what outlives a group, and says what this topology gives up.

        Args:
            config: how to take part.
            store: this worker's own; is closed with this.
            on_lost: is told of a group that broke and was not replaced soon: any other member may be why.
        """
        _log.warning("%s", WARNING)
        self._config = config
        self._store = store
        self._on_lost = on_lost
        self._newest: Generation | None = None
        self._clients: StoreClients | None = None
        self._writing = asyncio.Lock()
        self._lingering: list[TorchGroup] = []

    def regroup(self, terms: Terms) -> None:
        """See `GroupExchange.regroup`. A group whose generation goes on is kept.

        Raises:
            Fault: too many groups before this one have not ended yet.
        """
        group = terms.group
        if self._newest and self._newest.group.generation >= group.generation:
            return
        inherited = self._inherit(group)
        if inherited is None:
            self._give_up(f"generation {group.generation} is in force")
        if len(self._lingering) > MOST_LINGERING:
            raise Fault(
                f"{len(self._lingering)} torch groups that were given up have not ended: their members are stopped, "
                "and this system does not let their connections be found; start this worker again",
                detail="too many groups",
            )
        self._newest = self._generation(terms, inherited)

    def end(self, why: str) -> None:
        """See `GroupExchange.end`. A group that has nothing under way is kept, for the next attempt."""
        if self._newest and not self._newest.is_idle:
            self._give_up(why)

    async def reduce(self, brought: Brought) -> Outcome:
        """See `GroupExchange.reduce`. A mean that is there is taken again: another group's may differ in its last bits.

        Where the group broke this waits for the next one: everything has to be brought to that.
        """
        generation, offer = self._newest, brought.offer
        if generation is None:
            raise StaleEpoch(f"{offer.name}: this worker is in no torch group now", epoch=0, current_epoch=0)
        check_length(offer.name, offer.out.nbytes, generation.group)
        begun = time.perf_counter()
        try:
            total = await generation.total(offer, brought.on_sent)
        except RoundRestarted:
            await generation.replaced.wait()
            raise
        if not offer.assignment.extra:
            await generation.take(offer, total)
        return _outcome(len(generation.group.members), total, begun)

    def slices(self, moment: Moment) -> tuple[SliceDigest, ...]:
        """See `GroupExchange.slices`. The worker of the lowest rank has all, nobody else has any."""
        if self._newest is None or self._newest.group.generation != moment.generation:
            return ()
        return self._newest.slices((moment.epoch, moment.step, moment.attempt))

    async def close(self) -> None:
        """See `GroupExchange.close`."""
        self._give_up("this worker leaves")
        deadline = time.monotonic() + _END_S
        for torch in self._lingering:
            await asyncio.to_thread(torch.join, max(0.0, deadline - time.monotonic()))
        if left := [torch.plan.generation for torch in self._lingering if not torch.is_over]:
            _log.info("torch groups %s end by their own time, within %g s", left, self._config.reduce_s)
        self._store.close()

    def _inherit(self, group: ExchangeGroup) -> Collectives | None:
        """Takes over what the last generation was built of, if the members of this one are the same."""
        if self._newest is None or self._newest.group.members != group.members:
            return None
        inherited = self._newest.hand_over()
        if inherited:
            self._retire()
        return inherited

    def _generation(self, terms: Terms, inherited: Collectives | None) -> Generation:
        loop, plan = asyncio.get_running_loop(), self._plan(terms)
        self._clients = self._clients or StoreClients(terms.group.members[0].store_address)
        torch = TorchGroup(
            plan, self._clients, lambda: loop.call_soon_threadsafe(self._broke, terms), inherited=inherited
        )
        leases = LeaseCount(self._clients, plan.prefix)
        return Generation(terms.group, torch, leases, self._writing, self._config.worker_name)

    def _give_up(self, why: str) -> None:
        """Ends the last generation and all that waits for it."""
        if self._newest:
            self._newest.give_up(why)
            self._retire()
        if self._clients:
            self._clients.close()
            self._clients = None

    def _retire(self) -> None:
        """Notes that the last generation is over; its keys are of no use any more."""
        assert self._newest
        torch, self._newest = self._newest.torch, None
        if torch.plan.rank == 0:
            self._store.forget(torch.plan.prefix)
        self._lingering = [one for one in (*self._lingering, torch) if not one.is_over]

    def _plan(self, terms: Terms) -> GroupPlan:
        group = terms.group
        ranks = [member.worker_id for member in group.members]
        return GroupPlan(
            generation=group.generation,
            prefix=f"{group.generation}-{group.secret}",
            host=parse_address(self._store.address).host,
            rank=ranks.index(terms.worker_id),
            size=len(ranks),
            accelerator=self._config.accelerator,
            build_s=self._config.build_s,
            reduce_s=self._config.reduce_s,
        )

    def _broke(self, terms: Terms) -> None:
        """Tells the coordinator, unless it replaces the group soon."""
        if self._newest and self._newest.group == terms.group:
            _log.info("%s", self._newest.torch.why_ended)
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._tell, terms)

    def _tell(self, terms: Terms) -> None:
        if self._newest and self._newest.group == terms.group:
            others = [member.worker_id for member in terms.group.members if member.worker_id != terms.worker_id]
            self._on_lost(terms.group.generation, others)


def _outcome(num_members: int, total: Total, begun: float) -> Outcome:
    """Returns how a bucket's reduction ended. Losses are added up by the coordinator, from the commits."""
    moments = ExchangeTimes(
        begun=begun, accepted=total.begun, sent=total.ended, first=total.ended, last=time.perf_counter()
    )
    return Outcome(
        num_contributors=num_members,
        total_weight=total.weight,
        global_loss=None,
        num_correct=0,
        num_predictions=0,
        times=moments,
    )
