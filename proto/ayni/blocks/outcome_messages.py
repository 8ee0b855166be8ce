"""How transfers and calls about objects ended, and what the latter ask for, as messages and back.  [shell]"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from google.protobuf.message import Message

from ayni.blocks.calls import Get, Has, Put, Remove
from ayni.blocks.ids import Ids
from ayni.blocks.layout_messages import MAX_NAME
from ayni.blocks.messages import (
    OUTCOME_STATES,
    PRESENCE_STATES,
    each,
    failure_message,
    failure_of,
    field,
    ids_message,
    keys_message,
    keys_of,
    listed_ids,
    optional_field,
    place_message,
    place_of,
    seconds_of,
    text_of,
)
from ayni.blocks.objects import KeyOutcome, KeyReport, Presence, PresenceReport
from ayni.blocks.transfers import AllFailed, BlockFailure, TransferOutcome
from ayni.errors import BadRequest
from ayni.messages import duration
from ayni.v1 import worker_pb2 as pb

MAX_ANSWER_BYTES = 3 << 20
"""Size from which sentences that are there already are left out of an answer, so that gRPC's limit of 4 MiB holds."""

MOST_NAMED = 1 << 14
"""Blocks that one answer names. Where more have failed it tells of all that none is done, by naming the first alone."""

_MOST_OF_ONE_REASON = 1024
"""Blocks that an answer names one by one although all failed for one reason."""


def outcome_of(message: pb.TransferOutcome, blocks: Ids) -> TransferOutcome:
    """Returns how a transfer to these blocks ended.

    Raises:
        BadRequest: it does not say of every block whether it is done.
    """
    outcome = TransferOutcome(
        rank=message.rank,
        num_done=message.num_done,
        failures=_failures_of(message, blocks),
        transferred_bytes=message.transferred_bytes,
        elapsed_s=optional_field(message, "elapsed", seconds_of) or 0.0,
        engines=each("engines", message.engines, lambda name: text_of(name, "name", MAX_NAME)),
        quiesced=message.quiesced,
    )
    _check_complete(outcome, len(blocks))
    return outcome


def outcome_message(outcome: TransferOutcome) -> pb.TransferOutcome:
    """Returns how a transfer ended as a message; a refusal travels as a status instead."""
    named = _named(outcome.failures)
    is_all = len(named) < len(outcome.failures)
    message = pb.TransferOutcome(
        rank=outcome.rank,
        num_done=0 if is_all else outcome.num_done,
        failures=map(_block_failure_message, named),
        transferred_bytes=0 if is_all else outcome.transferred_bytes,
        elapsed=duration(outcome.elapsed_s),
        engines=outcome.engines,
        quiesced=outcome.quiesced,
    )
    _fit(message, message.failures)
    return message


def has_of(message: pb.HasBlocksRequest) -> Has:
    """Returns which keys are asked for."""
    return Has(layout=field(message, "layout", place_of), keys=_keys_of(message))


def has_message(asked: Has, epoch: int) -> pb.HasBlocksRequest:
    """Returns which keys are asked for, as a message of the caller's epoch."""
    return pb.HasBlocksRequest(epoch=epoch, layout=place_message(asked.layout), keys=keys_message(asked.keys))


def put_of(message: pb.PutBlocksRequest) -> Put:
    """Returns what to store."""
    return Put(
        source=field(message, "source", place_of),
        source_blocks=listed_ids(message, "source_blocks"),
        keys=_keys_of(message),
        lock_validity_s=optional_field(message, "lock_validity", seconds_of),
    )


def put_message(asked: Put, epoch: int) -> pb.PutBlocksRequest:
    """Returns what to store, as a message of the caller's epoch."""
    return pb.PutBlocksRequest(
        epoch=epoch,
        source=place_message(asked.source),
        source_blocks=ids_message(asked.source_blocks),
        keys=keys_message(asked.keys),
        lock_validity=None if asked.lock_validity_s is None else duration(asked.lock_validity_s),
    )


def get_of(message: pb.GetBlocksRequest) -> Get:
    """Returns what to load."""
    return Get(
        keys=_keys_of(message),
        destination=field(message, "destination", place_of),
        destination_blocks=listed_ids(message, "destination_blocks"),
    )


def get_message(asked: Get, epoch: int) -> pb.GetBlocksRequest:
    """Returns what to load, as a message of the caller's epoch."""
    return pb.GetBlocksRequest(
        epoch=epoch,
        keys=keys_message(asked.keys),
        destination=place_message(asked.destination),
        destination_blocks=ids_message(asked.destination_blocks),
    )


def remove_of(message: pb.RemoveBlocksRequest) -> Remove:
    """Returns what to remove."""
    return Remove(layout=field(message, "layout", place_of), keys=_keys_of(message))


def remove_message(asked: Remove, epoch: int) -> pb.RemoveBlocksRequest:
    """Returns what to remove, as a message of the caller's epoch."""
    return pb.RemoveBlocksRequest(epoch=epoch, layout=place_message(asked.layout), keys=keys_message(asked.keys))


def presences_of(message: pb.HasBlocksResponse, num_keys: int) -> PresenceReport:
    """Returns whether keys are stored, of one worker; raises BadRequest unless there is one answer for each key."""
    _check_count("presences", len(message.presences), num_keys)
    presences = each("presences", message.presences, _presence_of)
    return PresenceReport(presences=presences, by_rank=(presences,))


