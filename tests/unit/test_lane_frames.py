"""Frames of lanes that wait to leave: in order, joined, and in messages of bounded length."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.lane_frames import MESSAGE_BYTES, Waiting
from ayni.v1 import coordinator_pb2 as pb


def response(lane: int, *messages: bytes, **fields: Any) -> pb.LaneResponse:
    return pb.LaneResponse(lane=lane, messages=messages, **fields)


def test_what_one_lane_says_in_one_go_is_one_frame():
    waiting: Waiting[pb.LaneResponse] = Waiting()
    assert not waiting
    for frame in (response(1, b"a"), response(1, b"b", status=pb.LaneStatus()), response(2, b"c"), response(1, b"d")):
        waiting.put(frame)
    assert waiting
    assert waiting.num_bytes == 4
    frames = waiting.take()
    assert [(frame.lane, list(frame.messages)) for frame in frames] == [(1, [b"a", b"b"]), (2, [b"c"]), (1, [b"d"])]
    assert frames[0].HasField("status")
    assert not waiting
    assert waiting.take() == []


def test_frames_of_workers_wait_the_same_way():
    waiting: Waiting[pb.LaneRequest] = Waiting()
    waiting.put(pb.LaneRequest(lane=1, method=pb.LANE_METHOD_COMMIT_STEP))
    waiting.put(pb.LaneRequest(lane=1, messages=[b"a"]))
    waiting.put(pb.LaneRequest(lane=1, half_close=True))
    expected = pb.LaneRequest(lane=1, method=pb.LANE_METHOD_COMMIT_STEP, messages=[b"a"], half_close=True)
    assert waiting.take() == [expected]


@pytest.mark.parametrize(("size", "counts"), [(MESSAGE_BYTES, [1, 1, 1]), (MESSAGE_BYTES // 2, [2, 1]), (1, [3])])
def test_a_message_takes_no_more_frames_once_it_is_long_enough(size: int, counts: list[int]):
    waiting: Waiting[pb.LaneResponse] = Waiting()
    for lane in range(3):
        waiting.put(response(lane, bytes(size)))
    taken = []
    while waiting:
        taken.append(len(waiting.take()))
    assert taken == counts
    assert waiting.num_bytes == 0


@given(said=st.lists(st.tuples(st.integers(1, 3), st.sampled_from((0, 5, MESSAGE_BYTES // 3)), st.booleans())))
def test_nothing_is_lost_and_each_lane_keeps_its_order(said: list[tuple[int, int, bool]]):
    waiting: Waiting[pb.LaneResponse] = Waiting()
    sent: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for lane, size, takes in said:
        waiting.put(response(lane, bytes(size)))
        sent.setdefault(lane, []).append(size)
        for frame in waiting.take() if takes else ():
            left.setdefault(frame.lane, []).extend(map(len, frame.messages))
    while waiting:
        for frame in waiting.take():
            left.setdefault(frame.lane, []).extend(map(len, frame.messages))
    assert left == sent
    assert waiting.num_bytes == 0
