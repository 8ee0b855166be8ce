"""A process that reduces slices for a group of made-up workers, and says on request what it holds.

    python -m tests.support.fuzz_peer_process

Prints its address. Every line that it reads is a command: "open N" begins generation N of the group, "state" asks for
what no refused call may change. Each is answered by one line of JSON.
"""

import asyncio
import json
import sys
import zlib
from typing import Any

from ayni import logs
from ayni.endpoints import ServerTls
from ayni.step_values import ExchangeGroup, GroupMember
from tests.support.coordinator import TOKEN
from worker_agent.peer_service import listening
from worker_agent.slice_contribution import SliceContribution
from worker_agent.slice_offers import Moment, Terms
from worker_agent.slice_rounds import SliceRound, SliceRounds

SECRET = "0123456789abcdef0123456789abcdef"
NUM_MICROBATCHES = 4
EPOCH, STEP, ATTEMPT = 2, 3, 0
CHUNK_BYTES = 1 << 12

_MAX_BUCKET_BYTES = 1 << 22
_WAIT_S = 0.05
"""For the word of a group that nobody told of."""


def terms_of(generation: int) -> Terms:
    """What the process is told: it is worker 0, and owns all of every bucket."""
    members = tuple(
        GroupMember(worker_id=number, worker_name=name, is_owner=number == 0)
        for number, name in enumerate(("ant", "bee", "cat"))
    )
    group = ExchangeGroup(
        generation=generation,
        topology="sharded",
        members=members,
        secret=SECRET,
        chunk_bytes=CHUNK_BYTES,
        max_bucket_bytes=_MAX_BUCKET_BYTES,
    )
    moment = Moment(generation=generation, epoch=EPOCH, step=STEP, attempt=ATTEMPT)
    return Terms(moment=moment, group=group, worker_id=0, wire_type="float32", num_microbatches=NUM_MICROBATCHES)


def state_of(rounds: SliceRounds) -> dict[str, Any]:
    """What the process holds of the attempt, by name."""
    return {
        "moment": str(rounds.terms.moment) if rounds.terms else "",
        "weights": sorted(rounds._weights.items()),
        "rounds": {str(bucket): _round(live) for bucket, live in sorted(rounds._rounds.items())},
        "workers": sorted(rounds._budgets),
    }


def _round(live: SliceRound) -> dict[str, Any]:
    reduction = live.round
    return {
        "spec": str(live.whole),
        "weights": sorted(reduction._weights.items()),
        "said": [str(live._stats[microbatch]) for microbatch in sorted(live._stats)],
        "begun": [f"{lease}: {one}" for lease, one in sorted(reduction._contributions.items())],
        "held_bytes": reduction.held_bytes,
        "emitted": live.emitted,
        "mean": zlib.crc32(live.store_S[: live.emitted].tobytes()),
        "streams": [_stream(lease, one) for lease, one in sorted(live.contributions.items())],
    }


def _stream(lease: int, one: SliceContribution) -> str:
    return f"{lease} of {one.offer.worker_id}: {'given up' if one.failed else 'good'}, {one.offer.stats}"


async def main() -> None:
    rounds = SliceRounds(wait_s=_WAIT_S)
    rounds.open(terms_of(1))
    async with listening(rounds, "127.0.0.1:0", TOKEN, ServerTls(), False) as address:
        print(f"listening on {address}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, *generation = line.split()
            if command == "open":
                rounds.open(terms_of(int(*generation)))
            print(json.dumps(state_of(rounds)), flush=True)


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())
