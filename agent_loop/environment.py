"""Multi-turn rollouts in an environment that answers each turn with messages and a reward.

    class Guess:
        repeatable = True                            the same turns in a new object make the same messages and rewards
        def reset(self, secret: int): ...            optional; `secret` is a column of the prompt's row
        def step(self, text: str) -> Step: ...       text of a turn -> messages, reward, done
        def close(self): ...                         optional; called however the rollout ends

    prompt ──> Guess() ──> reset ──> turn ──> step ──> turn ──> step ──> ... done ──> close

    Task(prompts=[{"prompt": "Guess a number.", "secret": 7}], environment=Guess)

The reward of the trajectory is the sum over its steps: 0.2, 0.0 and 1.0 give 1.2. Each method may be `async`; any other
runs in a thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.boundary import UserClass, UserObject
from agent_loop.chat import CHARS_PER_TOKEN, Chat, encoded
from agent_loop.decoder import SegmentDecoder, observe_prompt, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Score, number_or_nan
from agent_loop.single_turn import TurnLoop
from agent_loop.tools.tool import PauseGate
from message_queue.errors import RolloutError, StateLostError
from message_queue.tokens import Int32Array, StopReason
from message_queue.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Answer of an environment to one turn."""

    messages: Sequence[Message] = ()
    """Messages that the model sees before its next turn; not shown if the rollout is done."""
    reward: float = 0.0
    """Reward of this turn, a finite number."""
    done: bool = False
    """Whether the rollout ends."""


class EnvironmentClass(UserClass):
    """A class of environments; each rollout makes one.

    Args:
        factory: see `agent_loop.boundary.UserClass`. `reset` returns the opening conversation, or None for that of the
            prompt.

    Raises:
        ValueError: it has no `step`, or a `reset` with parameters that are no names.
    """

    def __init__(self, factory: Callable[[], object]) -> None:
        super().__init__(factory, kind="environment", opening="reset")
        if not isinstance(self.made, type) or not callable(getattr(self.made, "step", None)):
            raise ValueError(f"environment is {factory!r}; give a class with a method step(text)")


class EnvironmentLoop(TurnLoop):
    """An AgentLoop: the turns of a model and the steps of an environment.

    A trajectory ends with
        STOP: the environment is done, or the turn ended with another stop token than end-of-turn;
        LENGTH: a turn was cut off, which is no step; or the environment is not done after `limits.max_turns`, or its
            messages leave no room for a turn, as do more than 8 characters for each token that is left.

    A rollout that is resumed repeats its complete turns in a new environment; this is possible only if
    the environment is repeatable or no turn has been answered.

    `Trajectory.info` also has
        done: 1 if the environment ended the rollout, else 0.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        environment: EnvironmentClass,
        limits: TurnLimits,
        sampling: SamplingConfig,
        gate: PauseGate | None = None,
    ) -> None:
        super().__init__(engine=engine, chat=chat, limits=limits, sampling=sampling)
        chat.check_role("user")
        self._environment = environment
        self._gate = gate or PauseGate()

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill and close `trajectory`; see AgentLoop.run."""
        decoder = self._decoder(session, cache_salt)
        name = self._environment.name
        if len(trajectory.turns) > 1 and not (self._environment.repeatable or trajectory.closed):
            raise StateLostError(f"the state of environment {name} is gone, and its class is not repeatable")
        rewards = list[float]()
        async with self._environment.new(prompt, timeout_s=self._limits.tool_timeout_s) as (environment, messages):
            token_ids = await encoded(self._chat.prompt, messages or prompt.messages)
            if trajectory.turns and not np.array_equal(trajectory.turns[0].observation, token_ids):
                raise StateLostError(f"environment {name} opened with other messages than before the restart")
            observe_prompt(trajectory, token_ids, index=prompt.index, limits=self._limits)
            await self._repeat(environment, trajectory, rewards)
            stop_reason, done = await self._turns(trajectory, decoder, environment, rewards)
        score = Score(sum(rewards, 0.0))
        self._close(trajectory, decoder, stop_reason=stop_reason, score=score, done=done)

    async def _step(self, environment: UserObject, turn: Int32Array, rewards: list[float]) -> Step:
        """The answer to a turn; its reward is appended.

        Raises:
            RolloutError: it failed, took too long, or is no Step with a finite reward.
        """
        step = await environment.call("step", {"text": self._chat.text(turn)})
        rewards.append(number_or_nan(step.reward) if isinstance(step, Step) else math.nan)
        if not math.isfinite(rewards[-1]):
            name = self._environment.name
            raise RolloutError(f"step of {name} returned {step!r}; return a Step with a finite reward")
        return step

    async def _repeat(self, environment: UserObject, trajectory: Trajectory, rewards: list[float]) -> None:
        """Repeat the steps of a rollout that is resumed."""
        for turn, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            sampled = sampled_tokens(turn)
            step = await self._step(environment, sampled, rewards)
            observation = await self._observation(step, after=sampled, room=self._limits.max_tokens)
            if step.done or observation is None or not np.array_equal(observation, after.observation):
                raise StateLostError(
                    f"environment {self._environment.name} says that it is repeatable, and answered a turn in another "
                    "way than before the restart"
                )

    async def _turns(
        self, trajectory: Trajectory, decoder: SegmentDecoder, environment: UserObject, rewards: list[float]
    ) -> tuple[StopReason, bool]:
        """Why the trajectory ends, and whether the environment is done."""
        while True:
            stop_reason, turn = await self._decode(decoder, trajectory)
            if stop_reason is StopReason.LENGTH:
                return StopReason.LENGTH, False
            await self._gate.passed()
            step = await self._step(environment, turn, rewards)
            if step.done or not self._chat.ends_turn(turn):
                return StopReason.STOP, step.done
            if len(trajectory.turns) == self._limits.max_turns:
                return StopReason.LENGTH, False
            observation = await self._observation(step, after=turn, room=self._limits.max_tokens - len(trajectory))
            if observation is None or self._limits.turn_budget(len(trajectory) + len(observation)) < 1:
                return StopReason.LENGTH, False
            trajectory.observe(observation)

    async def _observation(self, step: Step, *, after: Int32Array, room: int) -> Int32Array | None:
        """int32 [n]: tokens of a step's messages; None if they are too long for `room` tokens."""
        if sum(len(message.content) for message in step.messages) > CHARS_PER_TOKEN * room:
            return None
        return await encoded(functools.partial(self._chat.reply, after=after), step.messages)
