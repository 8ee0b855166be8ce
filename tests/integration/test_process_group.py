"""Collectives of backend "ayni", against what they must give; the behaviours that torch's own tests ask for."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ayni.errors import Deadline, IdentityTaken, Incompatible, PeerLost, SpecMismatch, TooLarge, Unsupported, WorldFull
from tests.support.coordinator import CoordinatorProcess, coordinator
from tests.support.joined_runs import OWN, free_port, outputs, programs, settings, side_by_side
from tests.support.process_groups import groups, on_all, reducing
from worker_agent.faults import CoordinatorLost, TransportBroken
from worker_agent.integrations.collective_stream import CollectiveStream
from worker_agent.integrations.joined_run import client_config
from worker_agent.integrations.process_group import AyniProcessGroup

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLES = [torch.int64, torch.int32, torch.uint8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path_factory.mktemp("coordinator"), {**OWN, "max_workers": 8}) as running:
        yield running


@pytest.fixture(scope="module")
def three(server: CoordinatorProcess) -> Iterator[list[AyniProcessGroup]]:
    with groups(server, 3) as made:
        yield made


def expected_of(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack([part.to(torch.float64) for part in parts])
    if op == ReduceOp.AVG:
        return stacked.mean(0)
    if op == ReduceOp.SUM:
        return stacked.sum(0)
    if op == ReduceOp.PRODUCT:
        return stacked.prod(0)
    return stacked.amin(0) if op == ReduceOp.MIN else stacked.amax(0)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX], ids=str)
@pytest.mark.parametrize("size", [7, 40_000], ids=["small", "in slices"])
def test_reductions_of_all_element_types(three: list[AyniProcessGroup], op: Any, size: int):
    for dtype in FLOATS if op == ReduceOp.AVG else FLOATS + WHOLES:
        parts = [torch.arange(size).remainder(rank + 3).add(1).to(dtype) for rank in range(3)]

        def work(group: AyniProcessGroup, rank: int) -> torch.Tensor:
            tensor = parts[rank].clone()  # noqa: B023
            group.allreduce([tensor], reducing(op)).wait()
            return tensor

        ends = on_all(three, work)
        assert ends[0].equal(ends[1])
        assert ends[0].equal(ends[2])
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
        torch.testing.assert_close(ends[0].to(torch.float64), expected_of(op, parts), rtol=tolerance, atol=0)


def test_bits_and_what_can_not_be_reduced(three: list[AyniProcessGroup]):
    def work(group: AyniProcessGroup, rank: int) -> list[int]:
        found = []
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            tensor = torch.tensor([rank + 5])
            group.allreduce([tensor], reducing(op)).wait()
            found.append(int(tensor))
        with pytest.raises(Unsupported, match=r"int64 by .*AVG"):
            group.allreduce([torch.tensor([1])], reducing(ReduceOp.AVG)).wait()
        with pytest.raises(Unsupported, match="make it dense"):
            group.allreduce([torch.eye(2).to_sparse()], None).wait()
        return found

    assert on_all(three, work) == [[5 & 6 & 7, 5 | 6 | 7, 5 ^ 6 ^ 7]] * 3


def test_half_types_are_added_in_float32(three: list[AyniProcessGroup]):
    # 3 x 40,000 is more than float16 has; the mean is not.
    def work(group: AyniProcessGroup, rank: int) -> float:
        tensor = torch.full((5,), 40_000.0, dtype=torch.float16)
        group.allreduce([tensor], reducing(ReduceOp.AVG)).wait()
        return float(tensor[0])

    assert on_all(three, work) == [40_000.0] * 3


def test_every_collective_moves_what_it_says(three: list[AyniProcessGroup]):  # noqa: PLR0915
    def row(rank: int) -> torch.Tensor:
        return torch.tensor([[10.0 * rank, 10.0 * rank + 1]])

    def work(group: AyniProcessGroup, rank: int) -> None:
        root = dist.BroadcastOptions()
        root.rootRank = 2
        tensor = row(rank)
        group.broadcast([tensor], root).wait()
        assert tensor.equal(row(2))

        everybody = torch.cat([row(r) for r in range(3)])
        lists = [torch.empty(1, 2) for _ in range(3)]
        group.allgather([lists], [row(rank)]).wait()
        assert torch.cat(lists).equal(everybody)
        whole = torch.empty(3, 2)
        group.all_gather_single(whole, row(rank)).wait()
        assert whole.equal(everybody)
        group.all_gather_single_coalesced([whole.zero_()], [row(rank)]).wait()
        assert whole.equal(everybody)

        part = torch.empty(1, 2)
        group.reduce_scatter([part], [[row(rank + r) for r in range(3)]]).wait()
        assert part.equal(row(0 + rank) + row(1 + rank) + row(2 + rank))
        group.reduce_scatter_single(part.zero_(), torch.cat([row(rank + r) for r in range(3)])).wait()
        assert part.equal(row(0 + rank) + row(1 + rank) + row(2 + rank))

        to_root = dist.ReduceOptions()
        to_root.rootRank = 1
        tensor = row(rank)
        group.reduce([tensor], to_root).wait()
        assert tensor.equal(row(0) + row(1) + row(2) if rank == 1 else row(rank))

        gathering, scattering = dist.GatherOptions(), dist.ScatterOptions()
        gathering.rootRank = scattering.rootRank = 0
        lists = [torch.empty(1, 2) for _ in range(3)]
        group.gather([lists] if rank == 0 else [], [row(rank)], gathering).wait()
        assert rank or torch.cat(lists).equal(everybody)
        group.scatter([part], [[row(r) for r in range(3)]] if rank == 0 else [], scattering).wait()
        assert part.equal(row(rank))

        outputs = [torch.empty(1, 2) for _ in range(3)]
        group.alltoall(outputs, [row(3 * rank + r) for r in range(3)]).wait()
        assert torch.cat(outputs).equal(torch.cat([row(3 * r + rank) for r in range(3)]))
        # Unequal parts: rank r sends r + 1 rows to everybody.
        sent, got = torch.full((3 * (rank + 1),), float(rank)), torch.empty(6)
        group.all_to_all_single(got, sent, [1, 2, 3], [rank + 1] * 3).wait()
        assert got.tolist() == [0, 1, 1, 2, 2, 2]

        empty = torch.empty(0)
        group.allreduce([empty]).wait()
        assert group.barrier().wait()

    on_all(three, work)


def test_receives_that_wait_do_not_keep_back_what_is_sent(three: list[AyniProcessGroup]) -> None:
    def work(group: AyniProcessGroup, rank: int) -> list[float]:
        others = [other for other in range(3) if other != rank]
        found = [torch.zeros(1) for _ in range(12)]
        waits = [group.recv([tensor], others[i % 2], i) for i, tensor in enumerate(found)]
        wanted = {
            other: [i for i in range(12) if [o for o in range(3) if o != other][i % 2] == rank] for other in others
        }
        waits += [group.send([torch.full((1,), 10.0 * rank)], other, i) for other in others for i in wanted[other]]
        for one in waits:
            one.wait()
        return [tensor.item() for tensor in found]

    for rank, found in enumerate(on_all(three, work)):
        others = [other for other in range(3) if other != rank]
        assert found == [10.0 * others[i % 2] for i in range(12)]


def test_posts_with_one_tag_arrive_in_order_whatever_collectives_do(three: list[AyniProcessGroup]):
    def work(group: AyniProcessGroup, rank: int) -> list[float]:
        if rank == 2:
            group.barrier().wait()
            return []
        if rank == 0:
            works = [group.send([torch.tensor([float(n)])], 1, 7) for n in range(5)]
            group.send([torch.tensor([9.0])], 1, 8).wait()
            for sending in works:
                sending.wait()
            group.barrier().wait()
            return []
        other, found = torch.empty(1), []
        group.recv([other], 0, 8).wait()
        for _ in range(5):
            tensor = torch.empty(1)
            group.recv([tensor], 0, 7).wait()
            found.append(float(tensor))
        group.barrier().wait()
        return [float(other), *found]

    assert on_all(three, work)[1] == [9.0, 0.0, 1.0, 2.0, 3.0, 4.0]


def test_300_small_reductions_in_flight(three: list[AyniProcessGroup]):
    def work(group: AyniProcessGroup, rank: int) -> list[float]:
        tensors = [torch.tensor([float(n + rank)]) for n in range(300)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        futures = [handle.get_future() for handle in works]
        for handle in works:
            handle.wait()
        assert all(handle.is_completed() and handle.is_success() for handle in works)
        assert futures[0].then(lambda done: done.value()[0] + 1).wait().item() == tensors[0].item() + 1
        return [float(tensor) for tensor in tensors]

    assert on_all(three, work) == [[3.0 * n + 3 for n in range(300)]] * 3


def test_shapes_that_differ_are_named_on_both_sides(server: CoordinatorProcess):
    with groups(server, 2) as two:

        def work(group: AyniProcessGroup, rank: int) -> str:
            handle = group.allreduce([torch.zeros(3 + rank)])
            with pytest.raises(SpecMismatch) as caught:
                handle.wait()
            assert isinstance(handle.exception(), SpecMismatch)
            assert handle.is_completed()
            assert not handle.is_success()
            return caught.value.message

        messages = on_all(two, work)
        for message in messages:
            assert "float32 [3]" in message
            assert "float32 [4]" in message
        assert "rank 1 sent" in messages[0]


def test_a_call_that_another_rank_does_not_make_times_out_and_names_call_and_rank(server: CoordinatorProcess):
    with groups(server, 2, timeout=0.5) as two:
        began = time.monotonic()
        with pytest.raises(
            Deadline, match=r"rank 0 of .* waited 0.5 s in vain for rank 1 in allreduce #0, float32 \[3\]"
        ):
            two[0].allreduce([torch.zeros(3)]).wait()
        assert time.monotonic() - began < 10


def test_a_rank_that_left_or_aborted_is_named(server: CoordinatorProcess):
    with groups(server, 3) as made:
        waiting = made[0].allreduce([torch.zeros(3)])
        made[2]._stream.close()
        with pytest.raises(PeerLost, match=r"rank 2 \(process-2\) has left the group"):
            waiting.wait()
    with groups(server, 3) as made:
        waiting = made[0].allreduce([torch.zeros(3)])
        made[1].abort()
        with pytest.raises(PeerLost, match=r"rank 1 of the group is lost \(process-1: its stream broke\)"):
            waiting.wait()
        with pytest.raises(PeerLost):
            made[2].allreduce([torch.zeros(3)]).wait()
        assert all(group.rank() == rank for rank, group in enumerate(made))


def test_a_coordinator_that_is_gone_is_named(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server, groups(server, 2) as made:
        waiting = made[0].allreduce([torch.zeros(3)])
        server.process.kill()
        with pytest.raises((CoordinatorLost, TransportBroken), match=server.address):
            waiting.wait()


def test_who_may_enter_a_group(server: CoordinatorProcess):
    config = client_config(settings(server, "someone"))
    with pytest.raises(TooLarge, match="takes 1 to 8"):
        CollectiveStream.open(config, "many", 9, 0, 5.0)
    with pytest.raises(Deadline, match=r"waited 0.3 s in vain for all 2 processes of group 'alone'"):
        CollectiveStream.open(config, "alone", 2, 0, 0.3)
    opened, seen = threading.Event(), threading.Event()

    def first(index: int) -> None:
        if index == 0:
            opened.set()
            stream = CollectiveStream.open(config, "meeting", 2, 0, 20.0)
            seen.wait(20)
            stream.close()
            return
        opened.wait(20)
        server.wait_for_log("group meeting waits for 1 more")
        with pytest.raises(IdentityTaken, match="rank 0 of group 'meeting'"):
            CollectiveStream.open(config, "meeting", 2, 0, 5.0)
        with pytest.raises(Incompatible, match="opened with world_size 2"):
            CollectiveStream.open(config, "meeting", 3, 1, 5.0)
        second = CollectiveStream.open(config, "meeting", 2, None, 20.0)
        assert second.rank == 1
        with pytest.raises(WorldFull, match="use another name"):
            CollectiveStream.open(config, "meeting", 2, None, 5.0)
        seen.set()
        second.close()

    side_by_side(first, 2)


def test_init_process_group_trains_ddp_and_fsdp2_as_gloo_does(server: CoordinatorProcess, tmp_path: Path):
    script = "tests/support/distributed_training.py"
    commands = [[script, backend, str(tmp_path)] for backend in ("gloo", "ayni") for _ in range(2)]
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ports = {backend: {"MASTER_PORT": str(free_port())} for backend in ("gloo", "ayni")}
    environments = [{**torchrun, **ports["gloo"], "RANK": str(rank)} for rank in range(2)]
    environments += [
        {**settings(server, f"rank-{rank}"), **torchrun, **ports["ayni"], "RANK": str(rank)} for rank in range(2)
    ]
    with programs(commands, environments) as started:
        outputs(started)
    saved = {path.stem: torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))}
    assert sorted(saved) == ["ayni-0", "ayni-1", "gloo-0", "gloo-1"]
    for name in ("ayni-0", "ayni-1"):
        assert saved[name].keys() == saved["gloo-0"].keys()
        for key, value in saved[name].items():
            assert value.equal(saved["gloo-0"][key]), (name, key)


def test_an_element_type_that_can_not_be_reduced_is_named_with_those_that_can_on_all_ranks(
    three: list[AyniProcessGroup],
):
    def work(group: AyniProcessGroup, rank: int) -> None:
        tensor = torch.ones(3).to(torch.float8_e4m3fn)
        words = r"can't reduce float8_e4m3fn by SUM: it takes float32, float64, float16, .*complex128; convert"
        for call in (group.allreduce, group.reduce):
            with pytest.raises(Unsupported, match=words):
                call([tensor]).wait()
        with pytest.raises(Unsupported, match=words):
            group.reduce_scatter([tensor], [[tensor] * 3]).wait()
        with pytest.raises(
            Unsupported, match="can't reduce float32 by BAND: it takes uint8, int8, int16, int32, int64, bool"
        ):
            group.allreduce([torch.ones(1)], reducing(ReduceOp.BAND)).wait()
        # Bytes that nobody adds travel as they are.
        sent = torch.full((2,), float(rank)).to(torch.float8_e5m2)
        group.broadcast([sent]).wait()
        assert sent.view(torch.uint8).sum() == 0

    on_all(three, work)
