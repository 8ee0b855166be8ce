"""An object is recognised as the one that was asked for, or the flaw is named; no damage goes unseen."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.sequence_hash import hash_tokens, synthetic
from worker_agent.blocks.objects.object_format import (
    HEADER_BYTES,
    Flaw,
    Identity,
    failure_of,
    flaw_of,
    flaw_of_size,
    refusal_of,
    write_header,
)

N = 40
KEY = hash_tokens(range(32), 16)[1]
IDENTITY = Identity(fingerprint="0123456789abcdef" * 4, rank=3, key=KEY, payload_bytes=N)


def packed(identity: Identity = IDENTITY, start: int = 0) -> bytearray:
    data = bytearray(identity.object_bytes)
    data[HEADER_BYTES:] = bytes(range(start, start + identity.payload_bytes))
    write_header(memoryview(data), identity)
    return data


def other(**changes: object) -> Identity:
    fields = {name: getattr(IDENTITY, name) for name in Identity.__dataclass_fields__}
    return Identity(**(fields | changes))


def test_golden():
    # Frozen: objects of this version are in stores.
    fields = ["41594e49424c4b0a", "0100", "0100", "03000000", "2800000000000000", IDENTITY.fingerprint]
    fields += ["1199e23a5cd4dcdda1f8b5f23e31d1440100000014000000", "1e6b35ef1d142775"]
    data = packed()
    assert data[:HEADER_BYTES].hex() == "".join(fields)
    assert xxhash.xxh3_64_intdigest(bytes(data[:80] + data[88:])) == int.from_bytes(data[80:88], "little")


def test_whole_object_has_no_flaw():
    assert flaw_of(memoryview(packed()), IDENTITY) is None
    assert flaw_of_size(len(packed()), IDENTITY) is None


def test_numpy_memory_is_read_too():
    assert flaw_of(np.frombuffer(packed(), np.uint8).data, IDENTITY) is None


@given(st.integers(0, HEADER_BYTES + N - 1), st.integers(1, 255))
def test_every_damaged_byte_is_seen(place, change):
    data = packed()
    data[place] ^= change
    assert flaw_of(memoryview(data), IDENTITY) is not None


@given(st.integers(0, HEADER_BYTES + N - 1))
def test_every_shorter_object_is_short(length):
    assert flaw_of(memoryview(packed())[:length], IDENTITY) is Flaw.SHORT
    assert flaw_of_size(length, IDENTITY) is Flaw.SHORT


def test_longer_object_is_long():
    assert flaw_of(memoryview(packed() + b"x"), IDENTITY) is Flaw.LONG
    assert flaw_of_size(HEADER_BYTES + N + 1, IDENTITY) is Flaw.LONG


@pytest.mark.parametrize(
    ("data", "flaw"),
    [
        (b"", Flaw.SHORT),
        (b"\x93NUMPY" + bytes(200), Flaw.MAGIC),
        (b"{}", Flaw.MAGIC),
        (bytes(HEADER_BYTES + N), Flaw.CHECKSUM),
        (bytes(HEADER_BYTES + N - 1), Flaw.SHORT),
        (bytes(5), Flaw.SHORT),
        (bytes(HEADER_BYTES + N + 1), Flaw.LONG),
        (b"AYNI", Flaw.SHORT),
        (bytes(packed()[:8]) + b"\x02" + bytes(packed()[9:]), Flaw.VERSION),
        (bytes(packed()[:10]) + b"\x02" + bytes(packed()[11:]), Flaw.VERSION),
        (packed(other(fingerprint="f" * 64)), Flaw.FINGERPRINT),
        (packed(other(rank=2)), Flaw.RANK),
        (packed(other(key=synthetic("another", 1))), Flaw.KEY),
        (packed(other(payload_bytes=N - 1)), Flaw.CHECKSUM),
    ],
)
def test_flaw_is_named(data, flaw):
    assert flaw_of(memoryview(data), IDENTITY) is flaw


def test_payload_damage_is_a_checksum_flaw():
    data = packed()
    data[-1] ^= 1
    assert flaw_of(memoryview(data), IDENTITY) is Flaw.CHECKSUM


@pytest.mark.parametrize("flaw", Flaw)
def test_failure_says_which_object_what_and_what_to_do(flaw):
    failure = failure_of(flaw, "a/3/key", IDENTITY)
    assert failure.reason == "UNKNOWN_OBJECT"
    assert failure.message.startswith("the object a/3/key counts as absent: ")
    assert dict(failure.metadata) == {"key": str(KEY), "detail": flaw.value}
    assert any(advice in failure.message for advice in ("store it again", "delete it", "another prefix"))


@pytest.mark.parametrize("flaw", [flaw for flaw in Flaw if not flaw.is_ours])
def test_refusal_to_replace_says_which_object_and_what_to_do(flaw):
    failure = refusal_of(flaw, "a/3/key", IDENTITY)
    assert failure.reason == "UNKNOWN_OBJECT"
    assert failure.message.startswith("the object a/3/key is in the way and was left as it is: ")
    assert "delete it" in failure.message
    assert dict(failure.metadata) == {"key": str(KEY), "detail": flaw.value}


def test_only_what_is_cut_or_damaged_is_ours_to_replace():
    assert {flaw for flaw in Flaw if flaw.is_ours} == {Flaw.SHORT, Flaw.CHECKSUM}
