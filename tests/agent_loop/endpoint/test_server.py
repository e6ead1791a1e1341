"""Sessions, streams, and the start and end of the server."""

import asyncio
import json
import logging
from contextlib import suppress
from datetime import date

import pytest
import uvloop

from agent_loop.programs.endpoint.host import EndpointConfig
from agent_loop.programs.endpoint.server import serve
from async_rl.rollout.data import PromptFormat
from tests.agent_loop.endpoint.scripted import (
    ASK,
    RUN_KEY,
    ScriptedHost,
    close,
    connect,
    head,
    request,
    serving,
    sse_data,
)

CHAT = {"model": "planner", "messages": [ASK]}
TOKENS = {"token_ids": [1, 2], "sampling_params": {"logprobs": 1}}
MESSAGE = CHAT | {"max_tokens": 9}


def http(path, *headers, key, body=b""):
    return head(key, f"content-length: {len(body)}", *headers, path=path) + body


async def test_an_opened_session_has_the_whole_prompt():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    async with serving() as (host, _):
        host.prompt = PromptFormat().prompt({"messages": messages, "day": date(2026, 1, 2)}, index=0)
        _, _, opened = await request(host, "/sessions", key=RUN_KEY, body={})
        assert opened["prompt"]["messages"] == messages and opened["prompt"]["target"]["day"] == "2026-01-02"


async def test_a_session_is_opened_rewarded_and_ended():
    async with serving() as (host, _):
        status, _, opened = await request(host, "/sessions", key=RUN_KEY, body={})
        assert status == 201
        assert opened["base_url"] == host.url
        assert opened["prompt"] == {"messages": [{"role": "user", "content": "2+2?"}], "target": {"answer": 4}}
        path, key = f"/sessions/{opened['id']}", opened["api_key"]
        state = {"id": opened["id"], "status": "open", "agents": ["planner", "solver"]}
        assert (await request(host, path, key=key, method="GET"))[::2] == (200, state)
        assert (await request(host, "/chat/completions", key=key, body=CHAT))[0] == 200
        assert (await request(host, f"{path}/reward", key=key, body={"reward": 1}))[::2] == (200, state)
        by_agent = {"planner": 1.0, "solver": -0.5}
        assert (await request(host, f"{path}/reward", key=key, body={"reward": by_agent}))[0] == 200
        assert host.session_of(key).rewards == [1.0, by_agent]
        assert (await request(host, f"{path}/end", key=key))[::2] == (200, state | {"status": "ended"})


async def test_late_calls_of_a_session_conflict():
    async with serving() as (host, session):
        session.end()
        calls = {
            f"/sessions/{session.name}/reward": {"reward": 1.0},
            f"/sessions/{session.name}/end": {},
            "/v1/chat/completions": CHAT,
            "/v1/messages": MESSAGE,
            "/inference/v1/generate": TOKENS,
        }
        for path, body in calls.items():
            status, headers, _ = await request(host, path, key=session.key, body=body)
            assert (status, headers["x-should-retry"]) == (409, "false")
        status, _, state = await request(host, f"/sessions/{session.name}", key=session.key, method="GET")
        assert (status, state["status"]) == (200, "ended")


async def test_without_a_waiting_rollout_a_session_is_asked_for_later():
    async with serving() as (host, _):
        host.waiting = len(host.sessions)
        status, headers, found = await request(host, "/sessions", key=RUN_KEY, body={})
        assert (status, headers["retry-after"], found["error"]["type"]) == (429, "3", "rate_limit_error")


@pytest.mark.parametrize("reward", [None, True, "1", {}, [1.0], {"planner": None}, {"planner": True}, 10**40, -1e31])
async def test_a_reward_that_is_no_number_is_refused(reward):
    async with serving() as (host, session):
        path = f"/sessions/{session.name}/reward"
        status, _, found = await request(host, path, key=session.key, body={"reward": reward})
        assert (status, found["error"]["param"].partition(".")[0]) == (400, "reward")
        assert session.rewards == []


