"""Committed bytes of every message, read and written again."""

import json

import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor

from tests.golden.samples import GOLDEN, as_json, descriptors

KNOWN = json.loads(GOLDEN.read_text())
MESSAGES = list(descriptors())


@pytest.mark.parametrize("descriptor", MESSAGES, ids=lambda d: d.full_name)
def test_old_bytes_mean_the_same_for_ever(descriptor: Descriptor) -> None:
    assert descriptor.full_name in KNOWN, "run tests/golden/samples.py and commit what it adds"
    golden = KNOWN[descriptor.full_name]
    message_class = message_factory.GetMessageClass(descriptor)
    frame = bytes.fromhex(golden["bytes"])
    from_bytes = message_class.FromString(frame)
    from_json = json_format.ParseDict(golden["json"], message_class())
    assert from_bytes == from_json
    assert as_json(from_bytes) == golden["json"]
    assert from_json.SerializeToString(deterministic=True) == frame


def test_no_message_is_lost() -> None:
    assert set(KNOWN) == {descriptor.full_name for descriptor in MESSAGES}, "a message of v1 may not be removed"
