"""Which replica serves a request: the one that served its session before, else the least loaded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from agent_loop.engine import Engine, GenerateRequest
from message_queue.tokens import TokenOutput

MAX_SESSIONS = 65_536  # sessions remembered; a forgotten one is routed anew


class ReplicaRouter:
    """An Engine over several replicas. Sticky per session, so that a turn finds its prefix cache."""

    def __init__(self, replicas: Sequence[Engine]) -> None:
        if not replicas:
            raise ValueError("engine.replicas is 0; a run needs at least one replica")
        self._replicas = replicas
        self._in_flight: Counter[int] = Counter()
        self._home: OrderedDict[str, int] = OrderedDict()

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Decode on the session's replica."""
        chosen = self._choose(request.session)
        self._in_flight[chosen] += 1
        try:
            return await self._replicas[chosen].generate(request)
        finally:
            self._in_flight[chosen] -= 1

    def _choose(self, session: str) -> int:
        if session and session in self._home:
            self._home.move_to_end(session)
            return self._home[session]
        chosen = min(range(len(self._replicas)), key=lambda i: self._in_flight[i])
        if session:
            self._home[session] = chosen
            if len(self._home) > MAX_SESSIONS:
                self._home.popitem(last=False)
        return chosen
