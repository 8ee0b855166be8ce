"""Agents started by torchrun."""

import os
import signal

from tests.support.coordinator import TOKEN
from tests.support.launching import PYTHON, RUN, Place, agent_command, finish, place, start


def torchrun(where: Place, *flags: str) -> list[str]:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*command, "--nproc-per-node", "2", *flags, *agent_command(where)]


def test_torchrun_starts_a_whole_run(plain: str) -> None:
    with place() as where:
        said = finish(where, *torchrun(where))
        assert where.final_parameters() == plain
        for rank in (0, 1):
            assert (
                f"taken from the environment: launch.by torchrun [TORCHELASTIC_RUN_ID of torchrun], launch.rank {rank} "
                "[RANK of torchrun], launch.world_size 2 [WORLD_SIZE of torchrun]"
            ) in said
        assert f"coordinator 127.0.0.1:{where.port} [MASTER_ADDR of torchrun and launch.port]" in said
        assert said.count("started the coordinator beside this process") == 1
        assert not where.processes()


def test_a_restart_by_torchrun_goes_on_with_the_run(plain: str) -> None:
    # torchrun stops all its agents when one is lost, so the run needs a stored state.
    state = {"block_bytes": 4096, "publish_every": 2, "store_every": 2}
    with place({**RUN, "state": state, "timeouts": {**RUN["timeouts"], "rejoin": "2s"}}) as where:
        log = where.folder / "launcher.log"
        with start(where, log, *torchrun(where, "--max-restarts", "1"), **where.gated(30)) as process:
            at_gate = where.wait_at_gate(2)
            where.wait_for(lambda: "stored the state behind step" in log.read_text(), "a state is stored")
            assert not [line for line in where.processes().values() if TOKEN in line]
            where.gate.touch()
            os.kill(next(pid for pid in at_gate if where.name_of(pid, "RANK") == "1"), signal.SIGKILL)
            assert process.wait(180) == 0, log.read_text()
        assert "launch.attempt 1 [TORCHELASTIC_RESTART_COUNT of torchrun]" in log.read_text()
        assert where.final_parameters() == plain
        assert not where.processes()
