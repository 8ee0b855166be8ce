"""The stream of views: made for all together, while somebody looks, and never waiting for a reader."""

import asyncio
from contextlib import aclosing

from coordinator_service.watch.feed import Feed


class Source:
    """Makes numbered views, each when the test says so."""

    def __init__(self) -> None:
        self.made = 0
        self._wanted: asyncio.Queue[None] = asyncio.Queue()

    def make(self) -> bytes:
        self.made += 1
        if self.made == 4:
            raise ValueError("a view that can't be made")
        return str(self.made).encode()

    async def next_change(self, pause: float, limit: float) -> None:
        assert 0 < pause < limit
        await self._wanted.get()

    async def change(self) -> None:
        """Has a view made, and lets everybody take it who waits for it."""
        before = self.made
        self._wanted.put_nowait(None)
        await settled()
        assert self.made == before + 1


async def settled() -> None:
    """Lets everybody run who can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def scenario() -> None:
    source = Source()
    feed = Feed(source.make, source.next_change)
    quick: list[bytes] = []

    async def read() -> None:
        async with aclosing(feed.views()) as views:
            async for view in views:
                quick.append(view)

    reading = asyncio.create_task(read())
    async with aclosing(feed.views()) as slow:
        assert await anext(slow) in (b"1", b"2")
        await asyncio.sleep(0)
        assert (source.made, feed.num_readers) == (2, 2)
        await source.change()
        await source.change()  # The one that can't be made.
        await source.change()
        await source.change()
        assert quick[1:] == [b"3", b"5", b"6"]
        assert await anext(slow) == b"6", "a reader that was busy takes the newest"
    reading.cancel()
    await asyncio.wait([reading])
    assert feed.num_readers == 0
    await settled()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, "nobody looks, so nothing is made"


def test_views_are_made_while_somebody_looks_and_a_slow_reader_skips_some(caplog) -> None:
    asyncio.run(scenario())
    assert "the dashboard's view can't be made" in caplog.text
