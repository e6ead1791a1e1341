"""The task of a simulated run: its chat, a tool and a reward that take their time, and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_loop.boundary import call_function
from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, Message, Prompt, TurnLimits
from agent_loop.programs.program import external
from agent_loop.reward import Completion
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.tool import PauseGate, ToolRunner, describe_tool
from async_rl.rollout.task import Task
from async_rl.simulator.agents import WatchedLoop, program, session_name
from message_queue.errors import RolloutError, ToolError

if TYPE_CHECKING:
    from async_rl.simulator.world import World

NO_END_S = 1e6  # longer than any time-out


class SimulatedTask(Task):
    """See `async_rl.rollout.task.Task`, for the methods that a run uses.

    Args:
        options: {"world": the world}.
    """

    def __init__(self, options: Mapping[str, Any], *, seed: int) -> None:
        self._world: World = options["world"]
        self.reward = self._parity = ParityReward(self._world)
        match self._world.scenario.agent:
            case "program":
                self.program = partial(program, self._world)
            case "external":
                self.program = external
            case None:
                pass

    def train_prompt(self, index: int) -> Prompt:
        return Prompt(index=index, messages=(Message(role="user", content=f"{index:03d}"),))

    def validation_prompts(self, count: int) -> list[Prompt]:
        return [self.train_prompt(900 + i) for i in range(count)]

    def chat(self, tokenizer: Tokenizer) -> Chat:
        return Chat(tokenizer, end_of_turn="<end>")

    def build_loop(
        self, *, engine: Engine, tokenizer: Tokenizer, sampling: SamplingConfig, limits: TurnLimits, gate: PauseGate
    ) -> AgentLoop:
        tool = LookupTool(self._world)
        loop = ToolUseLoop(
            engine=engine,
            chat=Chat(tokenizer, end_of_turn="<end>", tools=[describe_tool(tool)]),
            tools=ToolRunner([tool], timeout_s=limits.tool_timeout_s, gate=gate),
            reward=self._parity,
            limits=limits,
            sampling=sampling,
        )
        return WatchedLoop(loop, self._world)


class LookupTool:
    """A Tool without arguments that answers a short word."""

    name = "lookup"
    description = "says a word"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    def __init__(self, world: World) -> None:
        self._world = world

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self._world.tool_called(session_name.get())
        await _work(self._world, "tool")
        return "yes"


class ParityReward:
    """1 where the number of letters is odd."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        await _work(self._world, "reward")
        value = float(sum(map(len, completion.turns)) % 2)
        self._world.oracle.rewarded(session_name.get(), value)
        return value


async def _work(world: World, point: str) -> None:
    """Take the time of a tool or a reward, and fail if it is to fail."""
    kind, seconds = world.fault(point)
    match kind:
        case "tool says no":
            raise ToolError("n\udc00")
        case "tool is broken":
            raise RolloutError("the tool is out of order")
        case "reward fails":
            raise ValueError("no such answer")
        case "no end of a tool" | "no end of a reward":
            seconds = NO_END_S
        case "tool lets out a cancel" | "reward lets out a cancel":
            raise asyncio.CancelledError("of an inner scope")
        case _:
            pass
    seconds += world.scenario.tool_s
    await (call_function(world.block, {"seconds": seconds}) if world.scenario.blocks else asyncio.sleep(seconds))
