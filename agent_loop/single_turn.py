"""Single turn: decode one answer and score it; and the parts of a loop that others share."""

from __future__ import annotations

from collections.abc import Sequence

from agent_loop.chat import Chat, encoded
from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Completion, Reward, Score, score_in_time
from message_queue.tokens import Int32Array, StopReason
from message_queue.trajectory import Trajectory


class TurnLoop:
    """Parts of an AgentLoop that decodes turns one after the other.

    `Trajectory.info` has at least
        turns: model calls;
        aborts: decodes that were resumed;
        refused_answers: answers of the engine that were refused, each retried;
        reward/NAME: parts of the reward.
    """

    def __init__(self, *, engine: Engine, chat: Chat, limits: TurnLimits, sampling: SamplingConfig) -> None:
        self._engine = engine
        self._chat = chat
        self._limits = limits
        self._sampling = sampling

    def _decoder(self, session: str, cache_salt: str) -> SegmentDecoder:
        return SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=self._chat.stop_token_ids,
            session=session,
            cache_salt=cache_salt,
            limits=self._limits,
        )

    async def _observe_prompt(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Open the trajectory; one that was started on another day keeps the date of its prompt."""
        keeps_date = self._chat.is_dated and trajectory.turns
        token_ids = trajectory.turns[0].observation if keeps_date else await encoded(self._chat.prompt, prompt.messages)
        observe_prompt(trajectory, token_ids, index=prompt.index, limits=self._limits)

    async def _decode(self, decoder: SegmentDecoder, trajectory: Trajectory) -> tuple[StopReason, Int32Array]:
        """Decode the last turn; returns why it ended, and its tokens."""
        stop_reason = await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, self._limits))
        return stop_reason, sampled_tokens(trajectory.turns[-1])

    def _close(
        self, trajectory: Trajectory, decoder: SegmentDecoder, *, stop_reason: StopReason, score: Score, **counts: float
    ) -> None:
        """Close the trajectory; `counts` are further entries of its info."""
        info = {
            "turns": float(len(trajectory.turns)),
            **{name: float(count) for name, count in counts.items()},
            "aborts": float(decoder.num_aborts),
            "refused_answers": float(decoder.num_refused),
            **{f"reward/{name}": value for name, value in score.parts.items()},
        }
        trajectory.close(stop_reason=stop_reason, reward=score.value, info=info)


class SingleTurnLoop(TurnLoop):
    """An AgentLoop of one turn; it reads no tool calls."""

    def __init__(
        self, *, engine: Engine, chat: Chat, reward: Reward, limits: TurnLimits, sampling: SamplingConfig
    ) -> None:
        super().__init__(engine=engine, chat=chat, limits=limits, sampling=sampling)
        self._reward = reward

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill and close `trajectory`; see AgentLoop.run."""
        decoder = self._decoder(session, cache_salt)
        await self._observe_prompt(prompt, trajectory)
        stop_reason, turn = await self._decode(decoder, trajectory)
        answer = Message(role="assistant", content=self._chat.text(turn))
        score = await self._score(prompt, trajectory, stop_reason, (*prompt.messages, answer))
        self._close(trajectory, decoder, stop_reason=stop_reason, score=score)

    async def _score(
        self, prompt: Prompt, trajectory: Trajectory, stop_reason: StopReason, messages: Sequence[Message]
    ) -> Score:
        """The score of a rollout; `messages` are those of the prompt and all that followed."""
        answers = [message for message in messages[len(prompt.messages) :] if message.role == "assistant"]
        completion = Completion(
            turns=tuple(message.content for message in answers),
            stop_reason=stop_reason,
            num_tokens=trajectory.num_sampled,
            messages=tuple(messages),
        )
        return await score_in_time(self._reward, prompt, completion=completion, timeout_s=self._limits.reward_timeout_s)
