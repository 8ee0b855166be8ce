"""The run that every launcher starts, as two plain processes make it: its parameters are what all must end with."""

import contextlib

import pytest

from coordinator_service.store import open_folder
from tests.support.agents import agent
from tests.support.coordinator import coordinator
from tests.support.launching import RUN


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the parameters behind an undisturbed local run of one worker."""
    folder = tmp_path_factory.mktemp("plain")
    with coordinator(folder, RUN) as server, agent(server.address, "ant", folder) as ant:
        assert ant.end() == 0
        assert server.process.wait(30) == 0
    with contextlib.closing(open_folder(folder / "state" / "toy", to_read=True)) as store:
        assert store.committed_steps() == RUN["num_steps"]
        return store.facts()["final_parameters_sha256"]
