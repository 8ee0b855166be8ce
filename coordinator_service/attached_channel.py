"""What looks to a stub like a grpc.aio channel, and reaches an agent that nobody can dial.  [shell]

Only calls with a single request are possible.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from grpc import StatusCode, aio

from ayni.errors import AyniError
from coordinator_service.attached_calls import AttachedCall, broken, refused

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]
OpenCall = Callable[..., Coroutine[Any, Any, AttachedCall]]
"""Starts a call, given method, request and seconds; see `Attachments.open`."""


class AttachedChannel(aio.Channel):
    """Calls one attached agent; see grpc.aio.Channel. Metadata of calls does not reach the agent."""

    def __init__(self, open_call: OpenCall) -> None:
        """Use `Attachments.channel`."""
        self._open_call = open_call
        self._open: set[AttachedCall] = set()

    def unary_unary(
        self,
        method: str,
        request_serializer: Serializer | None = None,
        response_deserializer: Deserializer | None = None,
        _registered_method: bool | None = None,
    ) -> Any:
        """Returns what makes calls with one request and one response."""

        async def call(request: Any, **options: Any) -> Any:
            encoded = request_serializer(request) if request_serializer else request
            opened = await self._start(method, encoded, options, is_unary=True)
            try:
                answer = await opened.read()
                if answer is aio.EOF:
                    raise broken(StatusCode.INTERNAL, f"{method} was answered with nothing")
                return response_deserializer(answer) if response_deserializer else answer
            finally:
                self._end(opened)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Serializer | None = None,
        response_deserializer: Deserializer | None = None,
        _registered_method: bool | None = None,
    ) -> Any:
        """Returns what makes calls with one request and many responses."""

        async def call(request: Any, **options: Any) -> AsyncGenerator[Any]:
            encoded = request_serializer(request) if request_serializer else request
            opened = await self._start(method, encoded, options, is_unary=False)
            try:
                while (answer := await opened.read()) is not aio.EOF:
                    yield response_deserializer(answer) if response_deserializer else answer
            finally:
                self._end(opened)

        return call

    def stream_unary(self, method: str, *_: object, **__: object) -> Any:
        """Returns what refuses: an attachment carries single requests only."""
        return _unimplemented(method)

    def stream_stream(self, method: str, *_: object, **__: object) -> Any:
        """Returns what refuses: an attachment carries single requests only."""
        return _unimplemented(method)

    async def close(self, grace: float | None = None) -> None:
        """Gives up the calls that are under way; the attachment stays."""
        for call in list(self._open):
            self._end(call)

    def get_state(self, try_to_connect: bool = False) -> Any:
        """Not possible: an attachment is there, or its calls fail."""
        raise NotImplementedError

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        """Not possible; see `get_state`."""
        raise NotImplementedError

    async def channel_ready(self) -> None:
        """Not possible; see `get_state`."""
        raise NotImplementedError

    async def __aenter__(self) -> "AttachedChannel":
        """Returns the channel."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Gives up the calls that are under way."""
        await self.close()

    async def _start(self, method: str, request: bytes, options: Mapping[str, Any], *, is_unary: bool) -> AttachedCall:
        name = method.rpartition("/")[2]
        try:
            call = await self._open_call(name, request, options.get("timeout"), is_unary=is_unary)
        except AyniError as error:
            raise refused(error) from None
        self._open.add(call)
        return call

    def _end(self, call: AttachedCall) -> None:
        self._open.discard(call)
        call.cancel()


def _unimplemented(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*_: object, **__: object) -> Any:
        raise broken(StatusCode.UNIMPLEMENTED, f"{method} can't be called through an attachment")

    return call
