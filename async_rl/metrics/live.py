"""The pages of a living run on a local port: made on request if files of the run have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.files.rollouts import FOLDER

_SHARE = 0.2  # most of the time that is spent on making a page
_LOCAL = ("localhost", "127.0.0.1", "::1")


def serve(directory: Path, pages: Mapping[str, Callable[[], str]], *, host: str, port: int) -> ThreadingHTTPServer:
    """A server of pages; its `serve_forever` runs it.

    If it listens on this machine only, it refuses requests with the name of another host, as a foreign web page in the
    user's browser could send them.

    Args:
        directory: run directory, whose files the pages show.
        pages: path, such as `/report.html`, -> its page; OSError and ValueError are shown in its place.
        port: 0 for any free one.

    Raises:
        OSError: the port is in use.
    """
    # Path -> tag of the files, page, earliest time to renew it.
    made: dict[str, tuple[str, str, float]] = dict.fromkeys(pages, ("", "", 0.0))
    lock = threading.Lock()

    def page(path: str) -> tuple[str, str]:
        with lock:
            tag, text, due = made[path]
            started, newest = time.monotonic(), _tag(directory)
            if tag != newest and started >= due:
                tag, text = newest, pages[path]().replace("<html ", f'<html data-live="{newest}" ', 1)
                ended = time.monotonic()
                made[path] = tag, text, ended + (ended - started) / _SHARE
            return tag, text

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host in _LOCAL and name not in _LOCAL:
                return self._answer(403, "this page is for the machine that serves it; --host allows others")
            if path not in pages:
                status = {"/": 302, "/favicon.ico": 204}.get(path, 404)
                return self._answer(status, "", Location=next(iter(pages)))
            try:
                tag, text = page(path)
            except (OSError, ValueError) as error:
                return self._answer(503, f"{error}")
            known = self.headers.get("If-None-Match") == tag
            return self._answer(304, "") if known else self._answer(200, text, "text/html")

        def _answer(self, status: int, text: str, kind: str = "text/plain", **headers: str) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a page asks every two seconds."""

    return ThreadingHTTPServer((host, port), Handler)


def _tag(directory: Path) -> str:
    """Names, times and sizes of the files that the pages show, as a short text."""
    files = [path for kind in ("*.jsonl", "*.yaml", f"{FOLDER}/*") for path in directory.glob(kind)]
    found = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
    return sha256(repr(found).encode()).hexdigest()[:16]
