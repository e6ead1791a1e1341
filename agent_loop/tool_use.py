"""Multi-turn tool use: decode a turn, execute its calls, show the replies, until a turn without calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_loop.chat import CHARS_PER_TOKEN, Chat, encoded
from agent_loop.decoder import SegmentDecoder, budget_left, observe_prompt, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Completion, Reward, score_in_time
from agent_loop.tools.state import RolloutTools, ToolSource, open_tools
from agent_loop.tools.tool import (
    MalformedCall,
    ToolCall,
    ToolReply,
    ToolRunner,
    opened_reasoning,
    parse_tool_calls,
    truncate,
)
from message_queue.tokens import Int32Array, StopReason
from message_queue.trajectory import Trajectory, Turn

TOOL_ERRORS = logging.getLogger("agent_loop.tools.tool")


@dataclass(slots=True)
class _Record:
    """Progress of one rollout."""

    texts: list[str] = field(default_factory=list[str])
    """Text of each sampled turn."""
    num_tool_calls: int = 0
    """Calls that were executed or malformed."""
    num_tool_errors: int = 0
    """Calls that failed."""
    num_truncated: int = 0
    """Replies that were cut."""

    def note(self, replies: Sequence[ToolReply], *, shown: Sequence[str]) -> None:
        self.num_tool_calls += len(replies)
        self.num_tool_errors += sum(reply.failed for reply in replies)
        self.num_truncated += sum(reply.text != text for reply, text in zip(replies, shown, strict=True))


class ToolUseLoop:
    """An AgentLoop. Without calls in its first turn, or with `limits.max_turns` 1, it is a single-turn loop.

    A trajectory ends with
        STOP: a turn without tool calls, or one that ended with another stop token than end-of-turn;
        LENGTH: the turn was cut off, or the tool reply leaves no room to answer (it is not appended then);
        TOOL_CALL: the calls of the last allowed turn are not executed.

    Calls in the reasoning of a turn are text. Replies are cut before they are tokenized: to
    `limits.max_tool_reply_chars`, and together to 8 characters for each token that is left.

    `Trajectory.info` has
        turns: model calls;
        tool_calls: calls that were executed or malformed;
        tool_errors: calls that failed;
        truncated_replies: replies that were cut;
        aborts: decodes that were resumed;
        refused_answers: answers of the engine that were refused, each retried;
        reward/NAME: parts of the reward.
    For a rollout that was restored after a restart, tool_errors, truncated_replies, aborts and refused_answers count
    from the restart on.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        tools: ToolRunner,
        reward: Reward,
        limits: TurnLimits,
        sampling: SamplingConfig,
        tool_sources: Sequence[ToolSource] = (),
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._tools = tools
        self._tool_sources = tuple(tool_sources)
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
        record = self._so_far(trajectory)
        timeout_s = self._limits.tool_timeout_s
        async with open_tools(self._tools, self._tool_sources, prompt, timeout_s=timeout_s) as tools:
            await self._rebuild(tools, trajectory)
            stop_reason = await self._turns(trajectory, decoder, record, tools, prompt=prompt)
            completion = Completion(
                turns=tuple(record.texts),
                stop_reason=stop_reason,
                num_tokens=trajectory.num_sampled,
                messages=self._messages(prompt, trajectory, record.texts),
            )
            score = await score_in_time(
                self._reward, prompt, completion=completion, timeout_s=self._limits.reward_timeout_s
            )
        info = {
            "turns": float(len(record.texts)),
            "tool_calls": float(record.num_tool_calls),
            "tool_errors": float(record.num_tool_errors),
            "truncated_replies": float(record.num_truncated),
            "aborts": float(decoder.num_aborts),
            "refused_answers": float(decoder.num_refused),
            **{f"reward/{name}": value for name, value in score.parts.items()},
        }
        trajectory.close(stop_reason=stop_reason, reward=score.value, info=info)

    def _so_far(self, trajectory: Trajectory) -> _Record:
        """Progress before the last turn, as far as the tokens show."""
        record = _Record([self._chat.text(sampled_tokens(turn)) for turn in trajectory.turns[:-1]])
        record.num_tool_calls = sum(len(parse_tool_calls(self._said(turn))) for turn in trajectory.turns[:-1])
        return record

    def _said(self, turn: Turn) -> str:
        """Text of a sampled turn, with the `<think>` that its prompt opened."""
        before = self._chat.decode(turn.observation[-16:])  # tokens that hold it and white space
        return opened_reasoning(before) + self._chat.text(sampled_tokens(turn))

    def _messages(self, prompt: Prompt, trajectory: Trajectory, texts: Sequence[str]) -> tuple[Message, ...]:
        """The conversation, read from the tokens, so that it is the same after a restart."""
        messages = [*prompt.messages, Message(role="assistant", content=texts[0])]
        for before, turn, text in zip(trajectory.turns, trajectory.turns[1:], texts[1:], strict=False):
            replies = self._chat.reply_texts(turn.observation, count=len(parse_tool_calls(self._said(before))))
            messages += [Message(role="tool", content=reply) for reply in replies]
            messages.append(Message(role="assistant", content=text))
        return tuple(messages)

    async def _rebuild(self, tools: RolloutTools, trajectory: Trajectory) -> None:
        """Give the tools of a rollout that is resumed the state that they had."""
        *before, last = map(self._said, trajectory.turns)
        await tools.rebuild(before, unsure=last if trajectory.unsure_call is not None else "")

    async def _call(
        self, tools: RolloutTools, calls: Sequence[ToolCall | MalformedCall], trajectory: Trajectory
    ) -> list[ToolReply]:
        """Make the calls of the last turn, unless they were started before a restart."""
        if trajectory.unsure_call is not None:
            trajectory.unsure_call = None
            return await tools.run_interrupted(calls)
        names = [call.name for call in calls if isinstance(call, ToolCall)]
        if names:
            await trajectory.start_call(", ".join(names))
        return await tools.run(calls)

    async def _turns(
        self,
        trajectory: Trajectory,
        decoder: SegmentDecoder,
        record: _Record,
        tools: RolloutTools,
        *,
        prompt: Prompt,
    ) -> StopReason:
        while True:
            budget = budget_left(trajectory, self._limits)
            stop_reason = await decoder.decode(trajectory, max_new_tokens=budget)
            turn = sampled_tokens(trajectory.turns[-1])
            record.texts.append(self._chat.text(turn))
            if stop_reason is StopReason.LENGTH:
                return StopReason.LENGTH
            calls = parse_tool_calls(self._said(trajectory.turns[-1]))
            if not calls or (stop_reason is StopReason.STOP and not self._chat.finished(turn)):
                return StopReason.STOP
            if len(record.texts) == self._limits.max_turns:
                return StopReason.TOOL_CALL
            replies = await self._call(tools, calls, trajectory)
            room = self._limits.max_tokens - len(trajectory)
            shown, observation = await self._shown(replies, after=turn, room=room)
            record.note(replies, shown=shown)
            for reply in replies:
                if reply.error is not None:
                    fields = {"kind": reply.error.kind, "line": reply.error.line}
                    text = "in a rollout of prompt %d, the tool %s"
                    TOOL_ERRORS.warning(text, prompt.index, reply.error.text, extra=fields)
            if self._limits.turn_budget(len(trajectory) + len(observation)) < 1:
                return StopReason.LENGTH
            trajectory.observe(observation)

    async def _shown(
        self, replies: Sequence[ToolReply], *, after: Int32Array, room: int
    ) -> tuple[list[str], Int32Array]:
        """Texts of replies as the model sees them, cut to what may fit into `room` tokens, and their tokens."""
        left, most, shown = CHARS_PER_TOKEN * room, self._limits.max_tool_reply_chars, list[str]()
        for reply in replies:
            shown.append(truncate(reply.text, max_chars=left if most is None else min(left, most)))
            left = max(0, left - len(shown[-1]))
        messages = [Message(role="tool", content=text) for text in shown]
        return shown, await encoded(functools.partial(self._chat.reply, after=after), messages)
