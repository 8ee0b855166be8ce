"""Steps of a run, as stories of its workers: leases, computing and commits, and how gradients travel.

A vector travels in pieces: in chunks where they are few, in fewer and longer pieces else, so that the number of events
stays bounded. What a piece costs is in proportion to its bytes, so only the two ends of a transfer become coarser.
"""

from collections import defaultdict
from dataclasses import dataclass

from scripts.simulate_events import Clock, Gate, Host, Link, Node, Process, Story, send
from scripts.simulate_scenario import Costs, Scenario

SMALL_BYTES = 300.0
"""A message without gradients, with its headers."""
MOST_PIECES = 32_000
"""Pieces that all workers send in a step."""
STEPS = 2
"""Steps that are simulated; the last one counts, since it begins while the one before is still being told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One step.

    Attributes:
        step_s: from one commit to the next.
        busy_s: for how long each resource works; where every worker has one, the busiest worker's.
        workers_cpu_s: processor seconds of all workers together, without computing.
    """

    step_s: float
    busy_s: dict[str, float]
    workers_cpu_s: float


class Steps:
    """Some steps of a run."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        self._clock = Clock()
        self._scenario = scenario
        self._worker = costs.worker
        self._hub_costs = costs.coordinator.slowed(scenario.workers * costs.beat_s / scenario.beat_interval_s)
        self._commit_s = self._hub_costs.commit(scenario.workers) / 3
        self._store = self._clock.pause(costs.store_s)
        self._latency_s = scenario.latency_s + costs.hop_s
        self._hub, self._nodes = self._build()
        self._pieces = self._count_pieces()
        pieces = max(1, self._pieces) * scenario.buckets
        self._in_piece = scenario.in_bytes / pieces, scenario.in_chunks / pieces
        self._out_piece = scenario.out_bytes / pieces, scenario.out_chunks / pieces
        """Bytes and chunks of a piece."""
        self._commits: list[tuple[float, dict[str, float], float]] = []

    def make(self) -> Outcome:
        """Makes the steps, and returns what the last one took."""
        self._clock.begin(self._run())
        self._clock.run()
        assert len(self._commits) == STEPS, "every step is committed"
        (before, had, cpu), (now, has, more_cpu) = self._commits[-2:]
        busy_s = {name: seconds - had[name] for name, seconds in has.items()}
        return Outcome(step_s=now - before, busy_s=busy_s, workers_cpu_s=more_cpu - cpu)

    def _run(self) -> Story:
        for _ in range(STEPS):
            committed = Gate(self._scenario.workers)
            self._means = defaultdict[tuple[int, int], Gate](lambda: Gate(self._scenario.workers))
            for worker in self._nodes:
                self._clock.begin(self._turn(worker, committed))
            yield committed.opened()
            yield self._hub.process.work(self._hub_costs.step_s)
            yield self._store
            self._note_commit()
            for worker in self._nodes:
                self._clock.begin(self._hear(worker))

    def _turn(self, worker: Node, committed: Gate) -> Story:
        """A worker's part in a step: lease, computing and exchange, commit."""
        yield from self._hear(worker)
        exchanged = Gate(self._scenario.buckets)
        for bucket in range(self._scenario.buckets):
            self._clock.begin(self._exchange(worker, bucket, exchanged))
        yield exchanged.opened()
        yield worker.process.work(self._worker.commit_s / 3)
        yield from send(worker, self._hub, SMALL_BYTES, self._latency_s)
        yield self._hub.process.work(self._commit_s)
        committed.come()

    def _hear(self, worker: Node) -> Story:
        """The coordinator tells a worker something: its lease, or a commit."""
        yield self._hub.process.work(self._commit_s)
        yield from send(self._hub, worker, SMALL_BYTES, self._latency_s)
        yield worker.process.work(self._worker.commit_s / 3)

    def _exchange(self, worker: Node, bucket: int, exchanged: Gate) -> Story:
        yield self._clock.pause(self._scenario.ready_s(bucket))
        if self._pieces:
            yield from self._reduce(worker, bucket)
        exchanged.come()

    def _reduce(self, worker: Node, bucket: int) -> Story:
        """A bucket of a worker is ready; ends when the worker has the mean."""
        raise NotImplementedError

    def _build(self) -> tuple[Node, list[Node]]:
        scenario, bench = self._scenario, self._scenario.bench
        if bench:
            host = Host(self._clock, bench.cores)
            crews = [Process(host) for _ in range(min(bench.crews, scenario.workers))]
            spread = [crews[number * len(crews) // scenario.workers] for number in range(scenario.workers)]
            hub = Process(host)
        else:
            hub, *spread = [Process(Host(self._clock, 1)) for _ in range(1 + scenario.workers)]
        return self._node(hub, scenario.coordinator_link), [self._node(one, scenario.link) for one in spread]

    def _node(self, process: Process, bytes_per_s: float) -> Node:
        return Node(process=process, up=Link(self._clock, bytes_per_s), down=Link(self._clock, bytes_per_s))

    def _count_pieces(self) -> int:
        """Returns in how many pieces a bucket travels; 0 without parameters."""
        buckets = self._scenario.buckets
        return min(max(1, MOST_PIECES // (self._scenario.workers * buckets)), self._scenario.in_chunks // buckets)

    def _note_commit(self) -> None:
        nodes, hub = self._nodes, self._hub
        busy_s = {
            "the coordinator's processor": hub.process.busy_s,
            "the coordinator's link": max(hub.up.busy_s, hub.down.busy_s),
            "a worker's processor": max(node.process.busy_s for node in nodes),
            "a worker's link": max(max(node.up.busy_s, node.down.busy_s) for node in nodes),
        }
        workers_cpu_s = sum(process.busy_s for process in {node.process for node in nodes})
        self._commits.append((self._clock.now, busy_s, workers_cpu_s))
