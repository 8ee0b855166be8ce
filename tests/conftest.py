"""What all rings share: marks and timeouts by folder, one printed seed, Hypothesis settings."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

HERE = Path(__file__).parent
TIMEOUTS = {
    "unit": 20,
    "integration": 120,
    "fault": 120,
    "dashboard": 240,
    "launchers": 300,
    "trackers": 240,
    "wgpu": 300,
    "bench": 600,
}
"""Longest time for one test of each ring, in seconds; a test that needs another says so with its own mark."""

SEED = int(os.environ.get("AYNI_TEST_SEED", random.SystemRandom().randrange(2**32)))

EXAMPLES = int(os.environ.get("AYNI_TEST_EXAMPLES", 12))
"""Examples of each property: few, so that the unit ring stays quick; the seed is another one each time."""

# Speed varies with the machine's other work, so no example fails for being slow: the ring's timeout bounds the test.
settings.register_profile("ayni", deadline=None, print_blob=True, max_examples=EXAMPLES)
settings.load_profile("ayni")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    return f"seed: AYNI_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        ring = item.path.relative_to(HERE).parts[0]
        item.add_marker(ring)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS[ring]))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    if torch := sys.modules.get("torch"):  # The unit ring of the coordinator stays quick without it.
        torch.manual_seed(SEED)


_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # A library inside NIXL's package ends the process with a segmentation fault when its destructors run, depending on
    # what else was loaded: that must not hide how the tests ended.
    if "nixl_cu12" in sys.modules and _STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])
