"""Hostile calls at live servers: every message of the schema, right token, any values, damaged bytes.

    python tests/fuzz/servers.py [--seconds 540] [--seed N] [--only waiting|progress|agent|peer]...

Prints how many calls ended how. Ends with 1 and the calls that led to it when a server answered with anything but an
answer or a refusal, logged a traceback, stopped answering, changed its state by a refused call, or grew.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.fuzz_agent import FuzzedAgent
from tests.support.fuzz_campaign import Campaign
from tests.support.fuzz_coordinator import FuzzedCoordinator
from tests.support.fuzz_peer import FuzzedPeer
from tests.support.fuzz_servers import Target

TARGETS: dict[str, Callable[[Path], Target]] = {
    "waiting": lambda folder: FuzzedCoordinator(folder, in_progress=False),
    "progress": lambda folder: FuzzedCoordinator(folder, in_progress=True),
    "agent": FuzzedAgent,
    "peer": FuzzedPeer,
}
SHARES = {"waiting": 0.2, "progress": 0.4, "agent": 0.25, "peer": 0.15}
"""Parts of the time, by what there is to come past."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", action="append", choices=TARGETS)
    given = parser.parse_args()
    chosen = given.only or list(TARGETS)
    seconds = given.seconds / sum(SHARES[name] for name in chosen)
    print(f"seed: {given.seed}", flush=True)
    return max(fuzz(name, seconds * SHARES[name], given.seed) for name in chosen)


def fuzz(name: str, seconds: float, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="ayni-fuzz-") as folder:
        target = TARGETS[name](Path(folder) / name)
        campaign = Campaign(target)
        try:
            campaign.run(seed, seconds)
        finally:
            print(campaign.report(), flush=True)
            target.close()
    return 1 if campaign.found else 0


if __name__ == "__main__":
    sys.exit(main())
