"""Multi-turn tool use: decode a turn, execute its calls, show the replies, until a turn without calls."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence

from agent_loop.chat import CHARS_PER_TOKEN, Chat, encoded
from agent_loop.decoder import SegmentDecoder, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from agent_loop.reward import Reward
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tools.functions import ToolSource, open_tools
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


class ToolUseLoop(SingleTurnLoop):
    """An AgentLoop. Without calls in its first turn, or with `limits.max_turns` 1, it is a single-turn loop.

    A trajectory ends with
        STOP: a turn without tool calls, or one that ended with another stop token than end-of-turn;
        LENGTH: the turn was cut off, or the tool reply leaves no room to answer (it is not appended then);
        TOOL_CALL: the calls of the last allowed turn are not executed.

    Calls in the reasoning of a turn are text. Replies are cut before they are tokenized: to
    `limits.max_tool_reply_chars`, and together to 8 characters for each token that is left.

    `Trajectory.info` also has
        tool_calls: calls that were executed or malformed;
        tool_errors: calls that failed;
        truncated_replies: replies that were cut.
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
        super().__init__(engine=engine, chat=chat, reward=reward, limits=limits, sampling=sampling)
        self._tools = tools
        self._tool_sources = tuple(tool_sources)

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill and close `trajectory`; see AgentLoop.run."""
        decoder = self._decoder(session, cache_salt)
        await self._observe_prompt(prompt, trajectory)
        counts = Counter(tool_calls=0, tool_errors=0, truncated_replies=0)
        for turn in trajectory.turns[:-1]:  # as far as the tokens show
            counts["tool_calls"] += len(parse_tool_calls(self._said(turn)))
        timeout_s = self._limits.tool_timeout_s
        async with open_tools(self._tools, self._tool_sources, prompt, timeout_s=timeout_s) as tools:
            *before, last = map(self._said, trajectory.turns)
            await tools.rebuild(before, unsure=last if trajectory.unsure_call is not None else "")
            stop_reason = await self._turns(trajectory, decoder, counts, tools, prompt=prompt)
            score = await self._score(prompt, trajectory, stop_reason, self._messages(prompt, trajectory))
        self._close(trajectory, decoder, stop_reason=stop_reason, score=score, **counts)

    def _said(self, turn: Turn) -> str:
        """Text of a sampled turn, with the `<think>` that its prompt opened."""
        before = self._chat.decode(turn.observation[-16:])  # tokens that hold it and white space
        return opened_reasoning(before) + self._chat.text(sampled_tokens(turn))

    def _messages(self, prompt: Prompt, trajectory: Trajectory) -> list[Message]:
        """The conversation, read from the tokens, so that it is the same after a restart."""
        messages = list(prompt.messages)
        for before, turn in zip((None, *trajectory.turns), trajectory.turns, strict=False):
            if before is not None:
                replies = self._chat.reply_texts(turn.observation, count=len(parse_tool_calls(self._said(before))))
                messages += [Message(role="tool", content=reply) for reply in replies]
            messages.append(Message(role="assistant", content=self._chat.text(sampled_tokens(turn))))
        return messages

    async def _call(
        self, tools: ToolRunner, calls: Sequence[ToolCall | MalformedCall], trajectory: Trajectory
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
        counts: Counter[str],
        tools: ToolRunner,
        *,
        prompt: Prompt,
    ) -> StopReason:
        while True:
            stop_reason, turn = await self._decode(decoder, trajectory)
            if stop_reason is StopReason.LENGTH:
                return StopReason.LENGTH
            calls = parse_tool_calls(self._said(trajectory.turns[-1]))
            if not calls or (stop_reason is StopReason.STOP and not self._chat.ends_turn(turn)):
                return StopReason.STOP
            if len(trajectory.turns) == self._limits.max_turns:
                return StopReason.TOOL_CALL
            replies = await self._call(tools, calls, trajectory)
            room = self._limits.max_tokens - len(trajectory)
            shown, observation = await self._shown(replies, after=turn, room=room)
            counts["tool_calls"] += len(replies)
            counts["tool_errors"] += sum(reply.failed for reply in replies)
            counts["truncated_replies"] += sum(r.text != text for r, text in zip(replies, shown, strict=True))
            for error in [reply.error for reply in replies if reply.error is not None]:
                text = "in a rollout of prompt %d, the tool %s"
                TOOL_ERRORS.warning(text, prompt.index, error.text, extra={"kind": error.kind, "line": error.line})
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
