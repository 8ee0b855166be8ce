"""A short, seeded run of the fuzzer (`make fuzz` is the long one), and what the fuzzer has found before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzz_agent import FuzzedAgent
from tests.support.fuzz_calls import Call, make
from tests.support.fuzz_campaign import Campaign
from tests.support.fuzz_coordinator import FuzzedCoordinator
from tests.support.fuzz_insiders import SERVICE
from tests.support.fuzz_peer import FuzzedPeer

SECONDS = 7.0
MOST_BURSTS = 150


def waiting(folder: Path) -> FuzzedCoordinator:
    return FuzzedCoordinator(folder, in_progress=False)


def in_progress(folder: Path) -> FuzzedCoordinator:
    return FuzzedCoordinator(folder, in_progress=True)


@pytest.mark.parametrize("start", [waiting, in_progress, FuzzedAgent, FuzzedPeer])
def test_any_calls_lead_to_answers_and_refusals_only(
    tmp_path: Path, pytestconfig: pytest.Config, start: Callable[[Path], Any]
):
    target = start(tmp_path / "fuzzed")
    campaign = Campaign(target)
    try:
        campaign.run(int(pytestconfig.option.hypothesis_seed), SECONDS, MOST_BURSTS)
    finally:
        print(campaign.report())
        target.close()
    assert not campaign.found, campaign.report()
    assert campaign.num_unchanged, "no burst of refused calls alone"
    refused = {outcome.split()[1] for outcome in campaign.outcomes}
    assert "BAD_REQUEST" in refused
    assert "OK" in refused


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedCoordinator]:
    target = waiting(tmp_path_factory.mktemp("found") / "fuzzed")
    yield target
    target.close()


@pytest.mark.parametrize(
    ("name", "request_bytes", "reason"),
    [
        ("Join", b"\x1b\x03cat", "BAD_REQUEST"),
        ("Leave", b"\x12\x02\xff\xfe", "BAD_REQUEST"),
        ("FetchArtifact", b"\x14\x01", "BAD_REQUEST"),
        ("GetRun", b"\x0b" * 200, "BAD_REQUEST"),
        ("WatchRun", b"\n\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f", ""),
        ("WatchRun", b"\n\x0b\x08\x81\x80\x80\x80\x80\x80\x80\x80\x80\x01", ""),
    ],
)
def test_what_was_found_before_is_answered_or_refused(
    coordinator: FuzzedCoordinator, name: str, request_bytes: bytes, reason: str
):
    call = Call(method=f"/{SERVICE.full_name}/{name}", requests=(request_bytes,), reads=1)
    ended = make(coordinator.channel, coordinator.methods, call)
    assert (ended.reason, ended.problem) == (reason, "")
    assert "Traceback" not in coordinator.log
