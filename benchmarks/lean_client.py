"""An HTTP client in a process of its own that costs little: conversations over one connection each, nothing parsed.

    LeanClient.start() -> client
    await client.converse(base_url, keys, questions)    # one session per key, all at once -> Answered

A request has the headers of OpenAI's client. The message of an answer is put into the next request byte by byte, as the
server wrote it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

HEADERS = """\
host: {host}
accept-encoding: gzip, deflate, br
connection: keep-alive
authorization: Bearer {key}
accept: application/json
content-type: application/json
user-agent: AsyncOpenAI/Python 3.52.0
x-stainless-lang: python
x-stainless-package-version: 3.52.0
x-stainless-os: Linux
x-stainless-arch: x64
x-stainless-runtime: CPython
x-stainless-runtime-version: 3.11.7
x-stainless-async: async:asyncio
x-stainless-retry-count: 0
x-stainless-read-timeout: 600
content-length: """
LINE_LIMIT = 1 << 26  # bytes of one exchange with the client's process


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A burst of conversations."""

    seconds: float
    """Wall time."""
    cpu_seconds: float
    """CPU time of the client's process."""


class LeanClient:
    """The client's process, from `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls) -> LeanClient:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe, limit=LINE_LIMIT)
        )

    async def converse(
        self,
        base_url: str,
        *,
        keys: Sequence[str],
        questions: Sequence[Sequence[str]],
        max_tokens: Sequence[Sequence[int]] | None = None,
    ) -> Answered:
        """Hold all conversations at once.

        Args:
            keys: of the sessions.
            questions: for each session the text of its user messages; each is asked after the answer before it.
            max_tokens: for each session and question; None leaves it out.

        Raises:
            RuntimeError: an answer was an error.
        """
        asked = {"base_url": base_url, "keys": keys, "questions": questions, "max_tokens": max_tokens}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        found = json.loads(await self._process.stdout.readline())
        if "error" in found:
            raise RuntimeError(found["error"])
        return Answered(**found)

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Conversation(asyncio.Protocol):
    """One session over one connection; `ended` is set at its end."""

    def __init__(self, *, head: bytes, bodies: Iterator[tuple[bytes, bytes]]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = head
        self._bodies = bodies
        self._messages = b""
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = bytes(self._data).partition(b"\r\n\r\n")
        length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
        if not found or len(body) < int(length):
            return
        self._data.clear()
        if not head.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(f"{head.decode()}\n{body.decode()}"))
        else:
            message = body.partition(b'"message":')[2].partition(b'"logprobs":')[0]
            self._messages += b"," + message.rstrip(b" ,")
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or RuntimeError("the server has closed the connection"))

    def _ask(self) -> None:
        question, rest = next(self._bodies, (b"", b""))
        if not question:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._messages += b"," * bool(self._messages) + question
        body = b'{"messages":[' + self._messages + rest
        self._transport.write(self._head + b"%d\r\n\r\n" % len(body) + body)


def _bodies(questions: Sequence[str], max_tokens: Sequence[int] | None) -> Iterator[tuple[bytes, bytes]]:
    """(user message, end of the body) of each question."""
    for number, question in enumerate(questions):
        fields = {"model": "policy"} | ({"max_tokens": max_tokens[number]} if max_tokens else {})
        yield json.dumps({"role": "user", "content": question}).encode(), b"]," + json.dumps(fields).encode()[1:]


async def _converse(
    base_url: str,
    *,
    keys: Sequence[str],
    questions: Sequence[Sequence[str]],
    max_tokens: Sequence[Sequence[int]] | None,
) -> Answered:
    loop, address = asyncio.get_running_loop(), urlsplit(base_url)
    started, started_cpu = time.perf_counter(), time.process_time()

    async def hold(number: int) -> None:
        headers = HEADERS.format(host=address.netloc, key=keys[number]).replace("\n", "\r\n")
        head = f"POST {address.path}/chat/completions HTTP/1.1\r\n{headers}".encode()
        bodies = _bodies(questions[number], max_tokens[number] if max_tokens else None)
        _, held = await loop.create_connection(
            lambda: Conversation(head=head, bodies=bodies), address.hostname, address.port
        )
        await held.ended

    await asyncio.gather(*map(hold, range(len(keys))))
    return Answered(seconds=time.perf_counter() - started, cpu_seconds=time.process_time() - started_cpu)


def _serve() -> None:
    """Bursts in lines on stdin, results in lines on stdout."""
    import uvloop

    for line in sys.stdin:
        try:
            found = uvloop.run(_converse(**json.loads(line)))
            result = {"seconds": found.seconds, "cpu_seconds": found.cpu_seconds}
        except Exception as error:  # noqa: BLE001 - reported by the other process
            result = {"error": repr(error)}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
