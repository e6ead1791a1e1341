"""The task of a simulated run: its chat, a tool and a reward that take their time, and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, RolloutError, TurnLimits
from agent_loop.reward import Completion
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, ToolError, ToolRunner, describe_tool
from async_rl.rollout.task import Task
from message_queue.trajectory import Trajectory

if TYPE_CHECKING:
    from async_rl.simulator.world import World

NO_END_S = 1e6  # longer than any time-out
_session: ContextVar[str] = ContextVar("session", default="")


class SimulatedTask(Task):
    """See `async_rl.rollout.task.Task`, for the methods that a run uses.

    Args:
        options: {"world": the world}.
    """

    def __init__(self, options: Mapping[str, Any], *, seed: int) -> None:
        self._world: World = options["world"]

    def train_prompt(self, index: int) -> Prompt:
        return Prompt(index=index, messages=(Message(role="user", content=f"{index:03d}"),))

    def validation_prompts(self, count: int) -> list[Prompt]:
        return [self.train_prompt(900 + i) for i in range(count)]

    def build_loop(
        self, *, engine: Engine, tokenizer: Tokenizer, sampling: SamplingConfig, limits: TurnLimits, gate: PauseGate
    ) -> _Loop:
        tool = LookupTool(self._world)
        return _Loop(
            ToolUseLoop(
                engine=engine,
                chat=Chat(tokenizer, end_of_turn="<end>", tools=[describe_tool(tool)]),
                tools=ToolRunner([tool], timeout_s=limits.tool_timeout_s, gate=gate),
                reward=ParityReward(self._world),
                limits=limits,
                sampling=sampling,
            )
        )


class _Loop:
    """An agent loop in which a tool can tell whose call it is."""

    def __init__(self, loop: ToolUseLoop) -> None:
        self._loop = loop

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        _session.set(session)
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)


class LookupTool:
    """A Tool without arguments that answers a short word."""

    name = "lookup"
    description = "says a word"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    def __init__(self, world: World) -> None:
        self._world = world

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self._world.tool_called(_session.get())
        await _work(self._world, "tool")
        return "yes"


class ParityReward:
    """1 where the number of letters is odd."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        await _work(self._world, "reward")
        return float(sum(map(len, completion.turns)) % 2)


async def _work(world: World, point: str) -> None:
    """Take the time of a tool or a reward, and fail if it is to fail."""
    kind, seconds = world.fault(point)
    match kind:
        case "tool says no":
            raise ToolError("no")
        case "tool is broken":
            raise RolloutError("the tool is out of order")
        case "reward fails":
            raise ValueError("no such answer")
        case "no end of a tool" | "no end of a reward":
            seconds = NO_END_S
        case _:
            pass
    await asyncio.sleep(world.scenario.tool_s + seconds)
