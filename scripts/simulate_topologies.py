"""How gradients travel: to the coordinator and back, or among the workers."""

from scripts.simulate_events import Gate, Node, Story, send
from scripts.simulate_scenario import Costs, Scenario
from scripts.simulate_steps import SMALL_BYTES, Outcome, Steps


class Star(Steps):
    """Every worker sends all of its gradient to the coordinator, which sends the mean to every worker."""

    def _reduce(self, worker: Node, bucket: int) -> Story:
        stream_s = self._hub_costs.stream(self._scenario.workers) / 2
        yield worker.process.work(self._worker.stream_s / 2)
        yield from send(worker, self._hub, SMALL_BYTES, self._latency_s)
        yield self._hub.process.work(stream_s)
        yield from send(self._hub, worker, SMALL_BYTES, self._latency_s)
        got = Gate(self._pieces)
        for piece in range(self._pieces):
            mean = self._means[bucket, piece]
            self._clock.begin(self._contribute(worker, mean))
            self._clock.begin(self._receive(worker, mean, got))
        yield got.opened()
        yield self._hub.process.work(stream_s)
        yield from send(self._hub, worker, SMALL_BYTES, self._latency_s)
        yield worker.process.work(self._worker.stream_s / 2)

    def _contribute(self, worker: Node, mean: Gate) -> Story:
        size = self._in_piece
        yield worker.process.work(self._worker.one_way(*size))
        yield from send(worker, self._hub, size[0], self._latency_s)
        yield self._hub.process.work(self._hub_costs.one_way(*size))
        mean.come()

    def _receive(self, worker: Node, mean: Gate, got: Gate) -> Story:
        size = self._out_piece
        yield mean.opened()
        yield self._hub.process.work(self._hub_costs.one_way(*size))
        yield from send(self._hub, worker, size[0], self._latency_s)
        yield worker.process.work(self._worker.one_way(*size))
        got.come()


class Sharded(Steps):
    """Every worker reduces its part of every bucket as a star's coordinator does; the coordinator leases and commits.

    All workers do alike. So what a worker sends to its N - 1 peers goes in pieces that each stand for all of them: one
    peer takes a piece, another one the next, with the bytes and the costs of all.
    """

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        super().__init__(scenario, costs)
        self._reducer = costs.coordinator
        """What reducing costs a worker: as much as a coordinator, which has the heartbeats besides."""
        self._places = {id(node): place for place, node in enumerate(self._nodes)}
        part = (scenario.workers - 1) / scenario.workers
        self._in_part = self._in_piece[0] * part, self._in_piece[1] * part
        self._out_part = self._out_piece[0] * part, self._out_piece[1] * part

    def _reduce(self, worker: Node, bucket: int) -> Story:
        streams_s = (self._scenario.workers - 1) * (self._worker.stream_s + self._reducer.stream(1))
        yield worker.process.work(streams_s / 2)
        yield self._clock.pause(2 * self._latency_s)
        got = Gate(self._pieces)
        for piece in range(self._pieces):
            self._clock.begin(self._pass_on(worker, bucket, piece, got))
        yield got.opened()
        yield worker.process.work(streams_s / 2)

    def _pass_on(self, worker: Node, bucket: int, piece: int, got: Gate) -> Story:
        """A piece goes to a peer that adds it; once all pieces like it are added, the mean goes to another one."""
        contributor, reducer = self._worker.one_way, self._reducer.one_way
        added, peer, receiver = self._means[bucket, piece], self._peer(worker, piece), self._peer(worker, piece + 1)
        yield worker.process.work(contributor(*self._in_part))
        yield from send(worker, peer, self._in_part[0], self._latency_s)
        yield peer.process.work(reducer(*self._in_part))
        added.come()
        yield added.opened()
        yield worker.process.work(reducer(*self._out_part))
        yield from send(worker, receiver, self._out_part[0], self._latency_s)
        yield receiver.process.work(contributor(*self._out_part))
        got.come()

    def _peer(self, worker: Node, turn: int) -> Node:
        return self._nodes[(self._places[id(worker)] + 1 + turn) % len(self._nodes)]


def simulate(scenario: Scenario, costs: Costs) -> Outcome:
    """Makes some steps and returns what the last one took."""
    return {"star": Star, "sharded": Sharded}[scenario.topology](scenario, costs).make()
