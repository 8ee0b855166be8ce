"""Exchange groups against a real coordinator process: who takes part, and which topology it becomes."""

import asyncio

import grpc
import pytest

from ayni.messages import duration
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import coordinator, raw_worker, refusal
from tests.support.peer_workers import (
    NUM,
    RUN,
    commit,
    leases_of,
    names,
    owners,
    peer_workers,
    say,
    weights,
)
from tests.support.regrouping import reason_of, somebody_has_committed, star


def test_without_an_owner_left_the_coordinator_reduces(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            waiting = asyncio.create_task(commit(bee, leases[1].group, leases[1]))
            await somebody_has_committed(ant)
            await say(ant, leases[0].group, lost_owners=[ant.worker_id, bee.worker_id])
            again = await leases_of((ant, bee))
            (answer,) = await asyncio.gather(waiting, return_exceptions=True)
            assert reason_of(answer) == "STEP_VOIDED"
            return again, await star(ant, bee)

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        again, commits = asyncio.run(scenario(process.address))
        assert "the coordinator reduces: there is no worker that the others can dial" in process.read_log()
    assert [(lease.attempt, lease.HasField("group")) for lease in again] == [(1, False), (1, False)]
    assert {(told.attempt, told.total_weight) for told in commits} == {(1, 2 * NUM)}


def test_one_that_nobody_can_dial_takes_part_and_owns_nothing(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant") as (ant,), peer_workers(address, "bee", peer_address="") as (bee,):
            leases = await leases_of((ant, bee))
            group = leases[0].group
            await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))
            return group

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        group = asyncio.run(scenario(process.address))
    assert (names(group), owners(group)) == (["ant", "bee"], ["ant"])


def test_an_evaluation_has_no_group(tmp_path):
    run = {**RUN, "start_workers": 2, "evaluation": {"every_steps": 1}}

    async def scenario(address):
        async with peer_workers(address, "ant", "bee", num_evaluation_samples=64) as (ant, bee):
            leases = await leases_of((ant, bee))
            group = leases[0].group
            await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))
            held_out = await leases_of((ant, bee))
            await asyncio.gather(*(w.commit(weights(w.assignment), num_buckets=0) for w in (ant, bee)))
            return held_out, await leases_of((ant, bee))

    with coordinator(tmp_path, run) as process:
        held_out, following = asyncio.run(scenario(process.address))
    assert [(x.kind, x.HasField("group")) for x in held_out] == [(pb.STEP_KIND_EVALUATE, False)] * 2
    assert [(x.kind, x.HasField("group")) for x in following] == [(pb.STEP_KIND_TRAIN, True)] * 2


@pytest.mark.parametrize("topology", ["sharded", "torch"])
@pytest.mark.parametrize(
    ("fields", "theirs"),
    [
        ({"elastic": True}, "star alone"),
        ({"elastic": False, "topologies": ["sharded", "torch"]}, "one that is not elastic"),
    ],
)
def test_who_takes_no_part_is_refused_and_told_why(tmp_path, topology, fields, theirs):
    async def scenario(address):
        async with raw_worker(address, "ant") as ant:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ant.join(**fields)
            return refusal(caught), await ant.join(elastic=True, topologies=["sharded", "torch"])

    with coordinator(tmp_path, {**RUN, "topology": topology}) as process:
        error, answer = asyncio.run(scenario(process.address))
    assert (error.reason, error.metadata["field"], error.metadata["worker"]) == ("INCOMPATIBLE", "topologies", theirs)
    assert answer.topology == topology


def test_a_torch_group_names_the_stores_and_its_first_member_takes_everything_down(tmp_path):
    async def scenario(address):
        said = {"topologies": ["torch"], "peer_address": "", "store_address": "127.0.0.1:9000"}
        async with peer_workers(address, "ant", "bee", **said) as (ant, bee):
            leases = await leases_of((ant, bee))
            group = leases[0].group
            return group, await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))

    with coordinator(tmp_path, {**RUN, "start_workers": 2, "topology": "torch"}) as process:
        group, commits = asyncio.run(scenario(process.address))
        assert "depend on who computed what" in process.read_log()
    assert (group.topology, owners(group)) == ("torch", ["ant", "bee"])
    assert [member.store_address for member in group.members] == ["127.0.0.1:9000"] * 2
    assert {told.total_weight for told in commits} == {2 * NUM}


def test_auto_measures_the_coordinator_then_lets_the_workers_reduce_and_says_why(tmp_path):
    run = {**RUN, "start_workers": 2, "topology": "auto", "num_steps": 6, "gradients": "grpc"}
    times = pb.StepTimes(compute=duration(0.1), exchange=duration(0.4))

    async def scenario(address):
        found = []
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            for _ in range(3):
                leases = await leases_of((ant, bee))
                found.append(leases[0].HasField("group"))
                await star(ant, bee, times=times)
            leases = await leases_of((ant, bee))
            found.append(leases[0].HasField("group"))
            group = leases[0].group
            await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))
        return found

    with coordinator(tmp_path, run) as process:
        found = asyncio.run(scenario(process.address))
        said = [line for line in process.read_log().splitlines() if "topology auto" in line]
    assert found == [False, False, False, True]
    assert "topology auto: star, because the links are not measured yet" in said[0]
    assert "topology auto: sharded, because 0.28 MB a step among 2 workers (2 own slices) take max(2 x" in said[1]
    assert len(said) == 2


def test_auto_takes_workers_that_take_no_part_and_reduces_itself(tmp_path):
    async def scenario(address):
        async with (
            peer_workers(address, "ant", topologies=[]) as (ant,),
            peer_workers(address, "bee") as (bee,),
        ):
            leases = await leases_of((ant, bee))
            return [lease.HasField("group") for lease in leases], await star(ant, bee)

    with coordinator(tmp_path, {**RUN, "start_workers": 2, "topology": "auto"}) as process:
        found, commits = asyncio.run(scenario(process.address))
        assert "because ant takes part in no exchange among workers" in process.read_log()
    assert found == [False, False]
    assert {told.total_weight for told in commits} == {2 * NUM}
