"""The model calls of one agent program, as paths of one trajectory. Sampled tokens are never retokenized.

A call has the whole conversation. It attaches to the deepest answer that its conversation starts with, and the messages
after that answer become the observation of a new turn:

    call                                            path    turn    shared with path 0
    user A                          -> answer 1     0       0
    user A, answer 1, user B        -> answer 2     0       1
    user A, answer 1, user C        -> answer 3     1       1       turn 0
    user A, changed answer, user B  -> answer 4     2       0       nothing
    system S, user A                -> answer 5     3       0       nothing

Two messages are equal if role, text, reasoning, author and calls are; arguments of calls are compared as JSON values,
and ids of calls are not compared. An answer that a limit cut is not extended; its tokens become context of another
path. An answer of this session in a conversation that was rewritten around it keeps its sampled tokens, as context. A
call attaches to answers of the same agent only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import copy_context
from typing import Any, Literal, NamedTuple

import numpy as np

from agent_loop.chat import CHARS_PER_TOKEN, Chat
from agent_loop.decoder import FindStop, SegmentDecoder, budget_left, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, ToolUse, TurnLimits
from agent_loop.programs.conversation import (
    ChatAnswer,
    ChatRequest,
    ContextFull,
    Finish,
    ModelRequest,
    RequestError,
    SessionEnded,
    SessionFailed,
    TokenRequest,
)
from agent_loop.timeline import now, record
from message_queue.errors import ChatTemplateError, EngineError, RolloutError
from message_queue.tokens import Int32Array, StopReason
from message_queue.trajectory import POLICY, Trajectory, Turn


class ReadTurn(NamedTuple):
    """A sampled turn as the agent sees it."""

    content: str
    """Text without reasoning and calls."""
    reasoning: str | None
    """Reasoning before the text; None if there is none."""
    calls: tuple[tuple[str, str], ...]
    """(name of the tool, JSON text of the arguments object) of each well-formed call."""


TurnReader = Callable[[Int32Array, Int32Array], ReadTurn]
"""Reads a turn: sampled tokens [n] and the observation [m] before them."""


class _Answer(NamedTuple):
    """A finished answer."""

    path: Trajectory
    """Path that sampled it."""
    turns: int
    """Turns of the path up to the answer, included."""
    length: int
    """Tokens of the path up to the answer, included."""
    reason: StopReason
    """Why it ended: STOP, TOOL_CALL or LENGTH."""
    message: Message
    """The answer in the words of the agent."""
    stop_text: str | None = None
    """See `agent_loop.programs.conversation.ChatAnswer`."""

    @property
    def turn(self) -> Turn:
        return self.path.turns[self.turns - 1]

    @property
    def said(self) -> ChatAnswer:
        """The answer, for the agent."""
        tokens = sampled_tokens(self.turn)
        finish: Finish = "tool_calls" if self.message.tool_calls else "stop"
        return ChatAnswer(
            message=self.message,
            finish="length" if self.reason is StopReason.LENGTH else finish,
            stop_text=self.stop_text,
            prompt_tokens=self.length - len(tokens),
            cached_tokens=self.length - len(tokens) - len(self.turn.observation),
            token_ids=tuple(tokens.tolist()),
            logprobs=tuple(value for segment in self.turn.segments for value in segment.logprobs.tolist()),
        )


class _Place(NamedTuple):
    """Place of a call in the tree."""

    before: _Answer | None
    """Answer that the call continues; None if it starts a path."""
    observation: Int32Array
    """int32 [n], tokens of the turn that no policy sampled."""

    @property
    def length(self) -> int:
        """Tokens of the path up to the start of the answer."""
        return len(self.observation) + (0 if self.before is None else self.before.length)


class AgentSession:
    """One rollout of an agent program.

    Args:
        trajectory: an empty one; the session adds its paths and does not close it.
        chat: the task's chat; tools and stop strings come with each call.
        read: reads sampled turns.
        agents: names of the agents; a call with another name is of the agent `POLICY`. Rewards may have other names
            only if there are none.
        name: rollout name, unique in the run, without "#".
        cache_salt: see `agent_loop.loop.AgentLoop.run`.

    Attributes:
        agents: names that calls and rewards may have.
        counts: figures so far: turns, retries, aborts and refused_answers of `Trajectory.info`.
        rewards: agent -> its reward; "" is that of all agents without one.
        messages: conversation of the newest answer, that answer included; of a call with tokens only the answer.
        stop_reason: end of the newest answer; None before the first.
        is_full: whether a call was refused because the limits of the rollout leave none.
        ended: set when no call is served any more.
        failed: set with `failure`.
        failure: error of a rollout that cannot be finished; None if there is none.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        engine: Engine,
        chat: Chat,
        read: TurnReader,
        limits: TurnLimits,
        sampling: SamplingConfig,
        agents: Collection[str] = (),
        name: str,
        cache_salt: str,
    ) -> None:
        self.name = name
        self.agents = tuple(sorted({*agents, POLICY}))
        self.counts = Counter(turns=0, retries=0, aborts=0, refused_answers=0)
        self.rewards: dict[str, float] = {}
        self.messages: tuple[Message, ...] = ()
        self.stop_reason: StopReason | None = None
        self.failure: EngineError | RolloutError | None = None
        self._trajectory = trajectory
        self._engine = engine
        self._chat = chat
        self._read = read
        self._limits = limits
        self._sampling = sampling
        self._declared = frozenset(agents)
        self._cache_salt = cache_salt
        self._context = copy_context()  # of the rollout; a call comes in that of the server
        self._own_time_since = now()  # time without a call in flight
        self.is_full = False
        self.ended = asyncio.Event()
        self.failed = asyncio.Event()
        self._num_calls = 0
        self._running = set[asyncio.Task[_Answer]]()
        self._in_flight: dict[bytes, asyncio.Task[_Answer]] = {}
        """Key of a call -> the newest of its running tasks, for retries."""
        self._answers: dict[bytes, _Answer] = {}
        """Key of a conversation that ends with an answer -> that answer, if it may be extended."""
        self._extendable: list[_Answer] = []
        """All answers that may be extended, those to tokens too."""
        self._sampled: dict[bytes, _Answer] = {}
        """Key of an answer's message -> the newest such answer."""
        self._recorded: dict[bytes, _Answer] = {}
        """Key of a call -> its answer, for retries."""

    @property
    def status(self) -> Literal["open", "ended", "failed"]:
        """Whether calls are served, or why not."""
        if self.failure is not None:
            return "failed"
        return "ended" if self.ended.is_set() else "open"

    # ---- calls

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Sample an answer, across all interruptions. A retry gets the answer of its first call.

        The call is finished even if the caller is cancelled, so that a retry finds its answer.

        Raises:
            SessionEnded: the session has ended, or ends before the answer.
            SessionFailed: the rollout failed.
            RequestError: the call cannot be served; nothing is changed.
        """
        chat = self._chat_of(request)
        conversation = self._conversation_keys(request, chat)
        key = _key(conversation[-1], request.max_tokens, request.stop)
        return await self._once(request, key, lambda: self._answer(request, chat, conversation))

    async def generate(self, request: TokenRequest) -> ChatAnswer:
        """Sample tokens after a prompt of tokens. It attaches to the longest run of whole turns that it starts with.

        Raises:
            SessionEnded, SessionFailed, RequestError: see `answer`.
        """
        key = _key(self._agent_of(request), request.token_ids, request.max_tokens, request.stop_token_ids)
        return await self._once(request, key, lambda: self._generate(request))

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt of a call.

        Raises:
            RequestError: the call cannot be served.
        """
        chat = self._chat_of(request)
        return self._place(request, chat, self._conversation_keys(request, chat)).length

    def reward(self, value: float | Mapping[str, float]) -> None:
        """Set the reward of the agents without a separate one, or that of each named agent; a later one replaces it.

        Raises:
            SessionEnded: the session has ended.
            RequestError: there is no such agent.
        """
        self._require_open()
        self.rewards |= self.named(value)

    def named(self, value: float | Mapping[str, float]) -> Mapping[str, float]:
        """Rewards as in `rewards`.

        Raises:
            RequestError: there is no such agent.
        """
        if not isinstance(value, Mapping):
            return {"": value}
        for agent in value:
            if self._declared and agent not in self.agents:
                raise RequestError(f"reward is of agent {agent!r}; the agents are {', '.join(self.agents)}")
        return value

    def end(self) -> None:
        """End the session; calls in flight end with SessionEnded. Idempotent."""
        if not self.ended.is_set():
            self._record_own_time()
        self.ended.set()
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """End the session, and return when none of its calls is in flight."""
        self.end()
        if self._running:
            await asyncio.wait(list(self._running))

    # ---- inside

    def _require_open(self) -> None:
        if self.ended.is_set():
            raise SessionEnded(self.name)
        if self.failure is not None:
            raise SessionFailed(f"session {self.name} failed")

    async def _once(
        self, request: ModelRequest, key: bytes, make: Callable[[], Coroutine[Any, Any, _Answer]]
    ) -> ChatAnswer:
        """Answer a call, or join the one that it repeats; `key` is equal for equal requests."""
        self._require_open()
        key = _key("call", request.idempotency_key) if request.idempotency_key else key
        is_retry = request.is_retry or request.idempotency_key is not None
        is_known = is_retry and (key in self._recorded or key in self._in_flight)
        self.counts["retries"] += is_known
        if is_known and key in self._recorded:
            return self._recorded[key].said
        if not is_known:
            self._record_own_time()
            self._in_flight[key] = asyncio.create_task(make(), context=self._context)
            self._running.add(self._in_flight[key])
            self._in_flight[key].add_done_callback(lambda ended: self._settle(key, ended))
        task = self._in_flight[key]
        try:
            return (await asyncio.shield(task)).said
        except asyncio.CancelledError:
            if task.cancelled():
                raise SessionEnded(self.name) from None
            raise

    def _record_own_time(self) -> None:
        """Record the time that the program did not wait for the model, if it ends now."""
        if not self._running:
            self._context.run(record, "tool", self._own_time_since, name="program")

    def _settle(self, key: bytes, task: asyncio.Task[_Answer]) -> None:
        self._running.discard(task)
        self._own_time_since = now()
        if self._in_flight.get(key) is task:
            del self._in_flight[key]
        if not task.cancelled() and task.exception() is None:
            self._recorded[key] = task.result()

    async def _answer(self, request: ChatRequest, chat: Chat, conversation: Sequence[bytes]) -> _Answer:
        try:
            place = self._place(request, chat, conversation)
        except ContextFull:
            self.is_full = True
            raise
        path, reason = await self._decode(request, place, find_stop=chat.find_stop)
        message, stop_text = self._said(path, reason, chat, request.stop)
        answer = self._finished(path, reason, message, stop_text)
        said = _message_key(message)
        self._sampled[said] = answer
        if reason is not StopReason.LENGTH:
            self._answers[_key(conversation[-1], said)] = answer
        self.messages = (*request.messages, message)
        return answer

    async def _generate(self, request: TokenRequest) -> _Answer:
        path, reason = await self._decode(request, self._token_place(request))
        message = Message(role="assistant", content=self._chat.text(sampled_tokens(path.turns[-1])))
        self.messages = (message,)
        return self._finished(path, reason, message)

    def _finished(
        self, path: Trajectory, reason: StopReason, message: Message, stop_text: str | None = None
    ) -> _Answer:
        answer = _Answer(path, len(path.turns), len(path), reason, message, stop_text)
        if reason is not StopReason.LENGTH:
            self._extendable.append(answer)
        return answer

    async def _decode(
        self, request: ModelRequest, place: _Place, *, find_stop: FindStop | None = None
    ) -> tuple[Trajectory, StopReason]:
        """Open a turn and sample it, as the last one of the path that is returned. Refused calls change nothing."""
        held = place.length
        self.is_full |= self._num_calls == self._limits.max_turns or self._limits.turn_budget(held) < 1
        if self._num_calls == self._limits.max_turns:
            raise RequestError(
                f"the session has made {self._num_calls} model calls, and rollout.limits.max_turns is "
                f"{self._limits.max_turns}; end it"
            )
        if self._limits.turn_budget(held) < 1:
            raise ContextFull(prompt_tokens=held, max_tokens=self._limits.max_tokens)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        path = self._path(place.before, self._agent_of(request))
        path.observe(place.observation)
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=(*self._chat.stop_token_ids, *request.stop_token_ids),
            session=self.name if not path.path else f"{self.name}-p{path.path}",  # rows that a path forces are its own
            cache_salt=self._cache_salt,
            limits=self._limits,
            find_stop=find_stop,
            call=call,
        )
        budget = budget_left(path, self._limits)
        try:
            reason = await decoder.decode(path, max_new_tokens=min(budget, request.max_tokens or budget))
        except (EngineError, RolloutError) as error:
            self.failure = self.failure or error
            self.failed.set()
            raise SessionFailed(f"session {self.name} failed") from error
        finally:
            self.counts["aborts"] += decoder.num_aborts
            self.counts["refused_answers"] += decoder.num_refused
        self.counts["turns"] += 1
        self.stop_reason = reason
        return path, reason

    def _agent_of(self, request: ModelRequest) -> str:
        return request.agent if request.agent in self._declared else POLICY

    def _path(self, before: _Answer | None, agent: str) -> Trajectory:
        """The path that a call continues: that of the answer if it ends there, else a new one."""
        if before is None:
            path = self._trajectory.fork(turns=0) if self._trajectory.turns else self._trajectory
            path.agent = agent
            return path
        return before.path if len(before.path.turns) == before.turns else before.path.fork(turns=before.turns)

    def _chat_of(self, request: ChatRequest) -> Chat:
        try:
            return self._chat.variant(tools=request.tools, stop_strings=request.stop)
        except ChatTemplateError as error:
            raise RequestError(str(error)) from error

    def _place(self, request: ChatRequest, chat: Chat, conversation: Sequence[bytes]) -> _Place:
        """Where a call attaches. A text of more than 8 characters for each token of the limit is not tokenized."""
        if request.messages[-1].role == "assistant":
            raise RequestError("the last message is of the assistant; a sampled turn cannot be started by the agent")
        held = range(len(request.messages), 0, -1)
        known = next((count for count in held if conversation[count] in self._answers), 0)
        rest = request.messages[known:]
        least = sum(len(message.content) for message in rest) // CHARS_PER_TOKEN
        if least > self._limits.max_tokens:
            raise ContextFull(prompt_tokens=least, max_tokens=self._limits.max_tokens)
        found = ((i, self._sampled.get(_message_key(m))) for i, m in enumerate(rest) if m.role == "assistant")
        sampled = {i: sampled_tokens(answer.turn) for i, answer in found if answer is not None}
        try:
            if not known:
                return _Place(None, chat.prompt(rest, sampled=sampled))
            before = self._answers[conversation[known]]
            return _Place(before, chat.reply(rest, after=sampled_tokens(before.turn), sampled=sampled))
        except ChatTemplateError as error:
            raise RequestError(str(error)) from error
        except Exception as error:  # a template is foreign code, and raises what it likes
            raise RequestError(f"the chat template refuses the conversation: {error}") from error

    def _conversation_keys(self, request: ChatRequest, chat: Chat) -> list[bytes]:
        """Key of the conversation without messages, then after each message."""
        keys = [_key(self._agent_of(request), chat.tools_key)]
        for message in request.messages:
            keys.append(_key(keys[-1], _message_key(message)))
        return keys

    def _token_place(self, request: TokenRequest) -> _Place:
        """Where a prompt of tokens attaches: to the longest path up to an answer that it starts with."""
        tokens, agent = np.asarray(request.token_ids, np.int32), self._agent_of(request)
        of_agent = [answer for answer in self._extendable[::-1] if answer.path.agent == agent]  # newest first
        for before in sorted(of_agent, key=lambda answer: answer.length, reverse=True):
            if np.array_equal(before.path.token_ids()[: before.length], tokens[: before.length]):
                return _Place(before, tokens[before.length :])
        return _Place(None, tokens)

    def _said(
        self, path: Trajectory, reason: StopReason, chat: Chat, stops: Sequence[str]
    ) -> tuple[Message, str | None]:
        """The last turn of a path as the agent sees it, and the stop string that ended it."""
        turn = path.turns[-1]
        tokens = sampled_tokens(turn)
        has_end = int(tokens[-1]) in self._chat.stop_token_ids
        read = self._read(tokens[:-1] if has_end else tokens, turn.observation)
        content, stop_text = read.content, None
        if reason is StopReason.STOP and not chat.ends_turn(tokens):
            content, stop_text = _before_stop(read.content, stops)
        number = self._trajectory.paths.index(path) if read.calls else 0
        calls = tuple(
            ToolUse(id=f"call_{number}_{len(path.turns)}_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(read.calls)
        )
        return Message(role="assistant", content=content, reasoning=read.reasoning, tool_calls=calls), stop_text


def _before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string."""
    found = min(((text.find(stop) + len(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0] - len(found[1])], found[1])


# ---- keys


def _message_key(message: Message) -> bytes:
    calls = [(call.name, _canonical(call.arguments)) for call in message.tool_calls]
    return _key(message.role, message.content, message.reasoning or "", message.name or "", calls)


def _canonical(arguments: str) -> str:
    """Equal for texts of equal JSON values."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _key(*parts: object) -> bytes:
    """Hash of texts, numbers and keys; different ones have different hashes."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
