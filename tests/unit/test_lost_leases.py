"""Leases that end inside a step: what stays, what starts again, and who computes what is missing."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni import tree
from ayni.buckets import Bucket
from ayni.errors import Duplicate, LeaseRevoked, SpecMismatch
from ayni.step_values import MicrobatchStats, Report
from ayni.tensors import TensorSpec
from coordinator_service.leases import Change, Key, Lease, Moment
from coordinator_service.steps import Step

MOMENT = Moment(epoch=1, step=3, attempt=0)
NUM, SIZE, CHUNK = 8, 6, 2
SPEC = TensorSpec(dtype="float32", num_elements=SIZE)
BUCKETS = (Bucket("block", 0), Bucket("block", 1))
GARBAGE = np.full(SIZE, 1e6, np.float32)


def gradient(bucket: Bucket, microbatch: int) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(key=[bucket.index, microbatch]))
    return rng.standard_normal(SIZE, dtype=np.float32)


def node_sum(bucket: Bucket, node: tree.Node) -> np.ndarray:
    halves = tree.children(node) if node.stop - node.start > 1 else None
    if halves is None:
        return gradient(bucket, node.start)
    return node_sum(bucket, halves[0]) + node_sum(bucket, halves[1])


def expected(bucket: Bucket) -> bytes:
    return (node_sum(bucket, tree.root(NUM)) / np.float32(NUM)).tobytes()


def stats(lease: Lease) -> list[MicrobatchStats]:
    return [MicrobatchStats(microbatch=m, weight=1, loss_sum=1.0) for m in range(lease.start, lease.stop)]


class Game:
    """A step whose workers say and send everything by hand; collects the means as a receiver would."""

    def __init__(self, *shares: int) -> None:
        edges = np.cumsum([0, *shares]).tolist()
        leases = [
            Lease(lease_id=10 + w, worker_id=w, worker_name=f"w{w}", start=a, stop=b)
            for w, (a, b) in enumerate(itertools.pairwise(edges))
        ]
        self.step = Step(moment=MOMENT, kind="train", num_microbatches=NUM, leases=leases, chunk_elements=CHUNK)
        self.leases = {lease.lease_id: lease for lease in leases}
        self.sent: dict[tuple[int, Bucket], list[int]] = {}
        self.means: dict[Bucket, dict[int, bytes]] = {bucket: {} for bucket in BUCKETS}
        self.next_id = 100

    def take(self, change: Change) -> Change:
        for bucket in change.restarted:
            self.means[bucket].clear()
            for key in [key for key in self.sent if key[1] == bucket]:
                del self.sent[key]
        for bucket, reduced in change.reduced:
            self.collect(bucket, reduced)
        for lease in change.ended:
            for key in [key for key in self.sent if key[0] == lease.lease_id]:
                del self.sent[key]
        return change

    def collect(self, bucket: Bucket, reduced: Iterable) -> None:
        for chunk in reduced:
            assert chunk.offset not in self.means[bucket], "a chunk of the mean came twice"
            self.means[bucket][chunk.offset] = chunk.values_C.tobytes()

    def begin(self, lease_id: int, bucket: Bucket) -> None:
        lease = self.leases[lease_id]
        self.take(self.step.begin(lease, bucket, SPEC, stats(lease), len(BUCKETS)))
        round_ = self.step.rounds[bucket]
        parts = [] if round_.is_held(lease_id) else tree.cover(lease.start, lease.stop, NUM)
        self.sent[lease_id, bucket] = [0] * len(parts)

    def send(
        self, lease_id: int, bucket: Bucket, chunks: int = SIZE // CHUNK, values: np.ndarray | None = None
    ) -> None:
        lease, sent = self.leases[lease_id], self.sent[lease_id, bucket]
        for part, node in enumerate(tree.cover(lease.start, lease.stop, NUM)[: len(sent)]):
            whole = node_sum(bucket, node) if values is None else values
            for _ in range(chunks):
                if (offset := sent[part]) < SIZE:
                    piece = whole[offset : offset + CHUNK].copy()
                    sent[part] += CHUNK
                    self.collect(bucket, self.step.rounds[bucket].contribute(lease_id, part, offset, piece))

    def contribute(self, lease_id: int) -> None:
        for bucket in BUCKETS:
            if (lease_id, bucket) not in self.sent:
                self.begin(lease_id, bucket)
            self.send(lease_id, bucket)

    def extra(self, worker_id: int, start: int, stop: int, rival_of: int | None = None) -> int:
        self.next_id += 1
        lease = Lease(
            lease_id=self.next_id,
            worker_id=worker_id,
            worker_name=f"w{worker_id}",
            start=start,
            stop=stop,
            is_extra=True,
            rival_of=rival_of,
        )
        self.leases[self.next_id] = lease
        self.step.add(lease)
        return self.next_id

    def end(self, worker_id: int) -> Change:
        return self.take(self.step.end(self.step.leases_of(worker_id), "it is gone"))

    def commit(self, *workers: int) -> None:
        for worker in workers:
            for lease in self.step.leases_of(worker):
                self.take(self.step.commit(lease, Report(num_buckets=len(BUCKETS), microbatches=stats(lease))))

    def check(self) -> None:
        assert self.step.done
        for bucket in BUCKETS:
            assert b"".join(self.means[bucket][offset] for offset in range(0, SIZE, CHUNK)) == expected(bucket)
        spans = [(lease.start, lease.stop) for lease, _ in self.step.contributions()]
        assert [m for start, stop in spans for m in range(start, stop)] == list(range(NUM))
        assert sum(weight for _, weight in self.step.contributions()) == NUM
        assert self.step.totals().total_weight == NUM
        assert self.step.held_bytes == 0


@pytest.fixture
def game() -> Game:
    return Game(3, 3, 2)


def undisturbed_hash() -> str:
    game = Game(8)
    game.contribute(10)
    return game.step.gradient_hash


def test_worker_that_sent_nothing_is_replaced(game):
    game.contribute(11)
    game.contribute(12)
    assert game.end(0).restarted == ()
    assert game.step.orphans() == [(0, 3)]
    game.contribute(game.extra(1, 0, 2))
    game.contribute(game.extra(2, 2, 3))
    assert game.step.orphans() == []
    game.commit(1, 2)
    game.check()
    assert game.step.gradient_hash == undisturbed_hash()


def test_half_of_a_contribution_leaves_no_trace(game):
    """What the dead worker sent is wrong, so that any byte of it in the mean would show."""
    for lease in (11, 12):
        game.contribute(lease)
    game.begin(10, BUCKETS[0])
    game.send(10, BUCKETS[0], chunks=1, values=GARBAGE)
    assert len(game.means[BUCKETS[0]]) == 1, "the garbage has reached the mean"
    change = game.end(0)
    assert change.restarted == (BUCKETS[0],)
    assert len(game.means[BUCKETS[0]]) == 0
    extra = game.extra(1, 0, 3)
    for lease in (11, 12, extra):
        game.contribute(lease)
    game.commit(1, 2)
    game.check()


def test_whole_contribution_of_a_dead_worker_counts(game):
    game.contribute(10)
    change = game.end(0)
    assert change.restarted == ()
    assert game.step.orphans() == []
    game.contribute(11)
    game.contribute(12)
    game.commit(1, 2)
    game.check()
    assert [lease.worker_name for lease, _ in game.step.contributions()] == ["w0", "w1", "w2"]


def test_bucket_that_is_there_whole_is_not_asked_for_again(game):
    game.begin(10, BUCKETS[0])
    game.send(10, BUCKETS[0])
    game.end(0)
    assert game.step.orphans() == [(0, 3)]
    extra = game.extra(1, 0, 3)
    for lease in (11, 12, extra):
        game.contribute(lease)
    assert game.step.rounds[BUCKETS[0]].is_held(extra)
    assert not game.step.rounds[BUCKETS[1]].is_held(extra)
    game.commit(1, 2)
    game.check()


def test_restart_loses_what_another_dead_worker_left_whole(game):
    game.contribute(10)
    game.end(0)
    game.begin(11, BUCKETS[1])
    game.send(11, BUCKETS[1], chunks=1)
    change = game.end(1)
    assert change.restarted == (BUCKETS[1],)
    assert game.step.orphans() == [(0, 3), (3, 6)]
    for start, stop in ((0, 3), (3, 6)):
        game.contribute(game.extra(2, start, stop))
    game.contribute(12)
    game.commit(2)
    game.check()


def test_without_the_number_of_buckets_nothing_is_known_to_be_whole(game):
    lease = game.leases[10]
    game.step.begin(lease, BUCKETS[0], SPEC, stats(lease))
    game.sent[10, BUCKETS[0]] = [0, 0]
    game.send(10, BUCKETS[0])
    game.end(0)
    assert game.step.orphans() == [(0, 3)]


def test_late_worker_loses_the_race_and_is_told_so(game):
    game.contribute(11)
    game.contribute(12)
    rivals = [game.extra(1, 0, 1, rival_of=10), game.extra(2, 1, 3, rival_of=10)]
    game.contribute(rivals[1])
    with pytest.raises(LeaseRevoked, match="taken back: worker w2 was quicker"):
        game.step.lease(0, Key(moment=MOMENT, lease_id=10))
    game.contribute(rivals[0])
    game.commit(1, 2)
    game.check()


def test_late_worker_that_begins_first_keeps_its_lease(game):
    game.contribute(11)
    game.contribute(12)
    rival = game.extra(1, 0, 3, rival_of=10)
    game.begin(10, BUCKETS[0])
    with pytest.raises(LeaseRevoked, match="worker w0 was quicker"):
        game.step.lease(1, Key(moment=MOMENT, lease_id=rival))
    game.contribute(10)
    game.commit(0, 1, 2)
    game.check()


def test_worker_without_a_share_that_never_begins_holds_nobody_up_once_it_is_ended():
    game = Game(4, 4, 0)
    game.contribute(10)
    game.contribute(11)
    assert not game.means[BUCKETS[0]], "it would have missed the mean"
    game.end(2)
    game.commit(0, 1)
    game.check()


def test_stream_that_broke_may_begin_again(game):
    game.begin(10, BUCKETS[0])
    game.send(10, BUCKETS[0], chunks=2)
    change = game.take(game.step.take_back(game.leases[10], BUCKETS[0]))
    assert change.restarted == (BUCKETS[0],)
    for lease in (10, 11, 12):
        game.contribute(lease)
    game.commit(0, 1, 2)
    game.check()


def test_stream_that_broke_after_the_whole_mean_went_out_ends_the_workers_part(game):
    for lease in (10, 11, 12):
        game.contribute(lease)
    change = game.step.take_back(game.leases[10], BUCKETS[0])
    assert [lease.lease_id for lease in change.ended] == [10]
    game.commit(1, 2)
    game.check()


def test_evaluation_of_a_dead_worker_is_made_again():
    leases = [
        Lease(lease_id=1, worker_id=0, worker_name="ant", start=0, stop=2),
        Lease(lease_id=2, worker_id=1, worker_name="bee", start=2, stop=3),
    ]
    step = Step(moment=MOMENT, kind="evaluate", num_microbatches=3, leases=leases)
    step.commit(leases[1], Report(num_buckets=0, microbatches=stats(leases[1])))
    step.end([leases[0]], "gone")
    assert step.orphans() == [(0, 2)]
    extra = Lease(lease_id=3, worker_id=1, worker_name="bee", start=0, stop=2, is_extra=True)
    step.add(extra)
    assert not step.done
    step.commit(extra, Report(num_buckets=0, microbatches=stats(extra)))
    assert step.done
    assert step.totals().total_weight == 3


def test_step_without_anybody_left_is_not_done(game):
    for lease in (10, 11, 12):
        game.contribute(lease)
    for worker in range(3):
        game.end(worker)
    assert game.step.orphans() == []
    assert not game.step.done


def test_same_micro_batches_under_two_leases_in_force_are_refused(game):
    game.begin(10, BUCKETS[0])
    with pytest.raises(Duplicate):
        game.begin(game.extra(1, 0, 3), BUCKETS[0])


def test_number_of_buckets_must_be_the_same_for_all(game):
    game.begin(10, BUCKETS[0])
    with pytest.raises(SpecMismatch, match="worker w1 commits 3 buckets; 2 are expected"):
        game.step.begin(game.leases[11], BUCKETS[0], SPEC, stats(game.leases[11]), 3)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_do_not_depend_on_who_died_when(data):
    """Any mixture of deaths, races, broken streams and restarts ends in the bytes of an undisturbed step."""
    num_workers = data.draw(st.integers(2, 4))
    edges = sorted(data.draw(st.lists(st.integers(0, NUM), min_size=num_workers - 1, max_size=num_workers - 1)))
    shares = np.diff([0, *edges, NUM]).tolist()
    game = Game(*shares)
    alive = list(range(num_workers))
    for _ in range(data.draw(st.integers(0, 25))):
        live = [lease for lease in game.step.live if lease.worker_id in alive]
        lease = data.draw(st.sampled_from(live))
        bucket = data.draw(st.sampled_from(BUCKETS))
        kind = data.draw(st.sampled_from(("begin", "send", "send", "send", "die", "break", "race")))
        began = (lease.lease_id, bucket) in game.sent
        if kind == "begin" and not began:
            game.begin(lease.lease_id, bucket)
        elif kind == "send" and began:
            game.send(lease.lease_id, bucket, chunks=data.draw(st.integers(1, 3)))
        elif kind == "break" and began:
            game.sent.pop((lease.lease_id, bucket))
            game.take(game.step.take_back(lease, bucket))
        elif kind == "die" and len(alive) > 1:
            alive.remove(lease.worker_id)
            game.end(lease.worker_id)
        elif kind == "race" and lease.start < lease.stop and not game.step.has_begun(lease) and lease.rival_of is None:
            if all(other.rival_of != lease.lease_id for other in game.step.live):
                others = [w for w in alive if w != lease.worker_id]
                if others:
                    game.extra(data.draw(st.sampled_from(others)), lease.start, lease.stop, lease.lease_id)
        alive = [w for w in alive if any(not x.is_extra for x in game.step.leases_of(w))]
        if not alive:
            return
        for start, stop in game.step.orphans():
            game.extra(data.draw(st.sampled_from(alive)), start, stop)
    finish(game, alive)


def finish(game: Game, alive: list[int]) -> None:
    """Lets everybody send what is missing, as often as something starts again."""
    for _ in range(20):
        for lease in list(game.step.live):
            for bucket in BUCKETS:
                if lease.lease_id in game.step.ended:
                    break
                if (lease.lease_id, bucket) not in game.sent:
                    if game.step.rounds.get(bucket) and game.step.rounds[bucket].has_begun(lease.lease_id):
                        game.take(game.step.take_back(lease, bucket))
                        if lease.lease_id in game.step.ended:
                            break
                    game.begin(lease.lease_id, bucket)
                game.send(lease.lease_id, bucket)
        alive[:] = [w for w in alive if any(not x.is_extra for x in game.step.leases_of(w))]
        if not alive:
            return
        orphans = game.step.orphans()
        for start, stop in orphans:
            game.extra(alive[0], start, stop)
        whole = all(r.complete for r in game.step.rounds.values()) and len(game.step.rounds) == len(BUCKETS)
        if whole and not orphans:
            break
    game.commit(*alive)
    game.check()
