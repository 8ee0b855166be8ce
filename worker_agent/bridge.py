"""The one place where threads meet the event loop.  [shell]

Training runs on ordinary threads; gRPC runs on an event loop. One background thread of the process runs the loop, for
every client and server in it: grpc.aio wakes all loops of a process for each other's events, so one is best. A thread
enters the loop with `submit` (returns at once) or `wait` (returns the result, or says what it waited for in vain).
"""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

from ayni.errors import Deadline

T = TypeVar("T")

_STOP_SECONDS = 5.0

_END: Any = object()


class Bridge:
    """A background thread that runs an event loop."""

    def __init__(self, name: str = "ayni-network") -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine on the loop and returns at once. Cancelling the future cancels the coroutine."""
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._start, coroutine, future)
        return future

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a plain function on the loop, soon. May be called from a signal handler."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Runs a coroutine on the loop and returns its result.

        Args:
            coroutine: what to run.
            timeout: seconds.
            what: what is waited for, as it completes "waited 5 s for ...".

        Raises:
            Deadline: it took longer; the coroutine is cancelled.
        """
        return wait(self.submit(coroutine), timeout, what)

    def iterate(self, source: AsyncGenerator[T], timeout: float, what: str) -> Generator[T]:
        """Yields what an asynchronous generator yields; `timeout` holds for each item.

        Raises:
            Deadline: an item took longer.
        """
        try:
            while (item := self.wait(anext(source, _END), timeout, what)) is not _END:
                yield item
        finally:
            self.wait(source.aclose(), _STOP_SECONDS, f"the end of {what}")

    def _start(self, coroutine: Coroutine[Any, Any, T], future: "Future[T]") -> None:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda done: _settle(done, future))
        future.add_done_callback(lambda done: done.cancelled() and self._loop.call_soon_threadsafe(task.cancel))

    def stop(self) -> None:
        """Stops what still runs on the loop, the loop and its thread."""
        with contextlib.suppress(TimeoutError):
            self.submit(_cancel_others()).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


def wait(future: "Future[T]", timeout: float, what: str) -> T:
    """Returns a future's result.

    Raises:
        Deadline: there is none after `timeout` seconds; the future is cancelled.
    """
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():
            return future.result()
        future.cancel()
        raise Deadline(f"waited {timeout:g} s in vain for {what}", waiting_for=what, timeout=timeout) from None
    except BaseException:
        future.cancel()
        raise


def shared() -> Bridge:
    """Returns the bridge of this process; the first call starts it, the end of the process stops it. Thread-safe."""
    with _STARTING:
        return _started()


_STARTING = threading.Lock()


@lru_cache(maxsize=1)
def _started() -> Bridge:
    bridge = Bridge()
    atexit.register(bridge.stop)
    return bridge


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _settle(task: "asyncio.Task[T]", future: "Future[T]") -> None:
    """Hands a task's outcome on. A future that was cancelled takes none, and then an error is nobody's any more."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(error)
