"""Exchange groups against a real coordinator process: deaths, lost owners, late workers, restarts."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from ayni.buckets import FLAT
from ayni.errors import BadRequest, NotLeased, StaleEpoch
from ayni.messages import duration
from ayni.rpc import error_from
from ayni.tree import cover
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord
from tests.support.coordinator import RawWorker, coordinator, raw_worker, refusal
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


def ledger(folder) -> list[CommitRecord]:
    with contextlib.closing(open_folder(folder / "state" / "peers", to_read=True)) as store:
        return store.commits()


async def snapshot_of(worker: RawWorker) -> pb.RunSnapshot:
    return (await worker.stub.GetRun(pb.GetRunRequest(), timeout=10)).snapshot


def reason_of(answer: object) -> str:
    assert isinstance(answer, grpc.aio.AioRpcError), answer
    error = error_from(answer)
    return error.reason if error else str(answer)


async def somebody_has_committed(watcher: RawWorker) -> None:
    async for response in watcher.stub.WatchRun(pb.WatchRunRequest(), timeout=20):
        if any(worker.committed for worker in response.snapshot.workers):
            return


async def regrouped(workers: Sequence[RawWorker]) -> tuple[list[pb.Regroup], list[pb.Assignment]]:
    """What each is told when one has died: the group, then an extra lease."""
    groups = [await heard(worker, "regroup") for worker in workers]
    return groups, await leases_of(workers)


async def star(*workers: RawWorker, **changes: object) -> list[pb.CommitStepResponse]:
    """Makes a step through the coordinator, with one flat bucket of ones."""

    async def one(worker):
        lease = worker.assignment
        nodes = cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        await worker.reduce([np.ones(70_000, np.float32)] * len(nodes), weights(lease))
        return await worker.commit(weights(lease), **changes)

    return await asyncio.gather(*(one(worker) for worker in workers))


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


def test_a_late_worker_is_left_behind_and_the_others_go_on_without_it(tmp_path):
    run = {**RUN, "stragglers": {"shortest": "300ms", "longest": "1s"}}

    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = await leases_of((ant, bee, cat))
            for worker, lease in zip((ant, bee), leases, strict=False):
                await say(worker, lease.group, contributed_leases=[lease.lease_id])
            groups, extras = await regrouped((ant, bee))
            revoked = await heard(cat, "revoked")
            second = groups[0].group
            await asyncio.gather(commit(ant, second, leases[0], extras[0]), commit(bee, second, leases[1], extras[1]))
            following = await heard(cat, "assignment")
            return second, revoked, leases[2], following

    with coordinator(tmp_path, run) as process:
        second, revoked, lease, following = asyncio.run(scenario(process.address))
        assert "the step goes on without cat kept the others waiting" in process.read_log()
        assert "worker cat was left behind at step 0" in process.read_log()
    assert names(second) == ["ant", "bee"]
    assert revoked.lease_id == lease.lease_id
    assert (following.step, following.microbatch_start) == (1, following.microbatch_stop)
    assert (names(following.group), owners(following.group)) == (["ant", "bee", "cat"], ["ant", "bee"])


def test_nobody_is_late_while_nobody_has_contributed(tmp_path):
    run = {**RUN, "start_workers": 2, "stragglers": {"shortest": "100ms", "longest": "200ms"}}

    async def scenario(address):
        async with peer_workers(address, "ant", "bee") as (ant, bee):
            leases = await leases_of((ant, bee))
            await asyncio.sleep(1.0)  # Nothing may happen in this time.
            group = leases[0].group
            told = await asyncio.gather(commit(ant, group, leases[0]), commit(bee, group, leases[1]))
            return told, await snapshot_of(ant)

    with coordinator(tmp_path, run) as process:
        told, snapshot = asyncio.run(scenario(process.address))
    assert {one.attempt for one in told} == {0}
    assert snapshot.regroups == 0


def test_one_that_says_that_it_is_exchanging_is_not_the_late_one(tmp_path):
    """Bee can't contribute whole, because the owners wait for cat: it is cat that is left behind."""
    run = {**RUN, "stragglers": {"shortest": "300ms", "longest": "1s"}}

    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = await leases_of((ant, bee, cat))
            await say(ant, leases[0].group, contributed_leases=[leases[0].lease_id])
            await say(bee, leases[1].group, activity="exchanging")
            groups, _ = await regrouped((ant, bee))
            return groups[0]

    with coordinator(tmp_path, run) as process:
        regroup = asyncio.run(scenario(process.address))
    assert names(regroup.group) == ["ant", "bee"]


def test_one_that_has_contributed_and_never_commits_is_left_behind_when_the_others_have(tmp_path):
    run = {**RUN, "stragglers": {"shortest": "300ms", "longest": "1s"}}

    async def scenario(address):
        async with peer_workers(address, "ant", "bee", "cat") as (ant, bee, cat):
            leases = await leases_of((ant, bee, cat))
            group = leases[0].group
            for worker, lease in zip((ant, bee, cat), leases, strict=True):
                await say(worker, group, contributed_leases=[lease.lease_id])
            early = [asyncio.create_task(commit(w, group, x)) for w, x in zip((ant, bee), leases, strict=False)]
            groups, _ = await regrouped((ant, bee))
            answers = await asyncio.gather(*early, return_exceptions=True)
            return groups[0], [reason_of(answer) for answer in answers]

    with coordinator(tmp_path, run) as process:
        regroup, reasons = asyncio.run(scenario(process.address))
    assert names(regroup.group) == ["ant", "bee"]
    assert reasons == ["ROUND_RESTARTED", "ROUND_RESTARTED"]


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


def test_flat_mean_is_larger_than_one_segment_for_each_owner():
    assert MEANS[FLAT].size > 3 * 65536, "else an owner would have nothing to take down"
