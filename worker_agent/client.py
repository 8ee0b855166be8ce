"""Membership in a run, for ordinary threads: `WorkerClient`.  [shell]

A synchronous, thread-safe face. It implements `worker_agent.session.Session` for the training loop in tree, and the
simple calls (`worker_agent.seed_calls`) for a loop of your own. The network runs on the bridge's thread.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from ayni.buckets import Bucket
from ayni.channels import open_channel
from ayni.errors import AyniError
from ayni.settings import SettingsError
from ayni.step_values import Origin
from ayni.tensors import TensorSpec
from worker_agent import bridge, contributions, messages
from worker_agent.assignment_frames import Shutdown
from worker_agent.client_config import ClientConfig
from worker_agent.contributions import Offer
from worker_agent.coordinator import Coordinator
from worker_agent.exchange import Contribution, Traffic
from worker_agent.faults import Interrupted
from worker_agent.messages import FailedOffer, JoinFacts
from worker_agent.presence import OnMember, OnOffer, Presence
from worker_agent.rejoining import Patience, Rejoining
from worker_agent.same_host import SharedVectors
from worker_agent.seed_calls import SeedCalls
from worker_agent.session import Commit, MicrobatchStats, OnExchange, Report, ShardAssignment, Vector
from worker_agent.slice_rounds import SliceRounds
from worker_agent.standing import Standing
from worker_agent.taking_part import take_part

__all__ = ["ClientConfig", "WorkerClient"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE = timedelta(seconds=15)
"""How much longer a thread waits than the loop, whose own deadline says more."""


class WorkerClient(SeedCalls):
    """One worker's membership in a run. Leaves when it is closed."""

    def __init__(self, config: ClientConfig, network: bridge.Bridge, presence: Presence) -> None:
        """For `connect`."""
        super().__init__()
        self._config = config
        self._bridge = network
        self._presence = presence
        self._on_exchange: OnExchange | None = None

    @classmethod
    def connect(cls, config: ClientConfig, gpu_count: int, backend: str, *, rounds: SliceRounds | None = None) -> Self:
        """Joins a run.

        Args:
            config: where and as whom.
            gpu_count: accelerators of this worker; 0 with backend "cpu".
            backend: "cuda", "wgpu" or "cpu".
            rounds: slices that this worker reduces for others, where a server of its own serves them already.

        Raises:
            AyniError: the coordinator refused (`TokenRefused`, `Incompatible`, `IdentityTaken`, ...).
            CoordinatorUnreachable: it did not answer in time.
            SettingsError: the address, the token or the TLS files are wrong.
        """
        _check_token(config.token)
        if config.gradients not in ("auto", "grpc"):
            raise SettingsError(f'gradients must be "auto" or "grpc", not {config.gradients!r}')
        network = bridge.shared()
        joining = _join(config, gpu_count, backend, rounds)
        presence = network.wait(joining, _seconds(config.connect_timeout), f"Join at {config.coordinator}")
        return cls(config, network, presence)

    @property
    def worker_id(self) -> int:
        """Number of this worker in the run."""
        return self._presence.member.membership.worker_id

    @property
    def total_workers(self) -> int:
        """Workers in the current epoch; before the first, workers that the run waits for."""
        member, lease = self._presence.member, self._lease
        taken = member.taken or lease
        return taken.world_size if taken else member.membership.total_workers

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this worker writes the run's checkpoints, as the last commit said, or the end of the run."""
        return self._presence.standing.writes_checkpoints

    @property
    def wire_type(self) -> str:
        """Element type that gradients of the last lease travel in; before the first, of the next one."""
        member = self._presence.member
        return (member.taken.wire_type if member.taken else "") or member.membership.wire_type

    @property
    def traffic(self) -> Traffic:
        """Bytes of gradient frames so far."""
        return self._presence.standing.traffic

    @property
    def finished(self) -> bool:
        """Whether the coordinator has said that the run reached its last step."""
        ending = self._presence.ending
        return isinstance(ending, Shutdown) and ending.finished

    @property
    def drained(self) -> bool:
        """Whether the coordinator let this worker go at its operator's wish, and the run goes on."""
        ending = self._presence.ending
        return isinstance(ending, Shutdown) and ending.drained

    @property
    def session(self) -> str:
        """Secret of the membership of now, for calls that others pass on."""
        return self._presence.member.membership.session

    @property
    def settled_steps(self) -> int:
        """Steps behind the newest state that the coordinator has had stored, or has given up."""
        return self._presence.standing.settled_steps

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        """Starts one bucket's reduction; see `Session.contribute`."""
        self._check_usable()
        self._worked_on = assignment
        offer = Offer(
            assignment=assignment,
            bucket=bucket,
            parts=tuple(parts),
            microbatches=tuple(microbatches),
            out=out,
            component_sizes=tuple(component_sizes),
            num_blocks=self._config.num_blocks,
            num_buckets=self._config.num_buckets,
        )
        return self._contribute(offer)

    def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        """Waits for the lease's contributions and the step's commit, or for an extra lease; see `Session.commit`."""
        self._check_usable()
        self._worked_on = assignment
        work = self._presence.commit(assignment, report)
        return self._wait(self._submit(work), f"the commit of step {assignment.step}")

    def new_vector(self, num_elements: int) -> Vector:
        """Returns a vector for parts; see `Session.new_vector`."""
        return self._presence.standing.vectors.new(num_elements)

    def wake(self) -> None:
        """Makes a `receive_shard` that waits, or the next one, raise `Woken` once."""
        self._bridge.call_soon(self._presence.wake)

    def on_offer(self, callback: OnOffer) -> None:
        """Calls back, on the network's thread, with each offer of a state that this worker lacks."""
        self._bridge.call_soon(self._presence.on_offer, callback)

    def count_fallbacks(self, source: Callable[[], int]) -> None:
        """Has status show what `source` counts: operations that the accelerator has given back to the CPU."""
        self._presence.standing.fallbacks = source

    def on_member(self, callback: OnMember) -> None:
        """Calls back, on the network's thread, with the membership of now and with each one after a loss."""
        self._bridge.call_soon(self._presence.on_member, callback)

    def on_exchange(self, callback: OnExchange) -> None:
        """Calls back, on the network's thread, with each exchange that is over, before its future is done."""
        self._on_exchange = callback

    def fail_offer(self, offer_id: int, reason: str, *, is_damaged: bool = False) -> None:
        """Tells the coordinator that an offered state could not be taken; it makes another offer.

        Args:
            offer_id: the offer.
            reason: sentence for people.
            is_damaged: the state is stored and damaged, so that nobody can take it.
        """
        failed = FailedOffer(offer_id=offer_id, reason=reason, is_damaged=is_damaged)
        self._bridge.call_soon(self._presence.fail_offer, failed)

    def caught_up(self, completed_steps: int, origin: Origin | None = None) -> None:
        """Tells the coordinator at once how many updates the parameters have had now; see `Session.caught_up`."""
        self._check_usable()
        self._bridge.call_soon(lambda: self._presence.progress(completed_steps, origin, beat=True))

    def note_progress(self, completed_steps: int) -> None:
        """Notes how many updates the parameters have had; heartbeats and a Join after a loss say it."""
        self._check_usable()
        self._bridge.call_soon(self._presence.progress, completed_steps)

    def report(self, activity: str) -> None:
        """Says what the worker is doing; travels with the next heartbeat."""
        self._check_usable()
        self._presence.standing.activity = activity

    def publish(self, completed_steps: int) -> None:
        """Says that the train state behind so many steps can be read from this worker's host tier."""
        self._bridge.call_soon(self._presence.publish, completed_steps)

    def wait_settled(self, completed_steps: int, within: timedelta) -> None:
        """Waits until the coordinator has had the state behind a step stored, or has given it up.

        Raises:
            Deadline: it did neither in time.
        """
        self._check_usable()
        work = self._presence.settled(completed_steps, within)
        self._bridge.wait(work, _seconds(within), f"the state behind step {completed_steps} to be stored")

    def interrupt(self, reason: str) -> None:
        """Makes every wait, now and from now on, raise `Interrupted`. May be called from a signal handler."""
        self._bridge.call_soon(self._presence.fail, Interrupted(reason))

    def close(self, reason: str = "done", parameters_sha256: str = "") -> None:
        """Commits what is owed, leaves the run and ends the connection. A second call does nothing.

        Args:
            reason: for the coordinator's log.
            parameters_sha256: hash of the parameters after the last step; empty for unknown.
        """
        if self._closed:
            return
        owed = self._commit_future if self._step else None
        self._closed = True
        try:
            if owed:
                self._wait(owed, "the commit of the last step")
        except (AyniError, ConnectionError) as error:
            _log.warning("the last step was not committed: %s", error)
        finally:
            leaving = self._presence.leave(reason, parameters_sha256)
            self._bridge.wait(leaving, _GRACE.total_seconds(), "the goodbye to the coordinator")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._step = self._commit_future = None
        self.close("done" if error is None else f"failed: {type(error).__name__}: {error}")

    def _has_news(self) -> bool:
        return self._presence.member.news.has_more

    def _next_shard(self) -> ShardAssignment | None:
        waiting = self._presence.next_assignment(self._config.shard_timeout)
        return self._bridge.wait(waiting, _seconds(self._config.shard_timeout), "an assignment")

    def _contribute(self, offer: Offer) -> "Future[Vector]":
        contributions.check(offer)
        dtype = offer.assignment.wire_type or self.wire_type
        spec = TensorSpec(dtype=dtype, num_elements=offer.out.size, component_sizes=offer.component_sizes)
        return self._submit(self._mean(offer, spec, time.perf_counter()))

    async def _mean(self, offer: Offer, spec: TensorSpec, handed_over: float) -> Vector:
        begin = messages.begin_frame(self._presence.member.membership.worker_id, offer, spec)
        out = None if offer.assignment.extra else offer.out
        contribution = Contribution(name=offer.name, begin=begin, spec=spec, parts=offer.parts, out=out, offer=offer)
        outcome = await self._presence.contribute(offer.assignment, offer.bucket, contribution)
        if self._on_exchange:
            self._on_exchange(contributions.exchange_of(offer, handed_over, outcome.times))
        return offer.out

    def _start_commit(self, assignment: ShardAssignment, report: Report) -> "Future[Commit | ShardAssignment]":
        return self._submit(self._presence.commit(assignment, report))

    @property
    def _is_elastic(self) -> bool:
        return self._config.elastic

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return self._bridge.submit(work)

    def _wait(self, future: "Future[T]", what: str) -> T:
        return bridge.wait(future, _seconds(self._config.exchange_timeout), what)


