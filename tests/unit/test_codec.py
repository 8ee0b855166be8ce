"""Hand-written frames are read as protobuf reads them, whatever is done to them; `make fuzz` looks longer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import fuzz_codec
from tests.support.fuzz_values import draw_message
from tests.support.fuzz_wire import draw_damaged, nested

MESSAGES = [message.DESCRIPTOR for message in (*fuzz_codec.GRADIENTS, *fuzz_codec.BLOCKS)]
FRAMES = fuzz_codec.corpus()


@st.composite
def damaged_frames(draw) -> bytes:
    frame = draw(st.sampled_from(FRAMES)) if draw(st.booleans()) else None
    return draw_damaged(
        draw, draw_message(draw, draw(st.sampled_from(MESSAGES)), {}).SerializeToString() if frame is None else frame
    )


@pytest.mark.parametrize("check", fuzz_codec.CHECKS)
def test_whole_frames_and_those_of_two_kinds_mean_the_same(check):
    for frame in FRAMES:
        check(frame)


@pytest.mark.parametrize("check", fuzz_codec.CHECKS)
@given(frame=damaged_frames())
def test_damaged_frames_are_refused_or_mean_the_same(check, frame):
    check(frame)


@pytest.mark.parametrize("check", fuzz_codec.CHECKS)
@pytest.mark.parametrize(
    "frame",
    [
        b"\x1d\x00\x08\xac\x02\x10\x01\x1a\x03\x03\xc8\x01(\x00=\x01\x00\x02\x00z\x07payload",
        b"\x12\x02\x08\x05\x1a\x00\x12\x02\x10\x01",
        b"\x12\x02\x08\x05\xfa\x01\x00",
        nested(500, 2),
        b"\x0b" * 1_000,
    ],
)
def test_what_was_found_before(check, frame):
    check(frame)
