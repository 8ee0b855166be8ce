"""Members, leases and epochs, under every order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ayni.errors import IdentityTaken, Incompatible, UnknownWorker, WorldFull
from coordinator_service.membership import Applicant, Membership


def applicant(name: str, nonce: str = "", **agreements: str) -> Applicant:
    return Applicant(
        name=name,
        nonce=nonce or f"nonce of {name}",
        session=f"session of {name}",
        peer="127.0.0.1:1",
        agreements=agreements,
        summaries={key: f"summary of {value}" for key, value in agreements.items()},
    )


@pytest.fixture
def membership() -> Membership:
    return Membership(min_workers=2, start_workers=2, max_workers=3, lease=10.0)


def test_epoch_forms_when_enough_are_ready(membership):
    ant = membership.admit(0.0, applicant("ant"))
    assert membership.form_epoch() == (None, "waiting for 2 more workers (0 of 2); loading: ant")
    ant.ready = True
    assert membership.form_epoch() == (None, "waiting for 1 more worker (1 of 2)")
    membership.admit(0.0, applicant("bee")).ready = True
    epoch, reason = membership.form_epoch()
    assert (epoch.number, epoch.workers, reason) == (1, (0, 1), "epoch 1 formed with 2 workers")
    assert membership.form_epoch()[0] is epoch, "an unchanged world keeps its epoch"


def members_of_epoch(membership: Membership) -> tuple[int, ...]:
    epoch, _ = membership.form_epoch()
    assert epoch
    return epoch.workers


def test_start_may_need_more_workers_than_going_on():
    membership = Membership(min_workers=1, start_workers=2, max_workers=3, lease=10.0)
    membership.admit(0.0, applicant("ant")).ready = True
    assert membership.form_epoch()[1] == "waiting for 1 more worker (1 of 2)"
    membership.admit(0.0, applicant("bee")).ready = True
    assert members_of_epoch(membership) == (0, 1)
    membership.remove(0)
    assert members_of_epoch(membership) == (1,)


def test_same_process_start_may_ask_twice(membership):
    first = membership.admit(0.0, applicant("ant"))
    assert membership.admit(5.0, applicant("ant")) is first
    assert first.last_seen == 5.0


def test_two_workers_can_not_claim_one_name(membership):
    membership.admit(0.0, applicant("ant"))
    with pytest.raises(IdentityTaken, match=r"'ant' belongs to live worker 0 at 127\.0\.0\.1:1"):
        membership.admit(0.0, applicant("ant", nonce="another start"))


def test_name_is_free_again_after_its_holder_left(membership):
    membership.admit(0.0, applicant("ant"))
    membership.remove(0)
    assert membership.admit(1.0, applicant("ant", nonce="another start")).worker_id == 1


def test_full_world_takes_no_more(membership):
    for name in ("ant", "bee", "cat"):
        membership.admit(0.0, applicant(name))
    with pytest.raises(WorldFull, match="has 3 workers"):
        membership.admit(0.0, applicant("dog"))


def test_first_worker_sets_what_all_must_share(membership):
    membership.admit(0.0, applicant("ant", task_fingerprint="", dataset_fingerprint="d1"))
    membership.admit(0.0, applicant("bee", task_fingerprint="t1", dataset_fingerprint=""))
    with pytest.raises(
        Incompatible, match=r"has t1 \(summary of t1\), worker 'cat' has t2 \(summary of t2\)"
    ) as caught:
        membership.admit(0.0, applicant("cat", task_fingerprint="t2", dataset_fingerprint="d1"))
    assert caught.value.metadata == {"field": "task_fingerprint", "coordinator": "t1", "worker": "t2"}
    assert membership.admit(0.0, applicant("cat", task_fingerprint="t1", dataset_fingerprint="d1")).worker_id == 2


def test_lease_ends_in_silence(membership):
    membership.admit(0.0, applicant("ant"))
    membership.admit(0.0, applicant("bee"))
    membership.renew(8.0, 1, "computing")
    assert [member.name for member in membership.expired(10.1)] == ["ant"]
    assert membership.members[1].activity == "computing"


def test_session_of_another_is_refused(membership):
    membership.admit(0.0, applicant("ant"))
    membership.admit(0.0, applicant("bee"))
    assert membership.member(1, "session of bee").name == "bee"
    for worker, session in ((0, "session of bee"), (7, "session of ant"), (0, "")):
        with pytest.raises(UnknownWorker, match=f"worker {worker} is not a member"):
            membership.member(worker, session)


class Events(RuleBasedStateMachine):
    """Random joins, leaves and silences."""

    def __init__(self):
        super().__init__()
        self.membership = Membership(min_workers=2, start_workers=2, max_workers=4, lease=10.0)
        self.now = 0.0
        self.starts = 0
        self.seen_ids: set[int] = set()
        self.last_epoch = 0

    @rule(ready=st.booleans())
    def join(self, ready):
        self.starts += 1
        try:
            member = self.membership.admit(self.now, applicant(f"w{self.starts}"))
        except WorldFull:
            assert len(self.membership.members) == 4
            return
        assert member.worker_id not in self.seen_ids, "an id is never used again"
        self.seen_ids.add(member.worker_id)
        member.ready = ready

    @precondition(lambda self: self.membership.members)
    @rule(data=st.data())
    def leave(self, data):
        self.membership.remove(data.draw(st.sampled_from(sorted(self.membership.members))))

    @precondition(lambda self: self.membership.members)
    @rule(data=st.data(), seconds=st.floats(0.1, 20))
    def silence(self, data, seconds):
        self.now += seconds
        kept = data.draw(st.sets(st.sampled_from(sorted(self.membership.members))))
        for worker in kept:
            self.membership.renew(self.now, worker)
        for member in self.membership.expired(self.now):
            assert member.worker_id not in kept
            self.membership.remove(member.worker_id)

    @rule()
    def form(self):
        epoch, reason = self.membership.form_epoch()
        ready = sorted(w for w, member in self.membership.members.items() if member.ready)
        assert reason
        if epoch is None:
            assert len(ready) < 2
        else:
            assert list(epoch.workers) == ready
            assert epoch.number >= self.last_epoch
            self.last_epoch = epoch.number

    @invariant()
    def never_too_many(self):
        assert len(self.membership.members) <= 4


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=max(15, settings().max_examples), stateful_step_count=30)
