"""Agents started by Open MPI."""

from tests.support.launching import PYTHON, Place, agent_command, finish, place, program


def mpirun(where: Place, *flags: str) -> list[str]:
    # On one host there is nothing to log into; traffic stays on loopback.
    alone = ["--mca", "plm", "isolated", "--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self"]
    return [program("mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2", *alone, *flags]


def test_mpirun_starts_a_whole_run(plain: str) -> None:
    with place() as where:
        said = finish(where, *mpirun(where), PYTHON, *agent_command(where))
        assert where.final_parameters() == plain
        for rank in (0, 1):
            assert f"launch.rank {rank} [OMPI_COMM_WORLD_RANK of Open MPI], launch.world_size 2" in said
        assert f"coordinator 127.0.0.1:{where.port} [OMPI_COMM_WORLD_LOCAL_SIZE of Open MPI and launch.port]" in said
        assert not where.processes()
