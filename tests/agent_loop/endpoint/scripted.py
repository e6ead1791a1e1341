"""Sessions that answer from a script, and a raw HTTP client."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import anthropic
import openai

from agent_loop.loop import Message, Prompt, ToolUse
from agent_loop.programs.conversation import ChatAnswer, NoRolloutWaiting, SessionEnded, arguments_text
from agent_loop.programs.endpoint.host import EndpointConfig, key_digest, new_key
from agent_loop.programs.endpoint.server import serve

RUN_KEY = "key-of-the-run"
ASK = {"role": "user", "content": "weather in Oslo?"}
CALL = ToolUse(id="call_1", name="weather", arguments=arguments_text({"city": "Oslo", "days": 1.0}))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}}


def answer(content="4 degrees", *, calls=(), reasoning=None, finish=None, **fields):
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))
    counts = {"prompt_tokens": 11, "cached_tokens": 8}
    sampled = {"token_ids": (5, 6), "logprobs": (-0.5, -0.25)}
    finish = finish or ("tool_calls" if calls else "stop")
    return ChatAnswer(message=message, finish=finish, **(counts | sampled | fields))


CALLING = answer("let me see", calls=(CALL,), reasoning="I need a tool")


class ScriptedSession:
    """Gives the answers of `script`, then repeats the last one; an exception in it is raised."""

    def __init__(self, name):
        self.name, self.key = name, new_key()
        self.agents = ("planner", "solver")
        self.status = "open"
        self.script = [answer()]
        self.requests = []
        self.rewards = []
        self.go = asyncio.Event()  # answers wait for it
        self.go.set()
        self.asked, self.answered = asyncio.Event(), asyncio.Event()

    async def answer(self, request):
        self.requests.append(request)
        self.asked.set()
        await self.go.wait()
        return self._next()

    generate = answer

    def count_tokens(self, request):
        self.requests.append(request)
        return self._next().prompt_tokens

    def reward(self, reward):
        self._check_open()
        self.rewards.append(reward)

    def end(self):
        self._check_open()
        self.status = "ended"

    def _next(self):
        self._check_open()
        self.answered.set()
        found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(found, Exception):
            raise found
        return found

    def _check_open(self):
        if self.status != "open":
            raise SessionEnded(self.name)


class ScriptedHost:
    """Opens `waiting` sessions."""

    def __init__(self, *, waiting=2):
        self.waiting = waiting
        self.sessions = {}
        self.config = EndpointConfig()
        self.url = ""
        self.prompt = Prompt(index=0, messages=(Message(role="user", content="2+2?"),), target={"answer": 4})

    def open(self):
        if len(self.sessions) == self.waiting:
            raise NoRolloutWaiting(retry_after_s=2.5)
        session = ScriptedSession(f"rollout-{len(self.sessions)}")
        self.sessions[key_digest(session.key)] = session
        return session.name, session.key, self.prompt

    def session_of(self, key):
        return self.sessions.get(key_digest(key))


@asynccontextmanager
async def serving(**limits):
    """A host, served, and its first session."""
    host = ScriptedHost()
    host.config = replace(host.config, **limits)
    session = host.session_of(host.open()[1])
    async with serve(host, run_key=RUN_KEY, config=host.config) as host.url:
        yield host, session


def openai_client(host, session, **options):
    return openai.AsyncOpenAI(base_url=host.url, api_key=session.key, **{"max_retries": 0, **options})


def anthropic_client(host, session, **options):
    return anthropic.AsyncAnthropic(base_url=host.url, api_key=session.key, **{"max_retries": 0, **options})


def head(key, *headers, path="/v1/chat/completions"):
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def connect(host):
    hostname, port = host.url.removeprefix("http://").rsplit(":", 1)
    return await asyncio.open_connection(hostname, int(port))


async def close(writer):
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def raw(host, data):
    """All bytes of the response to a request that closes its connection."""
    reader, writer = await connect(host)
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        await close(writer)


async def request(host, path, *, key="", body=None, method="POST", headers=()):
    """(status, headers, JSON or text) of a request over a separate connection."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(data)}", *headers]
    lines += [f"authorization: Bearer {key}"] if key else []
    found = await raw(host, "\r\n".join([*lines, "", ""]).encode() + data)
    head, _, rest = found.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    named = dict(field.lower().split(": ", 1) for field in fields)
    text = rest.decode()
    return int(status.split()[1]), named, json.loads(text) if named.get("content-type") == "application/json" else text


def sse_data(text):
    """JSON of each server-sent event."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]
