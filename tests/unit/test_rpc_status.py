"""Refusals as gRPC statuses, without a network: sizes, unknown reasons, foreign statuses, options."""

import base64
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from ayni import rpc
from ayni.endpoints import Keepalive
from ayni.errors import BY_REASON, Aborted, AyniError, BadChunk, FailedPrecondition

SOFT_LIMIT = 8192
"""Bytes of metadata from which on gRPC starts to drop calls."""

ENTRY_BYTES = 32
"""What HTTP/2 counts for each metadata entry beyond its text."""

any_text = st.text(max_size=3000) | st.text("%\u00e9\U0001f600\n\x00\ud800", max_size=3000)


class Failed(grpc.RpcError):
    """What a client raises for a status."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


class Status:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def rich(code: int, message: str, **info: Any) -> Failed:
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(**info))
    trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    return Failed(Status(code=grpc.StatusCode.ABORTED, details=message, trailing_metadata=trailing))


@pytest.mark.parametrize("reason", BY_REASON)
def test_there_and_back(reason: str) -> None:
    error = BY_REASON[reason]("part 3: 4 elements expected, 5 received", bucket="block 0", expected=4)
    status = rpc.status_of(error)
    assert status.code.name == error.code
    again = rpc.error_from(Failed(status))
    assert type(again) is type(error)
    assert (again.message, again.metadata) == (error.message, {"bucket": "block 0", "expected": "4"})


@given(any_text, st.dictionaries(st.sampled_from([f"k{index}" for index in range(40)]), any_text))
def test_a_status_stays_below_the_limit_of_metadata(message: str, metadata: dict[str, str]) -> None:
    status: Any = rpc.status_of(BadChunk(message, **metadata))
    ((key, value), (reason_key, reason)) = status.trailing_metadata
    assert (reason_key, reason) == ("ayni-reason", "BAD_CHUNK")
    on_the_wire = {
        key: base64.b64encode(value),
        reason_key: reason,
        "grpc-message": quote(status.details, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}"),
    }
    total = sum(len(name) + len(text) + ENTRY_BYTES for name, text in on_the_wire.items())
    assert total < SOFT_LIMIT - 512  # The rest is for :status, content-type and grpc-status.
    again = rpc.error_from(Failed(status))
    assert type(again) is BadChunk
    assert set(again.metadata) <= set(metadata)


@given(st.text(max_size=200), st.dictionaries(st.sampled_from(["message", "self", "step"]), st.text(max_size=60)))
def test_what_fits_is_not_touched(message: str, metadata: dict[str, str]) -> None:
    error = BadChunk(message)
    error.metadata = metadata
    again = rpc.error_from(Failed(rpc.status_of(error)))
    assert again is not None
    assert (again.message, again.metadata) == (message, metadata)


def test_text_is_cut_between_characters_and_says_so() -> None:
    status = rpc.status_of(BadChunk("\u00e9" * 4000))
    assert len(status.details.encode()) <= rpc.MESSAGE_BYTES
    assert set(status.details.removesuffix("...")) == {"\u00e9"}
    assert status.details.endswith("...")


def test_a_reason_of_a_later_version_keeps_its_code_and_its_word() -> None:
    error = rpc.error_from(rich(grpc.StatusCode.ABORTED.value[0], "later", reason="LATER", domain="ayni"))
    assert type(error) is Aborted
    assert (error.message, error.metadata) == ("later", {"reason": "LATER"})
    error = rpc.error_from(rich(grpc.StatusCode.FAILED_PRECONDITION.value[0], "", reason="LATER", domain="ayni"))
    assert type(error) is FailedPrecondition
    assert (
        type(rpc.error_from(rich(grpc.StatusCode.DATA_LOSS.value[0], "", reason="LATER", domain="ayni"))) is AyniError
    )


def test_what_others_say_is_no_refusal_of_ours() -> None:
    assert rpc.error_from(grpc.RpcError()) is None
    assert rpc.error_from(rich(10, "other", reason="STEP_VOIDED", domain="example.org")) is None
    bad = (("grpc-status-details-bin", b"\xff\xff"),)
    code = grpc.StatusCode.ABORTED
    assert rpc.error_from(Failed(Status(code=code, details="", trailing_metadata=bad))) is None
    assert rpc.error_from(Failed(Status(code=code, details="", trailing_metadata=None))) is None


def test_options_hold_all_three_keepalive_settings_and_leave_the_receive_limit() -> None:
    keepalive = Keepalive(interval=timedelta(seconds=2), timeout=timedelta(milliseconds=1500))
    for options in (dict(rpc.client_options(keepalive, loopback=True)), dict(rpc.server_options(keepalive))):
        assert options["grpc.keepalive_time_ms"] == 2000
        assert options["grpc.keepalive_timeout_ms"] == 1500
        assert options["grpc.http2.ping_timeout_ms"] == 1500
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert "grpc.max_receive_message_length" not in options
    assert dict(rpc.server_options(keepalive))["grpc.so_reuseport"] == 0
    assert dict(rpc.client_options(keepalive, loopback=True))["grpc.enable_http_proxy"] == 0
    assert dict(rpc.client_options(keepalive, loopback=False))["grpc.enable_http_proxy"] == 1
