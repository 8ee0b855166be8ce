"""A few endpoints of a Hugging Face hub on loopback, as its client asks for files."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Hub:
    """What it has: contents by repository path, "datasets/owner/name" or "owner/name", revision and file."""

    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Requests, as "GET path"."""
    cut: set[str] = field(default_factory=set)
    """Files whose answers end early."""
    endpoint: str = ""

    def commit(self, repository: str, revision: str) -> str:
        """Another one when a file of the revision changes."""
        kept = [
            content for (where, which, _), content in self.files.items() if (where, which) == (repository, revision)
        ]
        return f"{sum(map(sum, kept)):040x}"


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            content = self._answer()
            name = self.path.rpartition("/")[2]
            self.wfile.write(content[: len(content) // 2] if name in found.cut else content)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> bytes:
            found.asked.append(f"{self.command} {self.path}")
            repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            content = found.files.get((repository, unquote(revision), unquote(file)))
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("X-Repo-Commit", found.commit(repository, unquote(revision)))
                self.send_header("ETag", f'"{sum(content):040x}"')
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("Connection", "close")
            self.close_connection = True
            self.end_headers()
            return content or b""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
