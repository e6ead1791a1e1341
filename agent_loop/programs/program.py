"""A rollout by an agent program. The program calls the model over HTTP and is trained unchanged.

    async def agent(prompt, access):
        client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)
        answer = await client.chat.completions.create(model=access.model, messages=[...])
        return 1.0 if prompt.target["answer"] in answer.choices[0].message.content else 0.0

The program sees one slow answer where new weights, aborts or the death of a replica interrupt it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

from agent_loop.boundary import boundary, call_function
from agent_loop.chat import Chat
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Prompt, TurnLimits, openai_message
from agent_loop.programs.conversation import ModelAccess, RequestError
from agent_loop.programs.endpoint.host import Sessions
from agent_loop.programs.session import AgentSession, TurnReader
from agent_loop.reward import Completion, Reward, Score, number_or_nan, score_in_time
from agent_loop.single_turn import TurnLoop
from agent_loop.text import shown
from agent_loop.user_errors import describe_error
from message_queue.errors import OvertimeError, RolloutError, StateLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory

MAX_END = 500  # bytes of the output of a program that are read, from its end
Program = Callable[[Prompt, ModelAccess], Any]
"""Runs one rollout; in a thread if it is not `async`.

Returns the reward, a mapping agent -> reward, or None if the session or the task gives it."""


async def external(prompt: Prompt, model: ModelAccess) -> None:
    """Stands for an agent outside of the run that opens the session with `POST /sessions` and ends it."""
    raise NotImplementedError("a session is offered to agents outside of the run, and no program runs")


def command(*arguments: str) -> Program:
    """A program in a separate process, such as `command("python", "agent.py")`.

    It reads the prompt from its standard input, `{"messages": [{"role": ..., "content": ...}], "target": {...}}`. The
    clients of OpenAI and Anthropic find base URL and key in its environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`); `MODEL` is the name of the model. If the last line of its output is a
    number, that is the reward. All that the process started ends with it.

    Args:
        arguments: path or name of the program, and its arguments.
    """

    async def run(prompt: Prompt, access: ModelAccess) -> float | None:
        url, key = access.base_url, access.api_key
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        messages = [openai_message(message) for message in prompt.messages]
        with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:  # pipes have other holders
            given.write(json.dumps({"messages": messages, "target": dict(prompt.target)}).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=given,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env=os.environ | variables | {"MODEL": access.model},
            )
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if code != 0:
                raise RuntimeError(f"{arguments[0]} ended with exit code {code}: {_end(errors, MAX_END).strip()}")
            try:
                return float(_end(output, MAX_END).removesuffix("\n").rpartition("\n")[2])
            except ValueError:
                return None

    return run


def _end(file: IO[bytes], count: int) -> str:
    """The last bytes of a file that a process may still write to."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), count, max(0, size - count)).decode(errors="replace")


class ProgramLoop(TurnLoop):
    """An AgentLoop that runs a program.

    The reward is what the program returns, else what was reported to the session (the sum over agents), else that of
    `reward`. One number is the reward of each agent.

    `Trajectory.info` also has
        paths: conversations that the calls made;
        retries: retries that got the answer of their first call;
        reward/NAME: parts of the reward, or what was reported for each agent.

    A rollout that is resumed after a restart starts over: the state of its program is gone.

    Args:
        program: runs one rollout; `external` for agents outside of the run.
        gateway: serves the model calls.
        read: reads sampled turns.
        reward: the task's reward; None if the program or the session gives each reward.
        agents: name of each agent -> whether it is trained; see `async_rl.rollout.task.Task`.
    """

    def __init__(
        self,
        *,
        program: Program,
        gateway: Sessions,
        engine: Engine,
        chat: Chat,
        read: TurnReader,
        reward: Reward | None,
        limits: TurnLimits,
        sampling: SamplingConfig,
        agents: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(engine=engine, chat=chat, limits=limits, sampling=sampling)
        self._agents = agents or {}
        self._program = program
        self._gateway = gateway
        self._read = read
        self._reward = reward

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill and close `trajectory`; see AgentLoop.run."""
        if trajectory.turns:
            raise StateLostError("the agent program ended with its process, and cannot continue in the middle")
        calls = AgentSession(
            trajectory,
            engine=self._engine,
            chat=self._chat,
            read=self._read,
            limits=self._limits,
            sampling=self._sampling,
            agents=self._agents,
            name=session,
            cache_salt=cache_salt,
        )
        async with self._gateway.serve(calls) as access:
            returned = await self._result(prompt, access, calls)
        if calls.stop_reason is None:
            raise RolloutError(f"the agent program of prompt {prompt.index} made no model call")
        stop_reason = StopReason.LENGTH if calls.is_full else calls.stop_reason
        reported = self._reported(prompt, returned, calls)
        score = await self._score(prompt, reported, calls, stop_reason)
        rewards = self._by_agent(prompt, trajectory, reported or {"": score.value}) if self._agents else None
        info = {
            "paths": float(len(trajectory.paths)),
            **{name: float(count) for name, count in calls.counts.items()},
            **{f"reward/{name}": value for name, value in score.parts.items()},
        }
        trajectory.close(stop_reason=stop_reason, reward=score.value, info=info, rewards=rewards)

    async def _result(self, prompt: Prompt, access: ModelAccess, calls: AgentSession) -> Any:
        """What the program returns; None if it failed because the limits of the rollout left it no call."""
        if self._program is external:
            await self._gateway.offer(calls, prompt)
            work: Callable[[], Awaitable[Any]] = calls.ended.wait
        else:
            work = partial(call_function, partial(self._program, prompt, access), {})
        name, limit_s = f"the agent program of prompt {prompt.index}", self._limits.agent_timeout_s
        running = asyncio.create_task(boundary(work, name=name, timeout_s=limit_s))
        failed = asyncio.create_task(calls.failed.wait())
        try:
            await asyncio.wait((running, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
        if calls.failure is not None:
            raise calls.failure
        try:
            returned = await running
            return None if self._program is external else returned
        except RolloutError:
            raise
        except OvertimeError as error:
            raise RolloutError(f"{name} did not end in {limit_s:g} s (rollout.limits.agent_timeout_s)") from error
        except Exception as error:
            if calls.is_full:
                return None  # a program may raise when its conversation is cut off
            raise RolloutError(f"{name} failed: {describe_error(error)}") from error

    def _reported(self, prompt: Prompt, returned: Any, calls: AgentSession) -> Mapping[str, float]:
        """What the program returned, else what was reported to the session; keys as in `AgentSession.rewards`."""
        try:
            reported = calls.rewards if returned is None else calls.named(returned)
        except RequestError as error:
            raise RolloutError(f"the agent program of prompt {prompt.index} returned a {error}") from error
        numbers = {agent: number_or_nan(value) for agent, value in reported.items()}
        for agent, number in numbers.items():
            if not math.isfinite(number):
                found = shown(reported[agent])
                raise RolloutError(f"the reward of prompt {prompt.index} is {found}; rewards are finite numbers")
        return numbers

    async def _score(
        self, prompt: Prompt, reported: Mapping[str, float], calls: AgentSession, stop_reason: StopReason
    ) -> Score:
        """The reward of the whole rollout; its parts are what was reported for each agent, or those of the task."""
        if reported:
            parts = {agent: value for agent, value in (calls.rewards | dict(reported)).items() if agent}
            return Score(float(sum(reported.values())), parts)
        if self._reward is None:
            raise RolloutError(
                f"the rollout of prompt {prompt.index} has no reward; return it from the program, report it to the "
                "session, or give Task(rewards=...)"
            )
        completion = Completion(turns=(calls.messages[-1].content,), stop_reason=stop_reason, messages=calls.messages)
        return await score_in_time(self._reward, prompt, completion=completion, timeout_s=self._limits.reward_timeout_s)

    def _by_agent(self, prompt: Prompt, trajectory: Trajectory, reported: Mapping[str, float]) -> dict[str, float]:
        """Reward of each trained agent that made a call. RolloutError: there is none, or one has no reward."""
        called = {part.path.agent for part in trajectory.sequence_parts()}
        trained = [agent for agent in sorted(called) if self._agents.get(agent, True)]
        if not trained:
            raise RolloutError(
                f"the rollout of prompt {prompt.index} has calls of {', '.join(sorted(called))} only, which the task "
                "does not train (Task.agents)"
            )
        for agent in trained:
            if agent not in reported and "" not in reported:
                raise RolloutError(f"the rollout of prompt {prompt.index} has no reward for agent {agent!r}")
        return {agent: reported[agent if agent in reported else ""] for agent in trained}
