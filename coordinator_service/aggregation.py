"""Joins what the ranks of a group answered, so that no rank's and no key's failure is lost.  [core]

Theory of operation. Every rank was asked for some of the request's pairs, most often for all of them. Its answer speaks
of exactly those, in their order. An answer that does not account for each of them is a failure of all of them, since
nobody can tell which ones it means. Answers are joined pair by pair and key by key, never by position in whatever came
back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ayni.blocks.ids import Ids
from ayni.blocks.metadata import ParallelismMode
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, Presence, PresenceReport, PresenceState
from ayni.blocks.transfers import AllFailed, Failure, TransferOutcome, TransferResult
from ayni.errors import AyniError, Deadline, Fault, PeerLost, Unsupported
from coordinator_service.parallelism import is_replicated


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one rank was asked for."""

    rank: int
    destination_blocks: Ids
    """Zeros when the destination is objects."""
    places: Ids | None = None
    """Place of each in the lists of the whole request; None: the same."""


def refusal_of(error: BaseException, who: str) -> AyniError:
    """Returns an error as a refusal: what can't be reached is lost, what nobody foresaw is a fault."""
    if isinstance(error, AyniError):
        return error
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError):
        return Deadline(f"{who} did not answer in time ({detail})", waiting_for=who, timeout="")
    if isinstance(error, ConnectionError):
        return PeerLost(f"{who} can't be reached ({detail}); see whether its agent runs", peer=who, detail=detail)
    return Fault(f"{who} failed in a way that nobody foresaw ({detail}); its log says more", detail=detail)


def joined_error(what: str, errors: Mapping[int, Exception]) -> Exception:
    """Returns one error for several ranks: it names every one, and is of the kind of the lowest rank's."""
    first = errors[min(errors)]
    ranks = "; ".join(f"rank {rank}: {type(errors[rank]).__name__}: {errors[rank]}" for rank in sorted(errors))
    message = f"{what} failed on {len(errors)} of the group's ranks: {ranks}"
    if isinstance(first, AyniError):
        return type(first)(message, **{**first.metadata, "rank": min(errors)})
    return ConnectionError(message) if isinstance(first, ConnectionError) else Fault(message, detail=ranks)


def undone(asked: Asked, error: AyniError, *, is_refusal: bool = False, quiesced: bool = True) -> TransferOutcome:
    """Returns the outcome of a rank on which no block is known to be done."""
    failure = Failure.of(error)
    failures = AllFailed(asked.destination_blocks, failure)
    outcome = TransferOutcome(
        rank=asked.rank,
        num_done=0,
        failures=failures,
        quiesced=quiesced,
        refusal=failure if is_refusal or not failures else None,
    )
    return _placed(asked, outcome)


def outcome_of(asked: Asked, result: TransferResult) -> TransferOutcome:
    """Returns a rank's outcome as part of the group's: its rank and its places are those of the group."""
    if len(result.outcomes) != 1:
        message = f"rank {asked.rank} answered for {len(result.outcomes)} ranks; a group is made of single workers"
        return undone(asked, Fault(message, detail="outcomes"), quiesced=result.quiesced)
    outcome = replace(result.outcomes[0], rank=asked.rank)
    num_asked, num_told = len(asked.destination_blocks), outcome.num_done + len(outcome.failures)
    if num_told != num_asked:
        message = f"rank {asked.rank} was asked for {num_asked} blocks and told of {num_told}; none counts as done"
        error = Fault(message, detail=str(outcome.refusal or "num_done"))
        return undone(asked, error, quiesced=outcome.quiesced)
    return _placed(asked, outcome)


def divide(num_pairs: int, num_ranks: int, mode: ParallelismMode) -> list[range]:
    """Returns the places of the pairs that each rank stores: all of them, or, where each holds everything, a share."""
    if is_replicated(mode):
        return [range(rank, num_pairs, num_ranks) for rank in range(num_ranks)]
    return [range(num_pairs)] * num_ranks


