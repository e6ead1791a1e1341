"""An agent that acts at random: it continues, edits, compacts, asks sub-agents, calls in parallel, and retries.

Its calls are made in process, or by the clients of OpenAI and Anthropic over a network that loses some.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anthropic
import httpx2
import openai

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, RequestError
from agent_loop.programs.program import ModelAccess

WORDS = ["add", "the", "two", "numbers", "and", "answer", "with", "one", "word", "12", "34", "56", "+", "-", "*", "ok"]
LOST = 0.1  # share of the calls that are lost on their way, and of calls whose answers are
LATEST_S = 0.1  # from the start of a call to its loss
RETRIES = 9  # of an SDK
RETRY_AFTER_S = 0.4
REFUSALS = ("context length", "prompt is too long", "max_turns")  # of calls for which the limits leave no room
Answer = Callable[[ChatRequest], Awaitable[ChatAnswer]]


def words(chance: random.Random, most: int = 6) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))


class RandomAgent:
    """One rollout.

    Args:
        answer: makes a model call.
        chance: of all choices.
        max_tokens: tokens in an answer.

    Attributes:
        acts: names of its steps.
        calls: answered calls; a call and its retries are one.
        cut: answers that a limit cut.
    """

    def __init__(self, answer: Answer, *, chance: random.Random, max_tokens: int) -> None:
        self._answer = answer
        self._chance = chance
        self._max_tokens = max_tokens
        self.history = [Message(role="user", content=words(chance))]
        self.acts: list[str] = []
        self.calls = 0
        self.cut = 0

    async def run(self, steps: int) -> None:
        """Make some steps; it ends early if the limits of the rollout leave no call."""
        acts = (self.go_on, self.go_on, self.edit, self.compact, self.ask_sub_agent, self.ask_twice, self.retry)
        with contextlib.suppress(RequestError):
            answer = await self.call()
            for _ in range(steps):
                self.history += [answer.message, self.say()]
                act = self._chance.choice((*acts, self.give_up))
                self.acts.append(act.__name__)
                answer = await act()

    def say(self) -> Message:
        last = self.history[-1].tool_calls if self.history else ()
        if last:
            return Message(role="tool", content=words(self._chance), tool_call_id=last[0].id)
        return Message(role="user", content=words(self._chance))

    def request(self, *, agent: str = "policy") -> ChatRequest:
        return ChatRequest(messages=tuple(self.history), agent=agent, max_tokens=self._max_tokens)

    async def call(self, request: ChatRequest | None = None) -> ChatAnswer:
        answer = await self._answer(request or self.request())
        self.calls += 1
        self.cut += answer.finish == "length"
        return answer

    async def go_on(self) -> ChatAnswer:
        return await self.call()

    async def edit(self) -> ChatAnswer:
        """Change one message, also one of the model."""
        at = self._chance.randrange(len(self.history) - 1)
        self.history[at] = replace(self.history[at], content=words(self._chance), tool_calls=())
        return await self.call()

    async def compact(self) -> ChatAnswer:
        """Keep a summary and the last exchange."""
        summary = Message(role="system", content=words(self._chance))
        self.history = [summary, *self.history[-2:]]
        return await self.call()

    async def ask_sub_agent(self) -> ChatAnswer:
        """Another agent answers first, to another system prompt; its words go into the conversation."""
        system = Message(role="system", content=words(self._chance))
        name = self._chance.choice(("solver", "critic"))
        asked = ChatRequest(messages=(system, self.history[-1]), agent=name, max_tokens=self._max_tokens)
        found = await self.call(asked)
        self.history[-1] = Message(role="user", content=found.message.content or "nothing")
        return await self.call()

    async def ask_twice(self) -> ChatAnswer:
        """Two answers to the same conversation, side by side; one is used."""
        both = await asyncio.gather(self.call(), self.call())
        return self._chance.choice(both)

    async def retry(self) -> ChatAnswer:
        """The SDK repeats a call that was answered."""
        first = await self.call()
        again = await self._answer(replace(self.request(), is_retry=True))
        assert again == first, "a marked retry has the recorded answer"
        return again

    async def give_up(self) -> ChatAnswer:
        """The connection breaks during a call, and the SDK repeats it."""
        task = asyncio.ensure_future(self.call())
        for _ in range(self._chance.randrange(20)):
            await asyncio.sleep(0)
        if task.done():
            return await task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await self.call(replace(self.request(), is_retry=True))


class LossyNetwork(httpx2.AsyncHTTPTransport):
    """Breaks the connection of some calls: at any time before the answer, or when all of the answer has arrived.

    The client sees a broken connection in both cases, and its SDK repeats the call.

    Attributes:
        lost: broken calls.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__(verify=False)
        self._chance = chance
        self.lost = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        fate = self._chance.random()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0, LATEST_S) if fate < LOST else None):
                response = await super().handle_async_request(request)
                if fate > 2 * LOST:
                    return response
                await response.aread()
                await response.aclose()
        self.lost += 1
        raise httpx2.ReadError("the connection is broken", request=request)


