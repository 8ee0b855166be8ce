"""What workers and the coordinator say of exchange groups, as messages and back."""

from dataclasses import replace
from typing import Any

import pytest

from ayni import frames
from ayni.buckets import FLAT, Bucket
from ayni.errors import AyniError, BadRequest, TooLarge
from ayni.messages import group_message
from ayni.step_values import ExchangeGroup, GroupMember, MicrobatchStats, Report, SliceDigest
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import peer_pb2
from worker_agent import messages
from worker_agent.assignment_frames import Regroup, assignment_frame
from worker_agent.messages import JoinFacts, SignOfLife
from worker_agent.peer_messages import begin_frame, slice_offer_of
from worker_agent.session import ShardAssignment
from worker_agent.slice_offers import Moment, SliceOffer

OFFER = SliceOffer(
    worker_id=3,
    lease_id=1 << 40,
    moment=Moment(generation=(5 << 32) + 1, epoch=5, step=7, attempt=2),
    bucket=FLAT,
    spec=TensorSpec(dtype="float32", num_elements=200_000, component_sizes=(150_000, 50_000)),
    start=65_536,
    stop=131_072,
    takes_mean=True,
    stats=(
        MicrobatchStats(microbatch=4, weight=9, loss_sum=0.0, num_correct=1, num_predictions=2),
        MicrobatchStats(microbatch=5, weight=0, non_finite=True),
    ),
)
GROUP = ExchangeGroup(
    generation=9,
    topology="sharded",
    members=(
        GroupMember(worker_id=0, worker_name="ant", address="127.0.0.1:1", is_owner=True),
        GroupMember(worker_id=4, worker_name="bee"),
    ),
    secret="f" * 32,
    chunk_bytes=1 << 20,
)


def begin_of(frame: bytes) -> peer_pb2.SliceBegin:
    number, content = frames.decode_frame(frame)
    assert number == 1
    assert isinstance(content, memoryview)
    return peer_pb2.SliceBegin.FromString(bytes(content))


@pytest.mark.parametrize("bucket", [FLAT, Bucket("block", 0), Bucket("block", 31), Bucket("non_block", 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_the_first_frame_of_a_slice_there_and_back(bucket, dtype):
    said = replace(OFFER, bucket=bucket, spec=replace(OFFER.spec, dtype=dtype), takes_mean=dtype == "int8")
    assert slice_offer_of(begin_of(begin_frame(said))) == said


def no_bucket(begin: Any) -> None:
    begin.ClearField("bucket")


def no_type(begin: Any) -> None:
    begin.round.tensor.dtype = 0


def wrong_scale(begin: Any) -> None:
    begin.round.tensor.scale_block_elements = 3


def wrong_sizes(begin: Any) -> None:
    begin.round.tensor.component_sizes.append(1)


def many(begin: Any) -> None:
    for _ in range((1 << 16) + 1):
        begin.round.microbatches.add()


REFUSED: list[tuple[Any, type[AyniError]]] = [
    (no_bucket, BadRequest),
    (no_type, BadRequest),
    (wrong_scale, BadRequest),
    (wrong_sizes, BadRequest),
    (many, TooLarge),
]


@pytest.mark.parametrize(("damage", "refusal"), REFUSED)
def test_a_first_frame_that_makes_no_sense_is_refused(damage, refusal):
    begin = begin_of(begin_frame(OFFER))
    damage(begin)
    with pytest.raises(refusal):
        slice_offer_of(begin)


def test_an_assignment_and_a_regroup_carry_the_group():
    message = pb.ShardAssignmentResponse(assignment=pb.Assignment(step=3, kind=pb.STEP_KIND_TRAIN))
    assignment = assignment_frame(message)
    assert isinstance(assignment, ShardAssignment)
    assert assignment.group is None
    message.assignment.group.CopyFrom(group_message(GROUP))
    assignment = assignment_frame(message)
    assert isinstance(assignment, ShardAssignment)
    assert assignment.group == GROUP
    again = pb.Regroup(step=3, attempt=1, group=group_message(GROUP), reason="bee died")
    expected = Regroup(step=3, attempt=1, group=GROUP, reason="bee died")
    assert assignment_frame(pb.ShardAssignmentResponse(regroup=again)) == expected


def test_a_commit_says_what_was_taken_down_under_which_generation():
    taken = SliceDigest(bucket=FLAT, first_element=65_536, num_elements=5, digests=b"d" * 16, squares=(2.0, 1e-20))
    report = Report(num_buckets=1, microbatches=(), generation=9, slices=(taken,))
    assignment = assignment_frame(pb.ShardAssignmentResponse(assignment=pb.Assignment(kind=pb.STEP_KIND_TRAIN)))
    assert isinstance(assignment, ShardAssignment)
    request = messages.commit_request(4, assignment, report)
    assert request.generation == 9
    (said,) = request.slices
    assert (said.bucket.flat, said.first_element, said.num_elements) == (True, 65_536, 5)
    assert (said.digests, list(said.squares)) == (b"d" * 16, [2.0, 1e-20])


def test_a_heartbeat_says_what_left_and_who_is_lost():
    sign = SignOfLife(
        epoch=1, step=2, activity="exchanging", generation=9, contributed_leases=(5, 1 << 40), lost_owners=(4,)
    )
    request = messages.heartbeat_request(0, sign)
    assert (request.generation, list(request.contributed_leases)) == (9, [5, 1 << 40])
    assert list(request.lost_owners) == [4]


def test_a_join_says_where_others_dial_and_in_what_the_worker_takes_part():
    facts = JoinFacts(
        worker_name="ant",
        join_nonce="n",
        backend="cpu",
        gpu_count=0,
        peer_address="10.0.0.1:5",
        topologies=("sharded", "torch"),
        store_address="10.0.0.1:6",
    )
    request = messages.join_request(facts, 1)
    said = request.peer_address, request.store_address, list(request.topologies)
    assert said == ("10.0.0.1:5", "10.0.0.1:6", ["sharded", "torch"])
