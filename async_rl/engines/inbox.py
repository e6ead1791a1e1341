"""Requests and results of a replica in bulk: a call across processes costs more than many a decode step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agent_loop.engine import Engine, EngineError, GenerateRequest
from message_queue.tokens import TokenOutput

Answer = list[TokenOutput] | EngineError


class RequestInbox:
    """Runs what is submitted and keeps every answer until it is collected. Lives on one event loop.

    Args:
        engine: decodes; what it raises is an answer too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: list[tuple[str, Answer]] = []
        self._some = asyncio.Event()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start to decode; ids are unique among all that runs."""
        for request in requests:
            self._running[request.request_id] = asyncio.create_task(self._run(request))

    async def collect(self, *, timeout_s: float) -> list[tuple[str, Answer]]:
        """(request id, answer) of everything that ended since the last call, as soon as there is one; each only once.

        Empty after `timeout_s` without one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._some.wait()
        except TimeoutError:
            return []
        await asyncio.sleep(0)  # what ended in the same engine step joins in
        self._some.clear()
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Abort these in the engine and forget them; they get no answer unless it stands already."""
        for request_id in request_ids:
            task = self._running.get(request_id)
            if task is not None:
                task.cancel()

    async def _run(self, request: GenerateRequest) -> None:
        try:
            answer: Answer = await self._engine.generate(request)
        except EngineError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - any failure belongs to the caller of this one request
            answer = EngineError(f"request {request.request_id}: {type(error).__name__}: {error}")
        finally:
            del self._running[request.request_id]
        self._answers.append((request.request_id, answer))
        self._some.set()