async def _join(config: ClientConfig, gpu_count: int, backend: str, rounds: SliceRounds | None) -> Presence:
    def dial() -> Coordinator:
        channel = open_channel(
            config.coordinator, config.token, config.tls, config.insecure, keepalive=config.keepalive
        )
        return Coordinator(channel, config.coordinator)

    facts = _facts(config, gpu_count, backend)
    standing = Standing(
        worker_name=facts.worker_name,
        elastic=config.elastic,
        completed_steps=config.completed_steps,
        origin=config.origin,
        parameters_sha256=config.parameters_sha256,
        lost_advice=config.lost_advice,
        vectors=SharedVectors(is_wanted=config.gradients == "auto"),
    )
    patience = Patience(exchange=config.exchange_timeout, rejoin=config.rejoin_timeout)
    try:
        await take_part(config, standing, rounds, backend)
        facts = replace(
            facts,
            peer_address=standing.peers.address,
            store_address=standing.peers.store_address,
            peer_shared_memory=standing.peers.shared_memory,
            topologies=standing.peers.topologies,
        )
        presence = Presence(Rejoining(dial, facts, standing, patience), standing, patience)
        await presence.join(config.connect_timeout)
    except BaseException:
        await standing.peers.close()
        raise
    return presence


def _facts(config: ClientConfig, gpu_count: int, backend: str) -> JoinFacts:
    return JoinFacts(
        worker_name=config.worker_name or f"{socket.gethostname()}-{os.getpid()}",
        join_nonce="",
        backend=backend,
        gpu_count=gpu_count,
        run_id=config.run_id,
        device_names=config.device_names,
        worker_address=config.worker_address,
        wire_types=config.wire_types,
        task_fingerprint=config.task_fingerprint,
        task_summary=config.task_summary,
        dataset_fingerprint=config.dataset_fingerprint,
        dataset_summary=config.dataset_summary,
        num_training_samples=config.num_training_samples,
        num_evaluation_samples=config.num_evaluation_samples,
        elastic=config.elastic,
        max_microbatches=config.max_microbatches,
        memory_bytes=config.memory_bytes,
    )


def _check_token(token: str) -> None:
    if not re.fullmatch(r"[!-~]*", token):
        raise SettingsError("the join token may have printable ASCII characters only, and no spaces")


def _seconds(limit: timedelta) -> float:
    return (limit + _GRACE).total_seconds()
