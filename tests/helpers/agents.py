"""An agent that acts at random: it continues, edits, compacts, asks sub-agents, calls in parallel, and retries."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from agent_loop.conversation import ChatAnswer, ChatRequest
from agent_loop.loop import Message, ToolUse
from agent_loop.session import CallRefused

WORDS = ["add", "the", "two", "numbers", "and", "answer", "with", "one", "word", "12", "34", "56", "+", "-", "*", "ok"]
Answer = Callable[[ChatRequest], Awaitable[ChatAnswer]]


def words(chance: random.Random, most: int = 6) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))


class RandomAgent:
    """One rollout.

    Args:
        answer: makes a model call.
        chance: of all choices.
        max_tokens: of an answer.
    """

    def __init__(self, answer: Answer, *, chance: random.Random, max_tokens: int) -> None:
        self._answer = answer
        self._chance = chance
        self._max_tokens = max_tokens
        self.history = [Message(role="user", content=words(chance))]
        self.acts: list[str] = []

    async def run(self, steps: int) -> None:
        """Make some steps; it ends early if the limits of the rollout leave no call."""
        acts = (self.go_on, self.go_on, self.edit, self.compact, self.ask_sub_agent, self.ask_twice, self.retry)
        with contextlib.suppress(CallRefused):
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

    async def call(self) -> ChatAnswer:
        return await self._answer(self.request())

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
        found = await self._answer(asked)
        self.history[-1] = Message(role="user", content=found.message.content or "nothing")
        return await self.call()

    async def ask_twice(self) -> ChatAnswer:
        """Two answers to the same conversation, side by side; one of them is used."""
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
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await self._answer(replace(self.request(), is_retry=True))


def over_openai(client: Any) -> Answer:
    """Model calls by OpenAI's client, a third of them as streams."""

    async def answer(request: ChatRequest) -> ChatAnswer:
        extra = {"extra_headers": {"x-stainless-retry-count": "1"}} if request.is_retry else {}
        arguments: dict[str, Any] = {
            "model": request.agent,
            "messages": [_openai_message(message) for message in request.messages],
            "max_completion_tokens": request.max_tokens,
            **extra,
        }
        if len(request.messages) % 3:
            completion = await client.chat.completions.create(**arguments)
        else:
            async with client.chat.completions.stream(**arguments) as stream:
                completion = await stream.get_final_completion()
        (choice,) = completion.choices
        message = choice.message
        calls = tuple(
            ToolUse(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        )
        return ChatAnswer(
            message=Message(role="assistant", content=message.content or "", tool_calls=calls),
            finish=choice.finish_reason,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
        )

    return answer


def _openai_message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
