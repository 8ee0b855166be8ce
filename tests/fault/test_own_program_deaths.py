"""Programs of their own, some of which are killed: the others go on, or are told who is gone."""

import signal
from pathlib import Path

import torch

from tests.support.coordinator import coordinator
from tests.support.joined_runs import OWN, example, outputs, programs, settings

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_a_ddp_script_that_is_killed_costs_the_others_no_step(tmp_path: Path):
    saved = [tmp_path / f"{index}.pt" for index in range(3)]
    with coordinator(tmp_path, {**OWN, "start_workers": 3}) as server:
        commands = [[example("ddp/train.py"), "--epochs", "6", "--save", str(path)] for path in saved]
        environments = [{**settings(server, f"w{index}"), **ALONE} for index in range(3)]
        with programs(commands, environments) as started:
            server.wait_for_log("step 10 committed", timeout=100)
            started[1].send_signal(signal.SIGKILL)
            texts = outputs([started[0], started[2]])
        log = server.read_log()
    # One step shares the first weights; 6 epochs have 10 steps of 20 samples for each of three.
    assert "step 60 committed" in log
    assert "weight 2, 2 workers" in log
    for text in texts:
        assert "1 of 3 workers left or died" in text
        assert "of 2: epoch 5" in text
    one, other = (torch.load(saved[index], weights_only=True) for index in (0, 2))
    assert all(one[name].equal(other[name]) for name in one)
    assert not saved[1].exists()


def test_a_rank_that_is_killed_is_named_to_the_others(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server:
        environments = [{**settings(server, f"process-{index}"), "WORLD_SIZE": "2"} for index in range(2)]
        with programs([["tests/support/reduce_forever.py", "60"]] * 2, environments) as started:
            assert started[0].stdout.readline() == "reduced\n"
            started[1].send_signal(signal.SIGKILL)
            text = outputs(started[:1], timeout=20)[0]
    assert "PeerLost: rank " in text
    assert "of the group is lost (process-1: its stream broke)" in text


def test_a_rank_that_fails_ends_at_once_and_is_named_to_the_others(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server:
        environments = [{**settings(server, f"process-{index}"), "WORLD_SIZE": "2"} for index in range(2)]
        script = "tests/support/reduce_forever.py"
        with programs([[script, "60"], [script, "60", "7"]], environments) as started:
            text = outputs(started[:1], timeout=60)[0]
            assert started[1].wait(20) == 7
    assert "PeerLost: rank " in text
    assert "(process-1) has left the group" in text


def test_a_rank_that_is_silent_is_named(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server:
        environments = [{**settings(server, f"process-{index}"), "WORLD_SIZE": "2"} for index in range(2)]
        with programs([["tests/support/reduce_forever.py", "3"]] * 2, environments) as started:
            assert started[0].stdout.readline() == "reduced\n"
            started[1].send_signal(signal.SIGSTOP)
            text = outputs(started[:1], timeout=30)[0]
            assert "Deadline: rank " in text
            assert "waited 3 s in vain for rank" in text
            started[1].send_signal(signal.SIGCONT)
            # It finds the other one gone, or its own time over, whichever it looks at first.
            late = outputs(started[1:], timeout=30)[0]
            assert "PeerLost: rank " in late or "Deadline: rank " in late
