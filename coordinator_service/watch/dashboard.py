"""The page, its stream of views, /metrics, /healthz and the buttons, over HTTP.  [shell]

On the coordinator's own event loop, beside the run: what it may take of it is bounded here and in `feed`.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from importlib.resources import files

from aiohttp import hdrs, web

from coordinator_service.watch.exposition import Exposition
from coordinator_service.watch.feed import Feed
from coordinator_service.watch.gate import Gate
from coordinator_service.watch.operator import Answer, Operator

_WRITE_S = 10.0
"""How long a reader may take for one view."""
_MOST_BODY_BYTES = 4096
_HEADERS = {
    hdrs.CACHE_CONTROL: "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NO_TOKEN = "this needs the run's join token, as header Authorization: Bearer TOKEN"
_NOT_HERE = "ask for this page as localhost or 127.0.0.1, or give the run's join token"

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """Answers browsers and scrapers."""

    def __init__(self, gate: Gate, view: Callable[[], bytes], feed: Feed, metrics: Exposition) -> None:
        """Shows a run to those whom the gate lets see it.

        Args:
            gate: knows who may do what.
            view: returns the view of now as JSON.
            feed: streams the same.
            metrics: shows it to scrapers.
        """
        self._gate = gate
        self._view = view
        self._feed = feed
        self._metrics = metrics
        self._page = files("coordinator_service.watch").joinpath("page.html").read_text()
        self._policy = _policy(self._page)

    def application(self, operator: Operator, state: Callable[[], str]) -> web.Application:
        """Returns the routes; buttons act through the operator, and `state` is that of the run."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.on_response_prepare.append(_add_headers)

        async def health(_: web.Request) -> web.Response:
            now = state()
            return web.json_response({"state": now}, status=503 if now == "halted" else 200)

        async def checkpoint(_: web.Request) -> web.Response:
            return _answered(operator.checkpoint())

        async def drain(request: web.Request) -> web.Response:
            return _answered(operator.drain(int(request.match_info["worker_id"])))

        app.router.add_get("/", self._show_page)
        app.router.add_get("/healthz", health)
        app.router.add_get("/view.json", self._reading(self._show_view), allow_head=False)
        app.router.add_get("/events", self._reading(self._stream), allow_head=False)
        app.router.add_get("/metrics", self._reading(self._show_metrics), allow_head=False)
        app.router.add_post("/checkpoint", self._acting(checkpoint))
        app.router.add_post(r"/workers/{worker_id:\d{1,9}}/drain", self._acting(drain))
        return app

    def _reading(self, answer: Answering) -> Answering:
        async def checked(request: web.Request) -> web.StreamResponse:
            given = request.headers.get(hdrs.AUTHORIZATION, "")
            if self._gate.may_read(given, request.headers.get(hdrs.HOST, "")):
                return await answer(request)
            return _refused(_NOT_HERE if self._gate.is_loopback and not given else _NO_TOKEN)

        return checked

    def _acting(self, answer: Answering) -> Answering:
        async def checked(request: web.Request) -> web.StreamResponse:
            if self._gate.may_act(request.headers.get(hdrs.AUTHORIZATION, "")):
                return await answer(request)
            return _refused(_NO_TOKEN)

        return checked

    async def _show_page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._policy, "X-Frame-Options": "DENY"}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _show_view(self, _: web.Request) -> web.Response:
        return web.Response(body=self._view(), content_type="application/json")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.encoded(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._feed.is_full:
            return web.json_response({"sentence": "as many others look already as may"}, status=503)
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "text/event-stream"})
        await response.prepare(request)
        async with aclosing(self._feed.views()) as views:
            async for view in views:
                try:
                    async with asyncio.timeout(_WRITE_S):
                        await response.write(b"data: " + view + b"\n\n")
                except (TimeoutError, ConnectionError):
                    break
        # Whoever took nothing for so long would keep what is buffered for it.
        if request.transport:
            request.transport.abort()
        return response


def encode(view: object) -> bytes:
    """Returns plain values as JSON on one line."""
    return json.dumps(view, separators=(",", ":"), allow_nan=False).encode()


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


def _answered(answer: Answer) -> web.Response:
    return web.json_response({"sentence": answer.sentence}, status=200 if answer.is_done else 409)


def _refused(sentence: str) -> web.Response:
    return web.json_response({"sentence": sentence}, status=401, headers={"WWW-Authenticate": "Bearer"})


def _policy(page: str) -> str:
    """Returns the content security policy under which the page's own style and script run, and nothing else."""
    style, script = (f"{name}-src {_hashes(page, tag)}" for name, tag in (("style", "style"), ("script", "script")))
    others = "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {style}; {script}; {others}"


def _hashes(page: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