def presences_message(report: PresenceReport) -> pb.HasBlocksResponse:
    """Returns whether keys are stored as a message."""
    message = pb.HasBlocksResponse(presences=map(_presence_message, report.presences))
    _fit(message, message.presences)
    return message


def outcomes_of(
    message: pb.PutBlocksResponse | pb.GetBlocksResponse | pb.RemoveBlocksResponse, num_keys: int
) -> KeyReport:
    """Returns how keys of a call ended, of one worker; raises BadRequest unless there is one answer for each key."""
    _check_count("outcomes", len(message.outcomes), num_keys)
    outcomes = each("outcomes", message.outcomes, _key_outcome_of)
    return KeyReport(outcomes=outcomes, by_rank=(outcomes,))


def put_outcomes_message(report: KeyReport) -> pb.PutBlocksResponse:
    """Returns how keys of a put ended as a message."""
    message = pb.PutBlocksResponse(outcomes=map(_key_outcome_message, report.outcomes))
    _fit(message, message.outcomes)
    return message


def get_outcomes_message(report: KeyReport) -> pb.GetBlocksResponse:
    """Returns how keys of a get ended as a message."""
    message = pb.GetBlocksResponse(outcomes=map(_key_outcome_message, report.outcomes))
    _fit(message, message.outcomes)
    return message


def remove_outcomes_message(report: KeyReport) -> pb.RemoveBlocksResponse:
    """Returns how keys of a removal ended as a message."""
    message = pb.RemoveBlocksResponse(outcomes=map(_key_outcome_message, report.outcomes))
    _fit(message, message.outcomes)
    return message


def _named(failures: Sequence[BlockFailure]) -> Sequence[BlockFailure]:
    """Returns the failures that an answer names: all, or, where they are too many, the first block as one of all."""
    most = _MOST_OF_ONE_REASON if isinstance(failures, AllFailed) else MOST_NAMED
    return failures if len(failures) <= most else (replace(failures[0], index=0),)


def _failures_of(message: pb.TransferOutcome, blocks: Ids) -> Sequence[BlockFailure]:
    named = each("failures", message.failures, _block_failure_of)
    if message.num_done == 0 and len(blocks) > 1 and [failure.index for failure in named] == [0]:
        return AllFailed(blocks, named[0].failure)
    return named


def _block_failure_of(message: pb.BlockFailure) -> BlockFailure:
    return BlockFailure(index=message.index, block=message.block, failure=field(message, "failure", failure_of))


def _block_failure_message(failure: BlockFailure) -> pb.BlockFailure:
    return pb.BlockFailure(index=failure.index, block=failure.block, failure=failure_message(failure.failure))


def _presence_of(message: pb.Presence) -> Presence:
    return Presence(
        state=PRESENCE_STATES.of(message.state, "state"),
        size_bytes=message.size_bytes,
        failure=optional_field(message, "failure", failure_of),
    )


def _presence_message(presence: Presence) -> pb.Presence:
    return pb.Presence(
        state=PRESENCE_STATES.number(presence.state),
        size_bytes=presence.size_bytes,
        failure=failure_message(presence.failure) if presence.failure else None,
    )


def _key_outcome_of(message: pb.KeyOutcome) -> KeyOutcome:
    return KeyOutcome(
        state=OUTCOME_STATES.of(message.state, "state"),
        size_bytes=message.size_bytes,
        failure=optional_field(message, "failure", failure_of),
    )


def _key_outcome_message(outcome: KeyOutcome) -> pb.KeyOutcome:
    return pb.KeyOutcome(
        state=OUTCOME_STATES.number(outcome.state),
        size_bytes=outcome.size_bytes,
        failure=failure_message(outcome.failure) if outcome.failure else None,
    )


def _keys_of(message: Message) -> tuple[bytes, ...]:
    return optional_field(message, "keys", keys_of) or ()


def _check_complete(outcome: TransferOutcome, num_blocks: int) -> None:
    if outcome.num_done + len(outcome.failures) != num_blocks:
        raise BadRequest(
            f"{outcome.num_done} blocks are done and {len(outcome.failures)} failed, of {num_blocks}", field="num_done"
        )
    if isinstance(outcome.failures, AllFailed):
        return
    indices = [failure.index for failure in outcome.failures]
    if any(one >= other for one, other in pairwise(indices)) or (indices and indices[-1] >= num_blocks):
        raise BadRequest(f"failures must be in order of index, each below {num_blocks}", field="failures")


def _check_count(name: str, received: int, expected: int) -> None:
    if received != expected:
        raise BadRequest(f"{received} answers to {expected} keys", field=name)


def _fit(message: Message, entries: Iterable[Any]) -> None:
    """Leaves only the first sentence for each reason in an answer that gRPC would not carry."""
    if message.ByteSize() <= MAX_ANSWER_BYTES:
        return
    told: set[int] = set()
    for entry in entries:
        if entry.HasField("failure") and entry.failure.reason in told:
            entry.failure.ClearField("message")
            entry.failure.ClearField("metadata")
        elif entry.HasField("failure"):
            told.add(entry.failure.reason)
