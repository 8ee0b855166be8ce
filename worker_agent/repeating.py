"""Calls of a membership that are made again when they broke.  [shell]

A contribution is made again when the coordinator says that the sum starts again, and by an elastic worker also when
its stream broke: the parts stay valid until the attempt is over, and the mean starts again. A commit is asked for
again: a committed step is answered again with the same values.
"""

import asyncio
import logging
import random
from functools import partial

from ayni.buckets import Bucket
from ayni.errors import Duplicate, RoundRestarted
from worker_agent.backoff import delays
from worker_agent.coordinator import Coordinator, translated
from worker_agent.exchange import Contribution, Outcome, exchange
from worker_agent.faults import TransportBroken
from worker_agent.news import News
from worker_agent.same_host import SameHost
from worker_agent.session import Commit, Report, ShardAssignment
from worker_agent.standing import Standing

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Repeating:
    """Makes calls as often as it takes; who calls bounds the time."""

    def __init__(self, coordinator: Coordinator, news: News, standing: Standing, same_host: SameHost) -> None:
        """Takes who is called, what says whether that still makes sense, and what is shared with the coordinator."""
        self._same_host = same_host
        self._coordinator = coordinator
        self._news = news
        self._standing = standing

    async def contribute(self, bucket: Bucket, contribution: Contribution) -> Outcome:
        """Contributes to one reduction and receives its mean.

        Raises:
            AyniError: the coordinator refused.
            TransportBroken: the stream broke, and this worker does not contribute again.
        """
        is_repeated = False
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                return await self._contribute(bucket, contribution)
            except RoundRestarted as error:
                _log.debug("contributing to %s again: %s", contribution.name, error)
            except TransportBroken as error:
                if self._news.ending or not self._standing.elastic:
                    raise
                _log.debug("contributing to %s again: %s", contribution.name, error)
                await asyncio.sleep(delay)
            except Duplicate:
                # The coordinator has not noticed yet that the stream before broke.
                if not is_repeated:
                    raise
                await asyncio.sleep(delay)
            is_repeated = True
        raise AssertionError("there is always another delay")

    async def commit(self, assignment: ShardAssignment, report: Report) -> Commit:
        """Says that a lease is done and waits for the step's commit.

        Raises:
            AyniError: the coordinator refused.
            TransportBroken: the coordinator is gone.
        """
        for delay in delays(random.random, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                return await self._coordinator.commit(assignment, report)
            except TransportBroken as error:
                if self._news.ending:
                    raise
                _log.warning("%s; asking again in %.2f s", error, delay)
                await asyncio.sleep(delay)
        raise AssertionError("there is always another delay")

    async def _contribute(self, bucket: Bucket, contribution: Contribution) -> Outcome:
        with translated(f"the stream of {contribution.name}", self._coordinator.address):
            dial = partial(self._coordinator.reduction, bucket)
            chunk_bytes = self._coordinator.chunk_bytes
            return await exchange(dial, contribution, self._standing.traffic, self._same_host, chunk_bytes)
