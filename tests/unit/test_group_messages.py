"""Exchange groups, slices and bucket names as messages and back."""

from dataclasses import replace

import pytest

from ayni.buckets import FLAT, Bucket
from ayni.errors import BadRequest, TooLarge
from ayni.messages import bucket_message, bucket_of, group_message, group_of, slice_message, slice_of
from ayni.step_values import SliceDigest
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service import wire
from coordinator_service.values import ExchangeNews, Regroup
from tests.support.peer_groups import group


@pytest.mark.parametrize(
    "bucket", [FLAT, Bucket("block", 0), Bucket("block", 7), *(Bucket("non_block", i) for i in range(3))]
)
def test_every_bucket_has_a_name(bucket):
    assert bucket_of(bucket_message(bucket)) == bucket


@pytest.mark.parametrize("message", [pb.BucketName(), pb.BucketName(component=pb.NON_BLOCK_COMPONENT_UNSPECIFIED)])
def test_what_names_no_bucket_is_refused(message):
    with pytest.raises(BadRequest, match="is no bucket"):
        bucket_of(message)


def test_a_group_and_a_slice_come_back_as_they_were():
    sharded = group(3 << 32 | 1, (0, 1), others=(2,))
    assert group_of(group_message(sharded)) == sharded
    short = replace(sharded, max_bucket_bytes=1 << 20)
    assert group_of(group_message(short)) == short
    assert group_of(pb.ExchangeGroup(generation=1)).max_bucket_bytes == 16 << 30
    one = SliceDigest(
        bucket=FLAT,
        first_element=65536,
        num_elements=3,
        digests=b"d" * 16,
        squares=(1.0, 1e-20),
        bucket_elements=65539,
    )
    assert slice_of(slice_message(one)) == one


def test_a_regroup_is_a_frame():
    frame = wire.assignment_frame(Regroup(step=4, attempt=1, group=group(2, (0,)), reason="bee left"))
    assert (frame.regroup.step, frame.regroup.attempt, frame.regroup.reason) == (4, 1, "bee left")
    assert group_of(frame.regroup.group) == group(2, (0,))


def test_news_of_a_group_comes_with_a_heartbeat():
    request = pb.HeartbeatRequest(generation=5, contributed_leases=[7, 8], lost_owners=[1])
    assert wire.exchange_news(request) == ExchangeNews(generation=5, contributed=(7, 8), lost=(1,))
    with pytest.raises(TooLarge, match="lost_owners is 65537 long"):
        wire.exchange_news(pb.HeartbeatRequest(lost_owners=[1] * 65537))


def test_what_a_worker_takes_part_in_is_kept_where_it_is_known():
    request = pb.JoinRequest(
        worker_name="ant",
        join_nonce="n",
        backend="cpu",
        topologies=["torch", "mesh"],
        peer_address="h:1",
        store_address="h:2",
    )
    applicant = wire.applicant(request, "session", "peer")
    assert (applicant.topologies, applicant.peer_address, applicant.store_address) == (("torch",), "h:1", "h:2")
