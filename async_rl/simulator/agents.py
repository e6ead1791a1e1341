"""Agent programs of a simulated run: random calls to the real sessions, in a rollout worker or from outside.

An agent continues its conversation, rewrites it, asks sub-agents, makes calls side by side, repeats calls, and may
fail. What it asked and was answered is noted by the oracle.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from agent_loop.engine import GenerateRequest
from agent_loop.loop import AgentLoop, Message, Prompt
from agent_loop.programs.conversation import (
    ChatAnswer,
    ChatRequest,
    EndpointError,
    ModelAccess,
    NoRolloutWaiting,
    RequestError,
    TokenRequest,
)
from agent_loop.programs.endpoint.config import EndpointConfig
from agent_loop.programs.endpoint.host import OpenedSession, Sessions
from agent_loop.programs.session import AgentSession
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.simulator.processes import Process, current_process
from async_rl.simulator.trajectory_checks import AgentCall
from async_rl.simulator.violations import require
from message_queue.tokens import TokenOutput
from message_queue.trajectory import POLICY, Trajectory

if TYPE_CHECKING:
    from async_rl.simulator.world import World

T = TypeVar("T")
EXTERNAL = 8  # agents outside of a run
CLIENT_S = 250.0  # a client waits for an answer at most; longer than rollout.limits.generate_timeout_s
END_S = 20.0  # an agent that has made its calls ends its session in less
NO_END_S = 1e6  # longer than any time-out
LETTERS = "abcdefgh"

session_name: ContextVar[str] = ContextVar("session", default="")
"""Session of the rollout whose code runs."""


class Endpoint:
    """Where a worker serves its sessions, in place of a server; see `agent_loop.programs.endpoint.server.serve`."""

    def __init__(self, world: World, host: Sessions, *, run_key: str, config: EndpointConfig) -> None:
        process = current_process()
        assert process is not None
        self._world = world
        self._host = host
        self.process: Process = process
        self.url = f"http://{process.process_name}"

    async def __aenter__(self) -> str:
        self._world.endpoints[self.url] = self
        return self.url

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._world.endpoints.get(self.url) is self:
            del self._world.endpoints[self.url]

    async def post(self, act: Callable[[Sessions], Coroutine[Any, Any, T]]) -> T:
        """The answer of the worker to a request.

        Raises:
            EndpointError: the request is refused.
            ConnectionError: the worker is dead, silent, or dies meanwhile.
        """
        try:
            async with asyncio.timeout(CLIENT_S):
                return await self.process.request(lambda: act(self._host))
        except TimeoutError:
            raise ConnectionError("no answer") from None


@dataclass(slots=True, eq=False)
class Agent:
    """One rollout. Its methods raise EndpointError and ConnectionError of the calls."""

    world: World
    session: str
    """Name of the session."""
    endpoint: Endpoint
    key: str
    """Of the session."""
    history: list[Message]
    """Conversation whose last message is not answered."""
    chance: random.Random

    async def run(self) -> float | None:
        """Make some calls; returns the reward, or None if it is reported to the session or the task gives it.

        Raises:
            RuntimeError: the agent fails.
        """
        kind, seconds = self.world.fault("agent")
        await asyncio.sleep(seconds)
        if kind != "agent makes no call":
            try:
                await self._converse()
            except RequestError:  # the limits of the rollout leave no call
                if self.chance.random() < 0.3:
                    raise
        match kind:
            case "agent fails":
                raise RuntimeError("the agent is out of order")
            case "agent lets out a cancel":
                raise asyncio.CancelledError("of an inner scope")
            case "agent never ends":
                await asyncio.sleep(NO_END_S)
            case _:
                pass
        await self._leave()
        return await self._reward()

    async def post(self, act: Callable[[AgentSession], Coroutine[Any, Any, T]]) -> T:
        """Make a request with the key of the session."""

        async def with_key(host: Sessions) -> T:
            session = host.session_of(self.key)
            if session is None:
                raise RequestError("the key is not valid")
            return await act(session)

        return await self.endpoint.post(with_key)

    async def _converse(self) -> None:
        acts = (self._go_on, self._go_on, self._edit, self._compact, self._ask_sub_agent, self._ask_twice)
        acts += (self._retry, self._repeat, self._give_up, self._ask_with_tokens)
        answer = await self._ask(self._request())
        self._continue(answer)
        for _ in range(self.chance.randint(0, 5)):
            await asyncio.sleep(self.chance.random() * self.world.scenario.tool_s)
            act = self.chance.choice(acts)
            self.world.note(self.session, act.__name__)
            answer = await act(answer)
            self._continue(answer)

    def _continue(self, answer: ChatAnswer) -> None:
        self.history += [answer.message, self._words("tool" if answer.message.tool_calls else "user")]

    def _words(self, role: str) -> Message:
        return Message(role=role, content="".join(self.chance.choices(LETTERS, k=self.chance.randint(1, 3))))

    def _request(self, *, key: str | None = None) -> ChatRequest:
        most = self.chance.choice((None, 4, 12))
        return ChatRequest(messages=tuple(self.history), agent=POLICY, max_tokens=most, idempotency_key=key)

    async def _ask(self, request: ChatRequest) -> ChatAnswer:
        rollout = self.world.oracle.session(self.session)
        conversation = rollout.conversation(request.messages)
        rollout.num_calls += not request.is_retry
        answer = await self.post(lambda session: session.answer(request))
        rollout.answered(conversation, answer)
        return answer

    # ---- acts

    async def _go_on(self, last: ChatAnswer) -> ChatAnswer:
        answer = await self._ask(self._request())
        held = last.finish == "length" or answer.cached_tokens == last.prompt_tokens + last.completion_tokens
        text = "{} does not continue its last answer"
        self.world.judge(require, "provenance", held, text, self.session)
        return answer

    async def _edit(self, last: ChatAnswer) -> ChatAnswer:
        at = self.chance.randrange(len(self.history) - 1)
        self.history[at] = written = self._words(self.history[at].role)
        self.world.oracle.session(self.session).written.add(written.content)
        return await self._ask(self._request())

    async def _compact(self, last: ChatAnswer) -> ChatAnswer:
        self.history = [self._words("system"), *self.history[-2:]]
        return await self._ask(self._request())

    async def _ask_sub_agent(self, last: ChatAnswer) -> ChatAnswer:
        asked = replace(self._request(), messages=(self._words("system"), self.history[-1]))
        found = await self._ask(asked)
        self.history[-1] = Message(role="user", content=found.message.content or "a")
        return await self._ask(self._request())

    async def _ask_twice(self, last: ChatAnswer) -> ChatAnswer:
        request = self._request()
        answers = await asyncio.gather(self._ask(request), self._ask(request), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise errors[0]
        return self.chance.choice([answer for answer in answers if isinstance(answer, ChatAnswer)])

    async def _retry(self, last: ChatAnswer) -> ChatAnswer:
        request = self._request()
        return await self._same(request, replace(request, is_retry=True))

    async def _repeat(self, last: ChatAnswer) -> ChatAnswer:
        request = self._request(key=f"call {len(self.history)} {self.chance.random()}")
        return await self._same(request, request)

    async def _same(self, request: ChatRequest, retry: ChatRequest) -> ChatAnswer:
        first, again = await self._ask(request), await self._ask(replace(retry, is_retry=True))
        text = "{}: a retry is answered with {}, the call with {}"
        self.world.judge(require, "exactly once", first == again, text, self.session, again.token_ids, first.token_ids)
        return again

    async def _give_up(self, last: ChatAnswer) -> ChatAnswer:
        """The connection breaks, and the client repeats the call."""
        request = self._request()
        call = asyncio.ensure_future(self._ask(request))
        await asyncio.wait((call,), timeout=self.chance.random())
        call.cancel()
        await asyncio.wait((call,))
        return await self._ask(replace(request, is_retry=True))

    async def _ask_with_tokens(self, last: ChatAnswer) -> ChatAnswer:
        """A call with tokens next to the conversation."""
        rollout = self.world.oracle.session(self.session)
        conversation = rollout.conversation(self.history)
        tokens = tuple(token for part in conversation for token in part[0])
        rollout.num_calls += 1
        request = TokenRequest(token_ids=tokens, agent=POLICY, max_tokens=4)
        answer = await self.post(lambda session: session.generate(request))
        rollout.calls.append(AgentCall(((tokens,),), None, answer.token_ids))
        return await self._ask(self._request())

    # ---- the end

    async def _leave(self) -> None:
        """Some leave calls in flight, or make them after the end."""
        late_s = self.chance.choice((None, None, 0.0, END_S))
        if late_s is None:
            return
        request = self._request()

        async def call() -> None:
            await asyncio.sleep(late_s)
            try:
                await self.post(lambda session: session.answer(request))
            except (EndpointError, ConnectionError):
                return
            text = "{}: a call after the end is answered"
            self.world.judge(require, "exactly once", late_s < END_S, text, self.session)

        for _ in range(self.chance.randint(1, 2)):
            self.world.oracle.session(self.session).num_calls += 1
            asyncio.ensure_future(call())  # noqa: RUF006 - in the tasks of the process or the world
        await asyncio.sleep(0.0 if late_s else self.chance.random())

    async def _reward(self) -> float | None:
        value = float(self.chance.randint(1, 3))
        match self.chance.choice(("returned", "reported", "reported by name", "of the task")):
            case "returned":
                self.world.oracle.rewarded(self.session, value)
                return value
            case "of the task":
                return None
            case how:
                report = value if how == "reported" else {POLICY: value}

                async def reward(session: AgentSession) -> None:
                    session.reward(report)

                self.world.oracle.rewarded(self.session, value)
                await self.post(reward)
                return None


# ---- in the worker


class WatchedLoop:
    """An agent loop whose tools, rewards and agents can tell whose they are."""

    def __init__(self, loop: AgentLoop, world: World) -> None:
        self._loop = loop
        self._world = world

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        session_name.set(session)
        self._world.oracle.loop_starts(session)
        if self._world.scenario.agent is not None and not trajectory.turns:
            self._world.oracle.rollout_starts(session)
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)


class WatchedRouter(ReplicaRouter):
    """The engine of a worker that may not forget what it received."""

    def __init__(self, world: World, pool: ReplicaPool) -> None:
        super().__init__(pool)
        self._world = world

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        self._world.judge(self._world.oracle.asks, request)
        answer = await super().generate(request)
        self._world.oracle.received(request, answer)
        return answer


async def program(world: World, prompt: Prompt, access: ModelAccess) -> float | None:
    """The agent program of a task."""
    session = session_name.get()
    return await _agent(world, session, world.endpoints[access.base_url], access.api_key, prompt).run()


def _agent(world: World, session: str, endpoint: Endpoint, key: str, prompt: Prompt) -> Agent:
    attempt = world.next_attempt(session)
    chance = random.Random(f"{session} {attempt} {world.scenario.config.seed}")
    return Agent(world, session, endpoint, key, list(prompt.messages), chance)


# ---- outside of the run


async def external_agent(world: World, number: int) -> None:
    """Opens one session after the other, at any worker that lives."""
    for turn in count():
        chance = random.Random(f"external {number} {turn} {world.scenario.config.seed}")
        live = [endpoint for endpoint in world.endpoints.values() if not endpoint.process.dead]
        if not live:
            await asyncio.sleep(1.0 + chance.random())
            continue
        endpoint = chance.choice(live)
        try:
            opened = await endpoint.post(_open)
            agent = _agent(world, opened.id, endpoint, opened.api_key, opened.prompt)
            with contextlib.suppress(RequestError):  # the limits of the rollout leave no call
                reward = await agent.run()
                if reward is not None:
                    await agent.post(partial(_report, reward))
            await agent.post(_end)
        except NoRolloutWaiting as error:
            await asyncio.sleep((error.retry_after_s or 1.0) * chance.random())
        except (EndpointError, ConnectionError, RuntimeError):
            await asyncio.sleep(chance.random())


async def _open(host: Sessions) -> OpenedSession:
    return host.open()


async def _report(reward: float, session: AgentSession) -> None:
    session.reward(reward)


async def _end(session: AgentSession) -> None:
    session.end()
