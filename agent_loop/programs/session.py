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
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from agent_loop.chat import CHARS_PER_TOKEN, Chat
from agent_loop.decoder import FindStop, SegmentDecoder, budget_left, sampled_tokens
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import Message, ToolUse, TurnLimits
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, Finish, TokenAnswer, TokenRequest
from agent_loop.timeline import now, record
from message_queue.errors import ChatTemplateError, EngineError, RolloutError
from message_queue.tokens import Int32Array, StopReason
from message_queue.trajectory import POLICY, Trajectory, Turn

T = TypeVar("T")


class SessionEnded(Exception):
    """The session has ended; no call is served any more."""


class SessionFailed(Exception):
    """The rollout failed; the call has no answer."""


class CallRefused(Exception):
    """The call cannot be served as it is; the text says why."""


class ContextFull(CallRefused):
    """The conversation leaves no token to sample.

    Args:
        prompt_tokens: tokens of the conversation; an eighth of the characters of a text that is not tokenized.
        max_tokens: bound on them and the answer.
    """

    def __init__(self, *, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"the conversation has {prompt_tokens} tokens and rollout.limits.max_tokens is {max_tokens}; shorten it"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


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


@dataclass(slots=True)
class SessionCounts:
    """Figures of a session."""

    calls: int = 0
    """Answered model calls."""
    retries: int = 0
    """Retries of a client that got the answer of their first call."""
    aborts: int = 0
    """Decodes that were resumed."""
    refused: int = 0
    """Answers of the engine that broke the contract, each retried."""


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
        counts: figures so far.
        rewards: agent -> its reward; "" is that of all agents without one.
        messages: conversation of the newest answer, that answer included; of a call with tokens only the answer.
        stop_reason: end of the newest answer; None before the first.
        is_full: whether a call was refused because the limits of the rollout leave none.
        ended: set when no call is served any more.
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
        self.counts = SessionCounts()
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
        self._failed = asyncio.Event()
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

    # ---- calls

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Sample an answer, across all interruptions. A retry gets the answer of its first call.

        The call is finished even if the caller is cancelled, so that a retry finds its answer.

        Raises:
            SessionEnded: the session has ended, or ends before the answer.
            SessionFailed: the rollout failed.
            CallRefused: the call cannot be served; nothing is changed.
        """
        chat = self._chat_of(request)
        conversation = self._conversation_keys(request, chat)
        key = _key(conversation[-1].hex(), str(request.max_tokens), *request.stop)
        answer = await self._once(
            _key("call", request.idempotency_key) if request.idempotency_key else key,
            is_retry=request.is_retry or request.idempotency_key is not None,
            make=lambda: self._answer(request, chat, conversation),
        )
        return _chat_answer(answer)

    async def generate(self, request: TokenRequest) -> TokenAnswer:
        """Sample tokens after a prompt of tokens. It attaches to the longest run of whole turns that it starts with.

        Raises:
            SessionEnded, SessionFailed, CallRefused: see `answer`.
        """
        tokens = np.asarray(request.token_ids, np.int32)
        agent = self._agent_of(request)
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
        key = _key("tokens", agent, digest, str(request.max_tokens), str(request.stop_token_ids))
        answer = await self._once(
            _key("call", request.idempotency_key) if request.idempotency_key else key,
            is_retry=request.is_retry or request.idempotency_key is not None,
            make=lambda: self._generate(request, agent, tokens),
        )
        return _token_answer(answer, request)

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt of a call.

        Raises:
            CallRefused: the call cannot be served.
        """
        chat = self._chat_of(request)
        return self._place(request, chat, self._conversation_keys(request, chat)).length

    def reward(self, value: float | Mapping[str, float]) -> None:
        """Set the reward of the agents without a separate one, or that of each named agent; a later one replaces it.

        Raises:
            SessionEnded: the session has ended.
            CallRefused: there is no such agent.
        """
        self._require_open()
        self.rewards |= self.named(value)

    def named(self, value: float | Mapping[str, float]) -> Mapping[str, float]:
        """Rewards as in `rewards`.

        Raises:
            CallRefused: there is no such agent.
        """
        if not isinstance(value, Mapping):
            return {"": value}
        for agent in value:
            if self._declared and agent not in self.agents:
                raise CallRefused(f"reward is of agent {agent!r}; the agents are {', '.join(self.agents)}")
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

    async def until_failed(self) -> None:
        """Return when the session has its `failure`."""
        await self._failed.wait()

    # ---- inside

    def _require_open(self) -> None:
        if self.ended.is_set():
            raise SessionEnded(f"session {self.name} has ended")
        if self.failure is not None:
            raise SessionFailed(f"session {self.name} failed")

    async def _once(self, key: bytes, *, is_retry: bool, make: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Answer a call, or join the one that it repeats."""
        self._require_open()
        if is_retry and key in self._recorded:
            self.counts.retries += 1
            return self._recorded[key]
        task = self._in_flight.get(key) if is_retry else None
        if task is None:
            self._record_own_time()
            task = self._in_flight[key] = asyncio.create_task(make(), context=self._context)
            self._running.add(task)
            task.add_done_callback(lambda ended: self._settle(key, ended))
        else:
            self.counts.retries += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SessionEnded(f"session {self.name} has ended") from None
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
        agent = self._agent_of(request)
        try:
            place = self._place(request, chat, conversation)
        except ContextFull:
            self.is_full = True
            raise
        path, reason = await self._decode(place, agent, max_tokens=request.max_tokens, find_stop=chat.find_stop)
        message, stop_text = self._said(path, reason, chat, request.stop)
        answer = self._finished(path, reason, message, stop_text)
        said = _message_key(message)
        self._sampled[said] = answer
        if reason is not StopReason.LENGTH:
            self._answers[_after(conversation[-1], said)] = answer
        self.messages = (*request.messages, message)
        return answer

    async def _generate(self, request: TokenRequest, agent: str, tokens: Int32Array) -> _Answer:
        place = self._token_place(agent, tokens)
        path, reason = await self._decode(place, agent, max_tokens=request.max_tokens, stop_ids=request.stop_token_ids)
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
        self,
        place: _Place,
        agent: str,
        *,
        max_tokens: int | None,
        stop_ids: tuple[int, ...] = (),
        find_stop: FindStop | None = None,
    ) -> tuple[Trajectory, StopReason]:
        """Open a turn and sample it, as the last one of the path that is returned.

        Raises:
            CallRefused: it leaves no token to sample, or the session has no call left; nothing is changed.
            SessionFailed: the rollout failed.
        """
        held = place.length
        self.is_full |= self._num_calls == self._limits.max_turns or self._limits.turn_budget(held) < 1
        if self._num_calls == self._limits.max_turns:
            raise CallRefused(
                f"the session has made {self._num_calls} model calls, and rollout.limits.max_turns is "
                f"{self._limits.max_turns}; end it"
            )
        if self._limits.turn_budget(held) < 1:
            raise ContextFull(prompt_tokens=held, max_tokens=self._limits.max_tokens)
        call, self._num_calls = self._num_calls, self._num_calls + 1
        path = self._path(place.before, agent)
        path.observe(place.observation)
        decoder = SegmentDecoder(
            self._engine,
            sampling=self._sampling,
            stop_token_ids=(*self._chat.stop_token_ids, *stop_ids),
            session=self.name if not path.path else f"{self.name}-p{path.path}",  # rows that a path forces are its own
            cache_salt=self._cache_salt,
            limits=self._limits,
            find_stop=find_stop,
            call=call,
        )
        budget = budget_left(path, self._limits)
        try:
            reason = await decoder.decode(path, max_new_tokens=min(budget, max_tokens or budget))
        except (EngineError, RolloutError) as error:
            self.failure = self.failure or error
            self._failed.set()
            raise SessionFailed(f"session {self.name} failed") from error
        finally:
            self.counts.aborts += decoder.num_aborts
            self.counts.refused += decoder.num_refused
        self.counts.calls += 1
        self.stop_reason = reason
        return path, reason

    def _agent_of(self, request: ChatRequest | TokenRequest) -> str:
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
            raise CallRefused(str(error)) from error

    def _place(self, request: ChatRequest, chat: Chat, conversation: Sequence[bytes]) -> _Place:
        """Where a call attaches.

        Raises:
            CallRefused: the last message is the assistant's, or the chat template refuses the conversation.
            ContextFull: the new messages have more than 8 characters for each token of the limit; none is tokenized.
        """
        if request.messages[-1].role == "assistant":
            raise CallRefused("the last message is of the assistant; a sampled turn cannot be started by the agent")
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
            raise CallRefused(str(error)) from error
        except Exception as error:  # a template is foreign code, and raises what it likes
            raise CallRefused(f"the chat template refuses the conversation: {error}") from error

    def _conversation_keys(self, request: ChatRequest, chat: Chat) -> list[bytes]:
        """Key of the conversation without messages, then after each message."""
        keys = [_key(self._agent_of(request), chat.tools_key)]
        for message in request.messages:
            keys.append(_after(keys[-1], _message_key(message)))
        return keys

    def _token_place(self, agent: str, tokens: Int32Array) -> _Place:
        """Where a prompt of tokens attaches: to the longest path up to an answer that it starts with."""
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


def _chat_answer(answer: _Answer) -> ChatAnswer:
    tokens = sampled_tokens(answer.turn)
    finish: Finish = "tool_calls" if answer.message.tool_calls else "stop"
    return ChatAnswer(
        message=answer.message,
        finish="length" if answer.reason is StopReason.LENGTH else finish,
        stop_text=answer.stop_text,
        prompt_tokens=answer.length - len(tokens),
        cached_tokens=answer.length - len(tokens) - len(answer.turn.observation),
        completion_tokens=len(tokens),
        token_ids=tuple(tokens.tolist()),
        logprobs=_logprobs(answer.turn),
    )


def _token_answer(answer: _Answer, request: TokenRequest) -> TokenAnswer:
    tokens = sampled_tokens(answer.turn)
    last = int(tokens[-1])
    return TokenAnswer(
        token_ids=tuple(tokens.tolist()),
        logprobs=_logprobs(answer.turn),
        finish="length" if answer.reason is StopReason.LENGTH else "stop",
        stop_token_id=last if last in request.stop_token_ids else None,
        cached_tokens=answer.length - len(tokens) - len(answer.turn.observation),
    )


def _logprobs(turn: Turn) -> tuple[float, ...]:
    return tuple(value for segment in turn.segments for value in segment.logprobs.tolist())


def _before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string."""
    found = min(((text.find(stop) + len(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0] - len(found[1])], found[1])


# ---- keys


def _after(conversation: bytes, message: bytes) -> bytes:
    """Key of a conversation with one more message."""
    return _key(conversation.hex(), message.hex())


def _message_key(message: Message) -> bytes:
    calls = [(call.name, _canonical(call.arguments)) for call in message.tool_calls]
    fields = (message.role, message.content, message.reasoning or "", message.name or "")
    return _key(*fields, json.dumps(calls) if calls else "")


def _canonical(arguments: str) -> str:
    """Equal for texts of equal JSON values."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _key(*parts: str) -> bytes:
    """Hash of texts; different lists of texts have different hashes."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
