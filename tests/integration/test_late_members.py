"""Exchange groups against a real coordinator process: who keeps the others waiting is left behind."""

import asyncio

from tests.support.coordinator import coordinator
from tests.support.peer_workers import (
    RUN,
    commit,
    heard,
    leases_of,
    names,
    owners,
    peer_workers,
    say,
)
from tests.support.regrouping import reason_of, regrouped, snapshot_of


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
