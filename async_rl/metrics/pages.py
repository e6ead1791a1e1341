"""HTML pages that open from disk: templates with `common.html`, and scripts that hold data and do not run.

`serve` has the pages of a living run on a local port: each is made on request if files of the run have changed.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agent_loop.text import safe_text
from async_rl.files.rollouts import FOLDER

_TEMPLATES = Path(__file__).parent
_SHARE = 0.2  # most of the time that is spent on making a page
_LOCAL = ("localhost", "127.0.0.1", "::1")


def template(name: str) -> str:
    """Text of the template `name`.html, with the shared style and script."""
    common, text = ((_TEMPLATES / f"{each}.html").read_text(encoding="utf-8") for each in ("common", name))
    return text.replace("<!--common-->", common)


def json_script(name: str, value: Any) -> str:
    """A script with JSON, whatever texts it has.

    Raises:
        ValueError: a number is not finite.
    """
    text = safe_text(json.dumps(value, default=str, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>\n'


def packed_script(name: str, data: bytes) -> str:
    """A script with base64 of gzip."""
    coded = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{coded}</script>\n'


async def write_rollouts_page(directory: Path, *, warn: Callable[[str], None]) -> None:
    """Write `rollouts.html` of a run in a process with a low priority, so that the run does not wait for it.

    Args:
        warn: called with a text if the page cannot be written.
    """
    command = ["nice", "-n", "19", sys.executable, "-m", "async_rl.view", str(directory)]
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE, start_new_session=True)
    except OSError as error:
        return warn(f"rollouts.html is not renewed: {error}")
    try:
        _, errors = await process.communicate()
        if process.returncode:
            warn(f"rollouts.html is not renewed: {errors.decode(errors='replace').strip()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


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
