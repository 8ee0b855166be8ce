"""Values of the block half become messages, bytes and the same values again; what is wrong is refused by its path."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks import group_messages, layout_messages, messages, metadata_messages, outcome_messages
from ayni.blocks import transfer_messages as transfers
from ayni.blocks.calls import LocalTransfer
from ayni.blocks.ids import MAX_BLOCK_IDS, as_ids
from ayni.blocks.layouts import LayoutHandle, LocalLayout, Tier
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState
from ayni.blocks.transfers import BlockFailure, Failure, TransferOptions, TransferOutcome, refused
from ayni.errors import BadRequest, Deadline, PeerLost, TooLarge
from ayni.v1 import worker_pb2 as pb
from tests.support import block_values as values

EPOCH = 5


def again(message: Message) -> Any:
    """Sends a message through bytes."""
    return type(message).FromString(message.SerializeToString())


SHAPES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], Any]]] = {
    "remote layout": (
        values.REMOTE_LAYOUTS,
        layout_messages.remote_layout_message,
        layout_messages.remote_layout_of,
    ),
    "remote state": (
        values.REMOTE_STATES,
        metadata_messages.remote_state_message,
        metadata_messages.remote_state_of,
    ),
    "configuration": (values.GROUP_CONFIGS, group_messages.config_message, group_messages.config_of),
    "connect": (
        values.connects(),
        lambda asked: group_messages.connect_message(asked, EPOCH),
        group_messages.connect_of,
    ),
    "local transfer": (
        values.LOCAL_TRANSFERS,
        lambda asked: transfers.local_transfer_message(asked, EPOCH),
        lambda message: transfers.local_transfer_of(message, values.TIMEOUT_S),
    ),
    "onboard": (
        values.ONBOARDS,
        lambda asked: transfers.onboard_message(asked, EPOCH),
        lambda message: transfers.onboard_of(message, values.TIMEOUT_S),
    ),
    "offload": (
        values.OFFLOADS,
        lambda asked: transfers.offload_message(asked, EPOCH),
        lambda message: transfers.offload_of(message, values.TIMEOUT_S),
    ),
    "pull": (
        values.PULLS,
        lambda asked: transfers.pull_message(asked, EPOCH),
        lambda message: transfers.pull_of(message, values.TIMEOUT_S),
    ),
    "has": (values.HAS, lambda asked: outcome_messages.has_message(asked, EPOCH), outcome_messages.has_of),
    "put": (values.PUTS, lambda asked: outcome_messages.put_message(asked, EPOCH), outcome_messages.put_of),
    "get": (values.GETS, lambda asked: outcome_messages.get_message(asked, EPOCH), outcome_messages.get_of),
    "failure": (values.FAILURES, messages.failure_message, messages.failure_of),
}


@pytest.mark.fact("T62", "T67", "T68")
@pytest.mark.parametrize("name", SHAPES)
def test_a_value_is_the_same_after_the_wire(name: str) -> None:
    strategy, to_message, from_message = SHAPES[name]

    @given(strategy)
    def check(value: Any) -> None:
        assert values.plain(from_message(again(to_message(value)))) == values.plain(value)

    check()


@given(values.outcomes())
def test_an_outcome_is_the_same_after_the_wire(told: tuple[TransferOutcome, int]) -> None:
    outcome, num_blocks = told
    assert (
        outcome_messages.outcome_of(again(outcome_messages.outcome_message(outcome)), as_ids(range(num_blocks)))
        == outcome
    )


@given(values.KEY_REPORTS, values.PRESENCE_REPORTS)
def test_reports_about_keys_are_the_same_after_the_wire(report: KeyReport, presences: Any) -> None:
    count = len(report.outcomes)
    assert outcome_messages.outcomes_of(again(outcome_messages.put_outcomes_message(report)), count) == report
    assert outcome_messages.outcomes_of(again(outcome_messages.get_outcomes_message(report)), count) == report
    message = again(outcome_messages.presences_message(presences))
    assert outcome_messages.presences_of(message, len(presences.presences)) == presences


@pytest.mark.fact("T68")
def test_the_largest_handle_keeps_all_its_bits() -> None:
    handle = LayoutHandle(owner_id=2**64 - 1, number=2**16 - 1)
    assert messages.handle_of(again(messages.handle_message(handle))) == handle
    assert int(handle) == (2**16 - 1) << 64 | (2**64 - 1)


@pytest.mark.fact("T97")
def test_default_options_say_nothing_and_each_option_stands_alone() -> None:
    nothing = transfers.options_message(TransferOptions())
    assert [field.name for field, _ in nothing.ListFields()] == ["drain"]
    layers = transfers.options_message(TransferOptions(layers=(1, 2)))
    assert [field.name for field, _ in layers.ListFields()] == ["layers", "drain"]
    told = transfers.options_message(TransferOptions(write_notification=0))
    assert [field.name for field, _ in told.ListFields()] == ["write_notification", "drain"]
    assert transfers.options_of(again(told), 60.0) == TransferOptions(write_notification=0)


def test_a_request_without_options_has_the_defaults() -> None:
    message = transfers.local_transfer_message(local_transfer(), EPOCH)
    message.ClearField("options")
    assert transfers.local_transfer_of(message, 60.0).options == TransferOptions()


def test_the_drain_fits_into_what_time_is_left() -> None:
    given_drain = transfers.options_message(TransferOptions(drain_s=2.0))
    assert transfers.options_of(given_drain, 5.0).drain_s == 2.0
    late = transfers.options_of(given_drain, 1.0)
    assert 0.9 < late.drain_s < late.timeout_s == 1.0
    assert transfers.options_of(pb.TransferOptions(), 0.4).drain_s == 0.2


@pytest.mark.parametrize(("remaining_s", "time_s"), [(None, 60.0), (10.25, 10.0), (0.2, 0.1), (1e12, 1e8)])
def test_a_transfer_ends_before_its_call(remaining_s: float | None, time_s: float) -> None:
    assert transfers.time_left(remaining_s) == time_s


def test_a_call_after_its_deadline_has_no_time() -> None:
    with pytest.raises(Deadline, match="after its deadline"):
        transfers.time_left(0.0)


def local_transfer(**changes: Any) -> LocalTransfer:
    fields: dict[str, Any] = {
        "source": LocalLayout(tier=Tier.DEVICE),
        "destination": LocalLayout(tier=Tier.HOST),
        "source_blocks": as_ids([1, 2]),
        "destination_blocks": as_ids([3, 4]),
        "options": TransferOptions(),
    }
    return LocalTransfer(**(fields | changes))


def request(**changes: Any) -> pb.ExecuteLocalTransferRequest:
    """Returns a good request with some fields replaced."""
    message: Any = transfers.local_transfer_message(local_transfer(), EPOCH)
    for name, value in changes.items():
        message.ClearField(name)
        if value is not None:
            getattr(message, name).CopyFrom(value)
    assert isinstance(message, pb.ExecuteLocalTransferRequest)
    return message


WRONG_REQUESTS = {
    "source": request(source=None),
    "source.tier": request(source=pb.LocalLayout()),
    "destination.tier": request(destination=pb.LocalLayout(tier=pb.TIER_OBJECT)),
    "source_blocks": request(source_blocks=pb.BlockIds(starts=[1], counts=[2, 3])),
    "destination_blocks": request(destination_blocks=pb.BlockIds(starts=[2**63])),
    "options.layers.stop": request(options=pb.TransferOptions(layers=pb.LayerRange(start=2, stop=2))),
    "options.bounce.blocks": request(options=pb.TransferOptions(bounce=pb.BounceBuffer(layout=pb.LayoutHandle()))),
    "options.bounce.layout": request(
        options=pb.TransferOptions(bounce=pb.BounceBuffer(blocks=pb.BlockIds(starts=[1])))
    ),
    "options.source_axis_order": request(options=pb.TransferOptions(source_axis_order=9)),  # type: ignore[arg-type]
    "options.engine": request(options=pb.TransferOptions(engine="a\nb")),
    "options.drain.seconds": request(options=pb.TransferOptions(drain=Duration(seconds=-1))),
}


@pytest.mark.parametrize("path", WRONG_REQUESTS)
def test_what_is_wrong_is_named_by_its_path_and_its_sender(path: str) -> None:
    with pytest.raises(BadRequest) as caught, messages.sent_by("10.0.0.1:7"):
        transfers.local_transfer_of(WRONG_REQUESTS[path], 60.0)
    assert caught.value.metadata["field"] == path
    assert caught.value.message.startswith(f"{path}, as 10.0.0.1:7 sent it, can't be taken: ")


def test_too_many_ids_are_refused_before_a_list_is_made() -> None:
    message = request(source_blocks=pb.BlockIds(starts=[0, 5], counts=[1, 2**63]))
    with pytest.raises(TooLarge) as caught:
        transfers.local_transfer_of(message, 60.0)
    assert caught.value.metadata == {"field": "source_blocks", "limit": str(MAX_BLOCK_IDS)}


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(TooLarge) as caught:
        transfers.options_of(pb.TransferOptions(route="x" * 65), 60.0)
    assert caught.value.metadata == {"field": "route", "limit": "64", "received": "65"}


@pytest.mark.parametrize("packed", [b"", b"x" * 23, b"x" * 25], ids=len)
def test_keys_are_24_bytes_each(packed: bytes) -> None:
    message = pb.ObjectKeys(sequence_hashes=packed)
    if not packed:
        assert messages.keys_of(message) == ()
        return
    with pytest.raises(BadRequest, match="no whole number of 24-byte keys"):
        messages.keys_of(message)


def test_a_short_key_is_not_sent_since_it_would_shift_the_others() -> None:
    with pytest.raises(BadRequest, match="key 1 has 23 bytes"):
        messages.keys_message([b"x" * 24, b"x" * 23, b"x" * 25])


def test_a_descriptor_says_which_kind_of_thing_it_names() -> None:
    with pytest.raises(BadRequest) as caught:
        transfers.remote_of(pb.RemoteDescriptor())
    assert caught.value.metadata["field"] == "descriptor"
    assert transfers.remote_of(pb.RemoteDescriptor(objects=pb.ObjectKeys())).keys == ()  # type: ignore[union-attr]


def outcome(num_done: int, *indices: int, message: str = "gone") -> pb.TransferOutcome:
    failure = Failure(reason="PEER_LOST", message=message, metadata=(("peer", "x"),))
    return outcome_messages.outcome_message(
        TransferOutcome(
            rank=0,
            num_done=num_done,
            failures=tuple(BlockFailure(index=index, block=index + 9, failure=failure) for index in indices),
        )
    )


@pytest.mark.parametrize("message", [outcome(3), outcome(1, 0), outcome(2, 1, 1), outcome(2, 3, 1), outcome(3, 4)])
def test_an_outcome_that_leaves_a_block_open_is_refused(message: pb.TransferOutcome) -> None:
    with pytest.raises(BadRequest):
        outcome_messages.outcome_of(message, as_ids(range(4)))


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_answer_for_each_key(count: int) -> None:
    report = KeyReport(outcomes=(KeyOutcome(state=OutcomeState.DONE),))
    with pytest.raises(BadRequest, match=f"1 answers to {count} keys"):
        outcome_messages.outcomes_of(outcome_messages.get_outcomes_message(report), count)


def test_an_outcome_with_many_sentences_still_fits_into_an_answer() -> None:
    count = 700
    message = outcome(0, *range(count), message="x" * 5000)
    told = outcome_messages.outcome_of(again(message), as_ids(range(count)))
    assert [failure.index for failure in told.failures] == list(range(count))
    assert {failure.failure.reason for failure in told.failures} == {"PEER_LOST"}
    assert [len(failure.failure.message) for failure in told.failures[:3]] == [5000, 0, 0]
    assert message.ByteSize() < 1 << 20


def test_all_blocks_that_failed_for_one_reason_take_one_entry() -> None:
    blocks = as_ids(range(7, 7 + MAX_BLOCK_IDS))
    failed = replace(refused(3, blocks, PeerLost("gone", peer="x", detail="x")), refusal=None)
    message = again(outcome_messages.outcome_message(failed))
    assert len(message.failures) == 1
    told = outcome_messages.outcome_of(message, blocks)
    assert (told, len(told.failures)) == (failed, MAX_BLOCK_IDS)
    assert told.failures[-1] == BlockFailure(
        index=MAX_BLOCK_IDS - 1, block=MAX_BLOCK_IDS + 6, failure=told.failures[0].failure
    )


def test_more_failures_than_an_answer_names_leave_no_block_done() -> None:
    most = outcome_messages.MOST_NAMED
    assert len(outcome(2, *range(2, most + 2)).failures) == most
    message = outcome(2, *range(2, most + 3))
    told = outcome_messages.outcome_of(message, as_ids(range(9, most + 12)))
    assert (len(message.failures), told.num_done, told.transferred_bytes) == (1, 0, 0)
    assert (told.failures[0].block, told.failures[most + 2].block) == (9, most + 11)


def test_a_reason_of_another_release_is_kept_as_unknown() -> None:
    unknown = messages.failure_of(pb.Failure(reason=99, message="new"))  # type: ignore[arg-type]
    assert unknown == Failure(reason="UNSPECIFIED", message="new", metadata=(("reason", "99"),))
    assert messages.failure_message(unknown).reason == pb.Failure(reason="ERROR_REASON_FAULT").reason  # type: ignore[arg-type]


def test_a_sentence_that_is_no_unicode_travels_all_the_same() -> None:
    message = messages.failure_message(Failure(reason="STORAGE_FAILED", message="slab \udcff", metadata=()))
    assert messages.failure_of(again(message)).message == "slab ?"