async def test_tokens_are_answered_with_tokens():
    async with serving() as (host, session):
        status, _, found = await request(host, "/inference/v1/generate", key=session.key, body=TOKENS)
        assert (status, found["choices"][0]["token_ids"]) == (200, [5, 6])
        _, headers, text = await request(
            host, "/inference/v1/generate", key=session.key, body=TOKENS | {"stream": True}
        )
        assert headers["content-type"].startswith("text/event-stream")
        assert sse_data(text)[0]["choices"] == found["choices"]
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/chat/completions", CHAT, b": keep-alive\n\n"),
        ("/v1/responses", {"model": "m", "input": "x"}, b": keep-alive\n\n"),
        ("/v1/messages", MESSAGE, b'event: ping\ndata: {"type": "ping"}\n\n'),
        ("/inference/v1/generate", TOKENS, b": keep-alive\n\n"),
    ],
)
async def test_a_stream_shows_that_it_waits(path, body, sign):
    async with serving(keep_alive_s=0.01) as (host, session):
        session.go.clear()
        reader, writer = await connect(host)
        data = json.dumps(body | {"stream": True}).encode()
        writer.write(http(path, "connection: close", key=session.key, body=data))
        await reader.readuntil(sign)
        await reader.readuntil(sign)
        session.go.set()
        assert b"data: " in await reader.read()
        await close(writer)


async def test_an_answer_is_sampled_to_its_end_if_its_client_leaves():
    async with serving() as (host, session):
        session.go.clear()
        data = b'{"model": "planner", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
        _, writer = await connect(host)
        writer.write(http("/v1/chat/completions", key=session.key, body=data))
        await session.asked.wait()
        await close(writer)
        session.go.set()
        await session.answered.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_in_progress_fail_when_the_endpoint_closes(stream):
    async with serving() as (host, session):
        session.go.clear()
        task = asyncio.create_task(request(host, "/v1/messages", key=session.key, body=MESSAGE | {"stream": stream}))
        await session.asked.wait()
    status, _, found = await task
    assert (status, found["error"]["type"]) == (503, "overloaded_error")


async def test_connections_are_closed_with_the_endpoint():
    async with serving() as (host, session):
        idle, half, slow = [await connect(host) for _ in range(3)]
        half[1].write(b"POST /v1/messages HTTP/1.1\r\nhost:")
        slow[1].write(head(session.key, "content-length: 9", path="/v1/messages"))
        other = await connect(host)
        other[1].write(http("/sessions", key=RUN_KEY))
        await other[0].readuntil(b"201")
    for reader, writer in (idle, half, slow, other):
        with suppress(ConnectionError):
            await reader.read()
        await close(writer)
    with pytest.raises(ConnectionError):
        await connect(host)


async def test_a_port_in_use_is_an_error():
    async with serving() as (host, _):
        with pytest.raises(OSError, match="in use"):
            async with serve(host, run_key=RUN_KEY, config=EndpointConfig(port=int(host.url.rpartition(":")[2]))):
                pass


async def test_requests_are_not_logged(caplog):
    caplog.set_level(logging.INFO)
    async with serving() as (host, session):
        await request(host, "/v1/chat/completions", key=session.key, body=CHAT)
        await request(host, "/v1/chat/completions", key="sk-wrong", body=CHAT)
    assert not [record for record in caplog.records if record.name != "asyncio"]


def test_the_endpoint_runs_on_uvloop():
    async def ask():
        async with serving(keep_alive_s=0.01) as (host, session):
            session.go.clear()
            task = asyncio.create_task(
                request(host, "/v1/chat/completions", key=session.key, body=CHAT | {"stream": True})
            )
            await session.asked.wait()
            session.go.set()
            return await task

    assert uvloop.run(ask())[0] == 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host": "0.0.0.0"}, "endpoint.host"),
        ({"port": 70_000}, "endpoint.port"),
        ({"max_body_bytes": 0}, "endpoint.max_body_bytes"),
        ({"keep_alive_s": 0.0}, "endpoint.keep_alive_s"),
        ({"body_timeout_s": float("inf")}, "endpoint.body_timeout_s"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        EndpointConfig(**fields)


async def test_an_empty_key_of_the_run_is_refused():
    with pytest.raises(ValueError, match="run_key"):
        async with serve(ScriptedHost(), run_key="", config=EndpointConfig()):
            pass