@contextlib.asynccontextmanager
async def over_http(access: ModelAccess, network: LossyNetwork, *, chance: random.Random) -> AsyncGenerator[Answer]:
    """Model calls over each API at random, a third of them as streams. A call that is refused raises RequestError.

    chance: random choice of the API.
    """
    options: Any = {"api_key": access.api_key, "max_retries": RETRIES}
    async with httpx2.AsyncClient(transport=network, timeout=None) as http:
        of_openai = openai.AsyncOpenAI(base_url=access.base_url, http_client=http, **options)
        of_anthropic = anthropic.AsyncAnthropic(base_url=access.base_url, http_client=http, **options)
        apis = (partial(chat, of_openai), partial(respond, of_openai), partial(message, of_anthropic))

        async def answer(request: ChatRequest) -> ChatAnswer:
            headers = {"x-stainless-retry-count": "1"} if request.is_retry else {}
            if request.is_retry:
                await asyncio.sleep(RETRY_AFTER_S)  # as the SDKs do: the call may still be on its way
            try:
                message, is_cut = await chance.choice(apis)(request, extra_headers=headers)
            except (openai.BadRequestError, anthropic.BadRequestError) as error:
                assert any(refusal in str(error) for refusal in REFUSALS), error
                raise RequestError(str(error)) from error
            return ChatAnswer(
                message=message,
                finish="length" if is_cut else "stop",
                prompt_tokens=0,
                cached_tokens=0,
            )

        yield answer


async def chat(client: openai.AsyncOpenAI, request: ChatRequest, **options: Any) -> tuple[Message, bool]:
    """A call of OpenAI's chat completions: message, and whether a limit cut it."""
    arguments: dict[str, Any] = {
        "model": request.agent,
        "messages": [_of_chat(message) for message in request.messages],
        "max_completion_tokens": request.max_tokens,
        **options,
    }
    if len(request.messages) % 3:
        completion = await client.chat.completions.create(**arguments)
    else:
        async with client.chat.completions.stream(**arguments) as stream:
            try:
                completion = await stream.get_final_completion()
            except openai.LengthFinishReasonError as cut:
                completion = cut.completion
    (choice,) = completion.choices
    used: list[Any] = choice.message.tool_calls or []
    calls = tuple(ToolUse(id=c.id, name=c.function.name, arguments=c.function.arguments) for c in used)
    found = Message(role="assistant", content=choice.message.content or "", tool_calls=calls)
    return found, choice.finish_reason == "length"


def _of_chat(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


async def respond(client: openai.AsyncOpenAI, request: ChatRequest, **options: Any) -> tuple[Message, bool]:
    """A call of OpenAI's responses."""
    arguments: dict[str, Any] = {
        "model": request.agent,
        "input": [item for message in request.messages for item in _of_response(message)],
        "max_output_tokens": request.max_tokens,
        **options,
    }
    if len(request.messages) % 3:
        response = await client.responses.create(**arguments)
    else:
        events: list[Any] = [event async for event in await client.responses.create(stream=True, **arguments)]
        response = events[-1].response  # of response.completed, or of response.incomplete
    calls = tuple(
        ToolUse(id=item.call_id, name=item.name, arguments=item.arguments)
        for item in response.output
        if item.type == "function_call"
    )
    found = Message(role="assistant", content=response.output_text, tool_calls=calls)
    return found, response.status == "incomplete"


def _of_response(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    calls = [
        {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls
    ]
    return [{"role": message.role, "content": message.content}, *calls]


async def message(client: anthropic.AsyncAnthropic, request: ChatRequest, **options: Any) -> tuple[Message, bool]:
    """A call of Anthropic's messages."""
    system = [message.content for message in request.messages if message.role == "system"]
    arguments: dict[str, Any] = {
        "model": request.agent,
        "messages": [_of_messages(message) for message in request.messages if message.role != "system"],
        "max_tokens": request.max_tokens,
        **({"system": system[0]} if system else {}),
        **options,
    }
    if len(request.messages) % 3:
        answer = await client.messages.create(**arguments)
    else:
        async with client.messages.stream(**arguments) as stream:
            answer = await stream.get_final_message()
    found = Message(
        role="assistant",
        content="".join(block.text for block in answer.content if block.type == "text"),
        tool_calls=tuple(
            ToolUse(id=block.id, name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            for block in answer.content
            if block.type == "tool_use"
        ),
    )
    return found, answer.stop_reason == "max_tokens"


def _of_messages(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [result]}
    calls = [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in message.tool_calls
    ]
    return {"role": message.role, "content": [{"type": "text", "text": message.content}, *calls]}
