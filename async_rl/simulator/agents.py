"""The task of a simulated run: an agent loop with a tool and a reward, or agent programs in or outside of workers.

An agent makes random calls to the real sessions: it continues its conversation, rewrites it, asks sub-agents, makes
calls side by side, repeats calls, and may fail. What it asked and was answered is noted by the oracle.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.boundary import call_function
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
from agent_loop.programs.endpoint.host import Sessions
from agent_loop.programs.program import external
from agent_loop.programs.session import AgentSession
from agent_loop.reward import Completion
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.rollout.task import Task
from async_rl.simulator.processes import Process, current_process
from async_rl.simulator.scenario import CANCELS
from async_rl.simulator.trajectory_checks import AgentCall
from message_queue.errors import RolloutError, ToolError
from message_queue.tokens import TokenOutput
from message_queue.trajectory import POLICY, Trajectory

if TYPE_CHECKING:
    from async_rl.simulator.world import World

EXTERNAL = 8  # agents outside of a run
CLIENT_S = 250.0  # a client waits for an answer at most; longer than rollout.limits.generate_timeout_s
END_S = 20.0  # an agent that has made its calls ends its session in less
NO_END_S = 1e6  # longer than any time-out
LETTERS = "abcdefgh"
RAISED: Mapping[str, Callable[[], BaseException]] = {
    "tool says no": partial(ToolError, "n\udc00"),
    "tool is broken": partial(RolloutError, "the tool is out of order"),
    "reward fails": partial(ValueError, "no such answer"),
    "agent fails": partial(RuntimeError, "the agent is out of order"),
    **dict.fromkeys(CANCELS, partial(asyncio.CancelledError, "of an inner scope")),
}
"""Fault of user code -> its error."""

session_name: ContextVar[str] = ContextVar("session", default="")
"""Session of the rollout whose code runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Sessions of a worker, for their clients."""

    host: Sessions
    """The sessions."""
    process: Process
    """The worker."""

    async def post(self, act: Callable[[Any], Any], *, key: str | None = None) -> Any:
        """The answer of the worker to a request to its sessions, or to the one with this key.

        Raises:
            EndpointError: the request is refused.
            ConnectionError: the worker is dead, silent, or dies meanwhile.
        """

        async def work() -> Any:
            asked = self.host if key is None else self.host.session_of(key)
            if asked is None:
                raise RequestError("the key is not valid")
            answer = act(asked)
            return await answer if isinstance(answer, Coroutine) else answer

        try:
            async with asyncio.timeout(CLIENT_S):
                return await self.process.request(work)
        except TimeoutError:
            raise ConnectionError("no answer") from None


@asynccontextmanager
async def serve(world: World, host: Sessions, **_options: object) -> AsyncGenerator[str]:
    """Take the place of `agent_loop.programs.endpoint.server.serve`."""
    process = current_process()
    assert process is not None
    endpoint, url = Endpoint(host, process), f"http://{process.process_name}"
    world.endpoints[url] = endpoint
    try:
        yield url
    finally:
        if world.endpoints.get(url) is endpoint:
            del world.endpoints[url]


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
        if kind in RAISED:
            raise RAISED[kind]()
        if kind == "agent never ends":
            await asyncio.sleep(NO_END_S)
        await self._leave()
        return await self._reward()

    async def post(self, act: Callable[[AgentSession], Any]) -> Any:
        """Make a request to the session."""
        return await self.endpoint.post(act, key=self.key)

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
        rollout.calls.append(AgentCall(conversation, answer.message, answer.token_ids))
        return answer

    # ---- acts

    async def _go_on(self, last: ChatAnswer) -> ChatAnswer:
        answer = await self._ask(self._request())
        held = last.finish == "length" or answer.cached_tokens == last.prompt_tokens + last.completion_tokens
        self.world.require("provenance", held, "{} does not continue its last answer", self.session)
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
        return await self._same(self._request())

    async def _repeat(self, last: ChatAnswer) -> ChatAnswer:
        return await self._same(self._request(key=f"call {len(self.history)} {self.chance.random()}"))

    async def _same(self, request: ChatRequest) -> ChatAnswer:
        first, again = await self._ask(request), await self._ask(replace(request, is_retry=True))
        text, tokens = "{}: a retry is answered with {}, the call with {}", (again.token_ids, first.token_ids)
        self.world.require("exactly once", first == again, text, self.session, *tokens)
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
            self.world.require("exactly once", late_s < END_S, "{}: a call after the end is answered", self.session)

        for _ in range(self.chance.randint(1, 2)):
            self.world.oracle.session(self.session).num_calls += 1
            asyncio.ensure_future(call())  # noqa: RUF006 - in the tasks of the process or the world
        await asyncio.sleep(0.0 if late_s else self.chance.random())

    async def _reward(self) -> float | None:
        value = float(self.chance.randint(1, 3))
        match self.chance.choice(("returned", "reported", "reported by name", "of the task")):
            case "returned":
                self.world.oracle.session(self.session).reward = value
                return value
            case "of the task":
                return None
            case how:
                report = value if how == "reported" else {POLICY: value}
                self.world.oracle.session(self.session).reward = value
                await self.post(lambda session: session.reward(report))
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
    chance = random.Random(f"{session} {next(world.attempts[session])} {world.scenario.config.seed}")
    return Agent(world, session, endpoint, key, list(prompt.messages), chance)


# ---- the task


class SimulatedTask(Task):
    """Prompts that are numbers, and a tool, or agents in its place.

    Args:
        options: {"world": the world}.
    """

    def __init__(self, options: Mapping[str, Any], *, seed: int) -> None:
        self._world: World = options["world"]
        agent = {None: None, "program": partial(program, self._world), "external": external}[self._world.scenario.agent]
        tools = [LookupTool(self._world)] if agent is None else []
        reward = {"parity": partial(parity, self._world)}
        super().__init__(prompts=[], rewards=reward, tools=tools, agent=agent, end_of_turn="<end>")

    def train_prompt(self, index: int) -> Prompt:
        return Prompt(index=index, messages=(Message(role="user", content=f"{index:03d}"),))

    def validation_prompts(self, count: int) -> list[Prompt]:
        return [self.train_prompt(900 + i) for i in range(count)]

    def build_loop(self, **parts: Any) -> AgentLoop:
        return WatchedLoop(super().build_loop(**parts), self._world)


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


async def parity(world: World, /, completion: Completion) -> float:
    """Reward: 1 where the number of letters is odd."""
    await _work(world, "reward")
    value = float(sum(map(len, completion.turns)) % 2)
    world.oracle.session(session_name.get()).reward = value
    return value


async def _work(world: World, point: str) -> None:
    """Take the time of a tool or a reward, and fail if it is to fail."""
    kind, seconds = world.fault(point)
    if kind in RAISED:
        raise RAISED[kind]()
    seconds = NO_END_S if kind.startswith("no end") else seconds + world.scenario.tool_s
    await (call_function(world.block, {"seconds": seconds}) if world.scenario.blocks else asyncio.sleep(seconds))


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
            name, key, prompt = await endpoint.post(lambda host: host.open())
            agent = _agent(world, name, endpoint, key, prompt)
            with contextlib.suppress(RequestError):  # the limits of the rollout leave no call
                reward = await agent.run()
                if reward is not None:
                    await agent.post(lambda session, reward=reward: session.reward(reward))
            await agent.post(lambda session: session.end())
        except NoRolloutWaiting as error:
            await asyncio.sleep((error.retry_after_s or 1.0) * chance.random())
        except (EndpointError, ConnectionError, RuntimeError):
            await asyncio.sleep(chance.random())
