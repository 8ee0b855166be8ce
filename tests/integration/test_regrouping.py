"""Exchange groups against a real coordinator process: deaths, lost owners, late workers, restarts."""

import asyncio
import signal

import grpc
import numpy as np
import pytest

from ayni.buckets import FLAT
from ayni.errors import BadRequest, NotLeased, StaleEpoch
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import coordinator, refusal
from tests.support.peer_workers import (
    MEANS,
    NUM,
    RUN,
    commit,
    heard,
    leases_of,
    names,
    owners,
    peer_workers,
    say,
    weights,
)
from tests.support.regrouping import ledger, reason_of, regrouped, snapshot_of, somebody_has_committed


def test_the_group_comes_with_the_lease_and_its_slices_make_the_commit(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as workers:
            leases = await leases_of(workers)
            group = leases[0].group
            assert all(lease.group == group for lease in leases)
            commits = await asyncio.gather(*(commit(w, group, lease) for w, lease in zip(workers, leases, strict=True)))
            following = await leases_of(workers)
            return group, commits, following, await snapshot_of(workers[0])

    with coordinator(tmp_path, {**RUN, "max_bucket_bytes": 1 << 21}) as process:
        group, commits, following, snapshot = asyncio.run(scenario(process.address))
    assert (group.topology, group.chunk_bytes) == ("sharded", 1 << 20)
    assert group.max_bucket_bytes == 1 << 21
    assert owners(group) == names(group) == ["ant", "bee", "cat"]
    assert [member.address for member in group.members] == ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002"]
    assert len(bytes.fromhex(group.secret)) >= 16
    assert {(told.attempt, told.total_weight) for told in commits} == {(0, 2 * NUM)}
    norm = np.sqrt(sum(np.square(mean.astype(np.float64)).sum() for mean in MEANS.values()))
    assert commits[0].gradient_norm == pytest.approx(norm, rel=1e-12)
    (record,) = ledger(tmp_path)
    assert (record.gradient_norm, len(record.gradient_hash)) == (commits[0].gradient_norm, 32)
    assert [(c.worker_name, c.weight) for c in record.contributions] == [("ant", 6), ("bee", 6), ("cat", 4)]
    assert following[0].group.generation > group.generation
    assert following[0].group.secret != group.secret
    assert following[0].step == 1
    assert (snapshot.topology, snapshot.generation) == ("sharded", following[0].group.generation)
    assert [worker.owns_slices for worker in snapshot.workers] == [True, True, True]
    assert snapshot.regroups == 0


def test_after_a_death_all_contribute_and_commit_again_in_another_group(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = await leases_of((ant, bee, cat))
            first = leases[0].group
            early = asyncio.create_task(commit(ant, first, leases[0]))
            await somebody_has_committed(bee)
            cat.stream.cancel()
            groups, extras = await regrouped((ant, bee))
            (lost,) = await asyncio.gather(early, return_exceptions=True)
            late = await asyncio.gather(commit(bee, first, leases[1]), return_exceptions=True)
            assert [reason_of(lost), reason_of(late[0])] == ["ROUND_RESTARTED", "ROUND_RESTARTED"]
            assert groups[0] == groups[1]
            second = groups[0].group
            commits = await asyncio.gather(
                commit(ant, second, leases[0], extras[0]), commit(bee, second, leases[1], extras[1])
            )
            return first, groups[0], leases, extras, commits, await snapshot_of(ant)

    with coordinator(tmp_path, RUN) as process:
        first, regroup, leases, extras, commits, snapshot = asyncio.run(scenario(process.address))
    assert (regroup.step, regroup.attempt) == (0, 0)
    assert "worker cat left" in regroup.reason
    assert names(regroup.group) == owners(regroup.group) == ["ant", "bee"]
    assert regroup.group.generation > first.generation
    assert regroup.group.secret != first.secret
    assert all(extra.extra and extra.attempt == 0 and extra.group == regroup.group for extra in extras)
    covered = [m for extra in extras for m in weights(extra)]
    assert sorted(covered) == list(weights(leases[2]))
    assert {(told.attempt, told.total_weight) for told in commits} == {(0, 2 * NUM)}
    assert snapshot.regroups == 1
    (record,) = ledger(tmp_path)
    assert {c.worker_name for c in record.contributions} == {"ant", "bee"}
    assert sum(c.stop - c.start for c in record.contributions) == NUM


def test_a_worker_that_had_committed_and_dies_is_missed_all_the_same(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            gone = asyncio.create_task(commit(bee, leases[1].group, leases[1]))
            await somebody_has_committed(ant)
            await bee.leave("enough")
            (regroup,), (extra,) = await regrouped((ant,))
            (answer,) = await asyncio.gather(gone, return_exceptions=True)
            assert reason_of(answer) == "ROUND_RESTARTED"
            return regroup, await commit(ant, regroup.group, leases[0], extra)

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        regroup, told = asyncio.run(scenario(process.address))
    assert names(regroup.group) == ["ant"]
    assert (told.attempt, told.total_weight) == (0, 2 * NUM)


def test_an_owner_that_somebody_can_not_reach_owns_nothing_until_the_members_change(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = await leases_of((ant, bee, cat))
            first = leases[0].group
            await say(ant, first, lost_owners=[bee.worker_id])
            told = [await heard(worker, "regroup") for worker in (ant, bee, cat)]
            await say(cat, first, lost_owners=[ant.worker_id])  # Of a group that is over: nothing is lost by it.
            second = told[0].group
            assert all(one.group == second for one in told)
            await asyncio.gather(*(commit(w, second, x) for w, x in zip((ant, bee, cat), leases, strict=True)))
            third = (await leases_of((ant, bee, cat)))[0].group
            async with peer_workers(address, "dog"):
                group = third
                while "dog" not in names(group):
                    await asyncio.gather(*(commit(w, group, w.assignment) for w in (ant, bee, cat)))
                    group = (await leases_of((ant, bee, cat)))[0].group
            return told[0], third, group

    with coordinator(tmp_path, {**RUN, "num_steps": 50}) as process:
        regroup, third, fourth = asyncio.run(scenario(process.address))
        assert "worker ant can't reach bee" in process.read_log()
    assert owners(regroup.group) == ["ant", "cat"]
    assert names(regroup.group) == ["ant", "bee", "cat"]
    assert regroup.reason == "worker ant can't reach bee"
    assert owners(third) == ["ant", "cat"]
    assert owners(fourth) == ["ant", "bee", "cat", "dog"]


def test_a_reduction_that_failed_for_good_halts_the_run(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            await say(ant, pb.ExchangeGroup(generation=1), failed_reduction="of a group that is over")
            waiting = asyncio.create_task(commit(bee, leases[1].group, leases[1]))
            await somebody_has_committed(ant)
            await say(ant, leases[0].group, failed_reduction="step 0, flat: the sum is beyond float32")
            (answer,) = await asyncio.gather(waiting, return_exceptions=True)
            return reason_of(answer), (await snapshot_of(ant)).state

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        assert asyncio.run(scenario(process.address)) == ("HALTED", pb.RUN_STATE_HALTED)
        log = process.read_log()
    assert "the run was halted: worker ant: step 0, flat: the sum is beyond float32" in log
    assert "a group that is over" not in log


def test_generations_grow_when_the_coordinator_is_started_again(tmp_path):
    async def group_of(address):
        async with peer_workers(address, "ant", "bee") as workers:
            leases = await leases_of(workers)
            return leases[0].group, leases[0].epoch

    run = {**RUN, "start_workers": 2}
    with coordinator(tmp_path, run) as process:
        first, epoch = asyncio.run(group_of(process.address))
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(20)
    with coordinator(tmp_path, run) as process:
        second, later = asyncio.run(group_of(process.address))
    assert later > epoch
    assert second.generation > first.generation
    assert second.secret != first.secret


def test_a_commit_from_before_a_restart_is_refused(tmp_path):
    run = {**RUN, "start_workers": 2}

    async def before(address):
        async with peer_workers(address, "ant", "bee") as workers:
            return await leases_of(workers)

    async def after(address, old):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            new = await leases_of((ant, bee))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await commit(ant, old[0].group, old[0])
            group = new[0].group
            await asyncio.gather(commit(ant, group, new[0]), commit(bee, group, new[1]))
            return refusal(caught)

    with coordinator(tmp_path, run) as process:
        old = asyncio.run(before(process.address))
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(20)
    with coordinator(tmp_path, run) as process:
        assert isinstance(asyncio.run(after(process.address, old)), StaleEpoch)


def test_the_coordinator_takes_no_gradients_where_workers_reduce(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            with pytest.raises(grpc.aio.AioRpcError) as gradient:
                await ant.reduce([np.ones(10, np.float32)], weights(leases[0]))
            with pytest.raises(grpc.aio.AioRpcError) as future:
                await commit(ant, leases[0].group, leases[0], generation=leases[0].group.generation + 1)
            group = leases[0].group
            told = await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))
            return refusal(gradient), refusal(future), told

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        gradient, future, told = asyncio.run(scenario(process.address))
    assert isinstance(gradient, NotLeased)
    assert isinstance(future, BadRequest)
    assert {one.attempt for one in told} == {0}


def test_slices_that_do_not_fit_together_halt_the_run_by_name(tmp_path):
    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            group = leases[0].group
            waiting = asyncio.create_task(commit(ant, group, leases[0]))
            await somebody_has_committed(bee)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await commit(bee, group, leases[1], slices=[])
            await asyncio.gather(waiting, return_exceptions=True)
            return refusal(caught), await snapshot_of(bee)

    with coordinator(tmp_path, {**RUN, "start_workers": 2}) as process:
        error, snapshot = asyncio.run(scenario(process.address))
    assert "of flat ant took down (0, 131072), bee took down nothing" in error.message
    assert snapshot.state == pb.RUN_STATE_HALTED


def test_flat_mean_is_larger_than_one_segment_for_each_owner():
    assert MEANS[FLAT].size > 3 * 65536, "else an owner would have nothing to take down"
