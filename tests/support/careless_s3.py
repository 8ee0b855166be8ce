"""An S3 server that takes conditional writes and ignores the conditions, as some do."""

import contextlib
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    minds: frozenset[str]
    """Conditions that are kept after all."""

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        before = self.objects.get(self.path)
        if "If-None-Match" in self.minds and self.headers["If-None-Match"] and before is not None:
            return self._answer(412)
        self.objects[self.path] = data
        self._answer(200, etag=_etag(data))

    def do_GET(self) -> None:
        data = self.objects.get(self.path)
        self._answer(404) if data is None else self._answer(200, data, _etag(data))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self, status: int, data: bytes = b"", etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 06:57:20 GMT")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


@contextlib.contextmanager
def careless_s3(*minds: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields the endpoint and what is stored there."""
    objects: dict[str, bytes] = {}
    handler = type("Handler", (_Handler,), {"objects": objects, "minds": frozenset(minds)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", objects
        finally:
            server.shutdown()
            thread.join()
