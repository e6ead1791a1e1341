"""Single turn: decode one answer and score it."""

from __future__ import annotations

from agent_loop.chat import Chat, encoded
from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Completion, Reward, score_in_time
from message_queue.trajectory import Trajectory


class SingleTurnLoop:
    """An AgentLoop of one turn; it reads no tool calls. Trajectory.info: turns, aborts, refused_answers."""

    def __init__(
        self, *, engine: Engine, chat: Chat, reward: Reward, limits: TurnLimits, sampling: SamplingConfig
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._reward = reward
        self._limits = limits
        self._sampling = sampling

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill and close `trajectory`; see AgentLoop.run."""
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=self._chat.stop_token_ids,
            session=session,
            cache_salt=cache_salt,
            limits=self._limits,
            find_stop=self._chat.find_stop,
        )
        keeps_date = self._chat.is_dated and trajectory.turns
        token_ids = trajectory.turns[0].observation if keeps_date else await encoded(self._chat.prompt, prompt.messages)
        observe_prompt(trajectory, token_ids, index=prompt.index, limits=self._limits)
        stop_reason = await decoder.decode(trajectory, max_new_tokens=budget_left(trajectory, self._limits))
        text = self._chat.text(sampled_tokens(trajectory.turns[-1]))
        score = await score_in_time(
            self._reward,
            prompt,
            completion=Completion(
                turns=(text,),
                stop_reason=stop_reason,
                num_tokens=trajectory.num_sampled,
                messages=(*prompt.messages, Message(role="assistant", content=text)),
            ),
            timeout_s=self._limits.reward_timeout_s,
        )
        info = {
            "turns": 1.0,
            "aborts": float(decoder.num_aborts),
            "refused_answers": float(decoder.num_refused),
            **{f"reward/{name}": value for name, value in score.parts.items()},
        }
        trajectory.close(stop_reason=stop_reason, reward=score.value, info=info)
