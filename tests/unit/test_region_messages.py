"""What a worker and the coordinator say about regions is read as it was written, or refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.errors import BadRequest, Fault, TooLarge
from ayni.shm import region_messages as messages
from ayni.shm.host import HostIdentity, SharedMemoryOffer, socket_name
from ayni.shm.json_messages import MAX_MESSAGE_BYTES, encode_refusal

HOST = HostIdentity(boot_id="b" * 36, pid_namespace=4026531836, uid=1000)
OFFER = SharedMemoryOffer(host=HOST, folder="/run/ayni", socket_name=socket_name(7))

ids = st.integers(0, (1 << 63) - 1)
requests = st.one_of(
    st.builds(messages.Hello, session=st.text(st.characters(max_codepoint=127), min_size=1, max_size=256)),
    st.builds(messages.Lend, region=ids, size=st.integers(1, (1 << 63) - 1)),
    st.builds(messages.Withdraw, region=ids),
    st.builds(messages.Borrow, region=ids),
)


@given(requests)
def test_request_is_read_as_it_was_written_and_fits(request):
    data = messages.encode_request(request)
    assert messages.decode_request(data) == request
    assert len(data) <= MAX_MESSAGE_BYTES


@given(ids)
def test_answer_is_read_as_it_was_written(size):
    answer = messages.RegionAnswer(size=size)
    assert messages.decode_answer(messages.encode_answer(answer)) == answer


def test_refusal_in_an_answer_is_raised_with_what_it_says():
    with pytest.raises(TooLarge, match="too much") as caught:
        messages.decode_answer(encode_refusal(TooLarge("too much", field="size", limit=1, received=2)))
    assert caught.value.metadata == {"field": "size", "limit": "1", "received": "2"}
    with pytest.raises(Fault, match="news"):
        messages.decode_answer(b'{"reason": "OF_A_LATER_VERSION", "message": "news", "metadata": {}}')


@pytest.mark.parametrize(
    "values",
    [
        *([], None, 7, "hello", {}, {"ask": "sing"}, {"ask": []}, {"ask": {}}),
        *({"ask": "hello"}, {"ask": "hello", "session": ""}, {"ask": "hello", "session": 5}),
        *({"ask": "hello", "session": "s" * 257}, {"ask": "hello", "session": "\u00e9"}),
        *({"ask": "lend", "region": "1"}, {"ask": "lend", "region": "1", "size": "0"}),
        *({"ask": "lend", "region": "1", "size": 5}, {"ask": "lend", "region": "1", "size": "-5"}),
        *({"ask": "lend", "region": 1, "size": "5"}, {"ask": "lend", "region": "8" * 16, "size": "5"}),
        *({"ask": "lend", "region": "1", "size": "8" * 16}, {"ask": "withdraw"}, {"ask": "borrow", "region": True}),
    ],
)
def test_request_that_can_not_be_read_is_refused(values):
    with pytest.raises(BadRequest, match="the request, can't be read"):
        messages.decode_request(json.dumps(values).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{", b"[" * 60_000, b"{}", b'{"size": 1}', b'{"size": "-1"}', b'{"reason": "TOO_LARGE"}']
)
def test_bytes_that_are_no_message_are_refused_by_both_readers(data):
    for decode in (messages.decode_request, messages.decode_answer):
        with pytest.raises(BadRequest, match="can't be read"):
            decode(data)


def test_refusal_of_a_long_message_fits_into_a_message():
    long = json.dumps({"ask": "borrow", "region": "z" * (MAX_MESSAGE_BYTES - 100)}).encode()
    with pytest.raises(BadRequest) as caught:
        messages.decode_request(long)
    assert len(encode_refusal(caught.value)) < 1000


@pytest.mark.parametrize(
    "values",
    [
        *({"folder": "run"}, {"folder": ""}, {"folder": "/run/\0"}, {"folder": "/run/\ud800"}, {"folder": "/\udc80"}),
        *({"socket_name": "../../etc/x.sock"}, {"socket_name": ""}, {"socket_name": "shm-0123456789abcdef.sock.new"}),
    ],
)
def test_offer_that_names_no_socket_is_refused(values):
    OFFER.check()
    with pytest.raises(BadRequest, match="the offer of shared memory can't be used"):
        replace(OFFER, **values).check()