def join_presences(num_keys: int, answers: Sequence[PresenceReport | AyniError]) -> PresenceReport:
    """Returns the group's answer: rank 0's, with every rank's beside it. Of no ranks every key is absent."""
    if not answers:
        return PresenceReport(presences=(Presence(state=PresenceState.ABSENT),) * num_keys)
    by_rank = tuple(_presences(rank, num_keys, answer) for rank, answer in enumerate(answers))
    return PresenceReport(presences=by_rank[0], by_rank=by_rank)


def join_keys(num_keys: int, shares: Sequence[range], answers: Sequence[KeyReport | AyniError]) -> KeyReport:
    """Returns the group's answer, key by key in input order.

    Args:
        num_keys: keys of the whole request.
        shares: places of the keys that each rank was asked for.
        answers: each rank's, in the order of its share.
    """
    if not answers:
        error = Unsupported("the group has no workers, so nothing was stored or loaded", field="workers", detail="0")
        return KeyReport(outcomes=(_failed(error),) * num_keys)
    by_rank = tuple(
        _key_outcomes(rank, num_keys, share, answer)
        for rank, (share, answer) in enumerate(zip(shares, answers, strict=True))
    )
    return KeyReport(outcomes=tuple(_join_key(column) for column in zip(*by_rank, strict=True)), by_rank=by_rank)


def _placed(asked: Asked, outcome: TransferOutcome) -> TransferOutcome:
    if asked.places is None:
        return outcome
    places = asked.places
    if isinstance(outcome.failures, AllFailed):
        return replace(outcome, failures=outcome.failures.at(places))
    return replace(outcome, failures=tuple(replace(f, index=int(places[f.index])) for f in outcome.failures))


def _presences(rank: int, num_keys: int, answer: PresenceReport | AyniError) -> tuple[Presence, ...]:
    if isinstance(answer, PresenceReport) and len(answer.presences) == num_keys:
        return answer.presences
    error = answer if isinstance(answer, AyniError) else _miscounted(rank, num_keys, len(answer.presences))
    return (Presence(state=PresenceState.UNKNOWN, failure=Failure.of(error)),) * num_keys


def _key_outcomes(
    rank: int, num_keys: int, share: range, answer: KeyReport | AyniError
) -> tuple[KeyOutcome | None, ...]:
    if isinstance(answer, KeyReport) and len(answer.outcomes) == len(share):
        told = dict(zip(share, answer.outcomes, strict=True))
    else:
        error = answer if isinstance(answer, AyniError) else _miscounted(rank, len(share), len(answer.outcomes))
        told = dict.fromkeys(share, _failed(error))
    return tuple(told.get(place) for place in range(num_keys))


def _join_key(column: Sequence[KeyOutcome | None]) -> KeyOutcome:
    asked = [(rank, outcome) for rank, outcome in enumerate(column) if outcome is not None]
    for rank, outcome in asked:
        if not outcome.is_success:
            return replace(outcome, failure=outcome.failure and _of_rank(rank, outcome.failure))
    states = {outcome.state for _, outcome in asked}
    state = OutcomeState.ALREADY_PRESENT if states == {OutcomeState.ALREADY_PRESENT} else OutcomeState.DONE
    return KeyOutcome(state=state, size_bytes=sum(outcome.size_bytes for _, outcome in asked))


def _of_rank(rank: int, failure: Failure) -> Failure:
    return replace(failure, message=f"rank {rank}: {failure.message}")


def _failed(error: AyniError) -> KeyOutcome:
    return KeyOutcome(state=OutcomeState.FAILED, failure=Failure.of(error))


def _miscounted(rank: int, num_asked: int, num_told: int) -> Fault:
    message = f"rank {rank} was asked for {num_asked} keys and told of {num_told}; none of them counts"
    return Fault(message, detail="keys")
