"""Stand-ins for tools and rewards that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.loop import Prompt
from agent_loop.reward import Completion


@dataclass(slots=True)
class FakeTool:
    """A Tool that records its calls. `behave` gives the reply or raises; `seconds` is how long it takes."""

    behave: Callable[[Mapping[str, Any]], str] = lambda _arguments: "ok"
    seconds: float = 0.0
    name: str = "tool"
    description: str = "a tool"
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    cancelled: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self.calls.append(arguments)
        self.started.set()
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.behave(arguments)


@dataclass(slots=True)
class FakeReward:
    """A Reward that records the completions that it scored."""

    value: float = 1.0
    seconds: float = 0.0
    error: Exception | None = None
    seen: list[Completion] = field(default_factory=list)

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        self.seen.append(completion)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.value
