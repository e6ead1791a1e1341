"""Clients that are hostile, slow or wrong: nothing leaks, nothing hangs, others are served."""

import asyncio
import json
import logging

import pytest

from tests.agent_loop.endpoint.scripted import (
    ASK,
    RUN_KEY,
    answer,
    close,
    connect,
    head,
    openai_client,
    raw,
    request,
    serving,
)

CHAT = {"model": "planner", "messages": [ASK]}
BODY = json.dumps(CHAT).encode()
SESSION_PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/v1/models"),
    ("GET", "/sessions/rollout-0"),
    ("POST", "/sessions/rollout-0/reward"),
    ("POST", "/sessions/rollout-0/end"),
]


async def assert_served(host, session):
    """Another client gets its answer."""
    async with openai_client(host, session) as client:
        found = await client.chat.completions.create(model="planner", messages=[ASK])
        assert found.choices[0].message.content == "4 degrees"


@pytest.mark.parametrize(("method", "path"), [*SESSION_PATHS, ("POST", "/sessions")])
@pytest.mark.parametrize("key", ["", "sk-wrong", "SK", "é", "key-of-the-ru"])
async def test_without_a_valid_key_nothing_is_served(method, path, key):
    async with serving() as (host, session):
        key = session.key.upper() if key == "SK" else key
        status, headers, found = await request(host, path, key=key, body=BODY, method=method)
        assert (status, headers["www-authenticate"]) == (401, "bearer")
        assert session.key not in json.dumps(found) and RUN_KEY not in json.dumps(found)
        assert (session.requests, session.status, len(host.sessions)) == ([], "open", 1)


@pytest.mark.parametrize(
    "headers",
    [
        ["authorization: {key}"],
        ["authorization: Basic {key}"],
        ["authorization: Bearer"],
        ["authorization: Bearer {key}", "authorization: Bearer other"],
        ["authorization: Bearer {key}", "x-api-key: other"],
        ["x-api-key: {key}", "x-api-key: {other}"],
        ["x-api-key: {key},{other}"],
        ["x-api-key: "],
        ["cookie: api_key={key}"],
    ],
)
async def test_keys_that_are_ambiguous_or_elsewhere_are_no_keys(headers):
    async with serving() as (host, session):
        other = host.open()[1]
        given = [header.format(key=session.key, other=other) for header in headers]
        assert (await request(host, "/v1/chat/completions", body=BODY, headers=given))[0] == 401
        assert session.requests == []


@pytest.mark.parametrize("headers", [["x-api-key: {key}"], ["authorization: bearer {key}", "x-api-key: {key}"]])
async def test_a_key_may_be_in_either_header_or_in_both(headers):
    async with serving() as (host, session):
        given = [header.format(key=session.key) for header in headers]
        assert (await request(host, "/v1/chat/completions", body=BODY, headers=given))[0] == 200


@pytest.mark.parametrize(("method", "path"), SESSION_PATHS[-3:])
async def test_the_key_of_another_session_is_forbidden(method, path):
    async with serving() as (host, session):
        other = host.open()[1]
        body = {"reward": 1.0}
        assert (await request(host, path, key=other, body=body, method=method))[0] == 403
        unknown = path.replace("rollout-0", "rollout-9")  # whether a session exists is not shown
        assert (await request(host, unknown, key=other, body=body, method=method))[0] == 403
        assert (session.rewards, session.status) == ([], "open")


async def test_keys_of_the_run_and_of_sessions_have_their_own_paths():
    async with serving() as (host, session):
        assert (await request(host, "/sessions", key=session.key, body={}))[0] == 403
        for method, path in SESSION_PATHS:
            assert (await request(host, path, key=RUN_KEY, body=BODY, method=method))[0] == 403
        assert session.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/chat%2fcompletions",
        "/v1/%63hat/completions",
        "/v1/../v1/chat/completions",
        "/v1/./chat/completions",
        "/v1/chat/completions%00",
        "/V1/chat/completions",
        "http://x/v1/chat/completions",
        "/sessions/rollout-0%2fend",
        "/sessions/rollout-1/../rollout-0/end",
        "/sessions/rollout-1%2f..%2frollout-0/end",
        "/sessions//end",
        "/docs",
        "/",
        "*",
    ],
)
async def test_a_path_that_is_written_otherwise_is_not_found(path):
    async with serving() as (host, session):
        status, _, found = await request(host, path, key=session.key, body=BODY)
        assert (status, found["error"]["code"]) == (404, "not_found")
        assert (session.requests, session.status) == ([], "open")


async def test_a_method_that_is_not_served_is_an_error_of_the_format():
    async with serving() as (host, session):
        status, _, found = await request(host, "/v1/messages", key=session.key, method="GET")
        assert (status, found["type"]) == (405, "error")


SMUGGLED = b"POST /sessions/rollout-0/end HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        [f"content-length: {len(BODY)}", "content-length: 3"],
        [f"content-length: {len(BODY)}", "transfer-encoding: chunked"],
        ["transfer-encoding: chunked", "transfer-encoding: chunked"],
        ["transfer-encoding: gzip, chunked"],
        ["content-length: -1"],
        ["content-length: 0x10"],
        [f"content-length: {len(BODY)}", "host: y"],
        [f"content-length: {len(BODY)}", "x-a: b\x00c"],
        [f"content-length: {len(BODY)}", "x a: b"],
        [f"content-length : {len(BODY)}"],
        [f"content-length: {len(BODY)}", f"x-long: {'a' * 40_000}"],
    ],
    ids=lambda headers: "; ".join(headers)[:50],
)
async def test_a_head_that_can_be_read_in_two_ways_is_refused(headers):
    async with serving() as (host, session):
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        body = chunked if any("transfer-encoding" in header for header in headers) else BODY
        found = await raw(host, head(session.key, *headers) + body + SMUGGLED)
        assert found[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 501", b"")
        assert found.count(b"HTTP/1.1") <= 1
        assert (session.requests, session.status) == ([], "open")
        await assert_served(host, session)


async def test_a_second_request_in_one_connection_needs_a_key_of_its_own():
    async with serving() as (host, session):
        last = SMUGGLED.replace(b"host: x", b"host: x\r\nconnection: close")
        found = await raw(host, head(session.key, f"content-length: {len(BODY)}") + BODY + last)
        assert found.startswith(b"HTTP/1.1 200") and found.count(b"HTTP/1.1 401") == 1
        assert session.status == "open"


CHUNK = b"1000\r\n" + b" " * 4096 + b"\r\n"


@pytest.mark.parametrize("key", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize(
    ("length", "body"),
    [
        ("content-length: 5000", b" " * 5000),
        ("content-length: 9000", b" " * 9000),
        ("content-length: 999999999999", b" " * 9000),
        ("transfer-encoding: chunked", CHUNK * 2 + b"0\r\n\r\n"),
        ("transfer-encoding: chunked", CHUNK * 4),
    ],
    ids=["length", "twice", "much more", "chunks", "endless chunks"],
)
async def test_a_body_that_is_too_large_is_refused_and_not_awaited(length, body, key):
    async with serving(max_body_bytes=4096) as (host, session):
        given = session.key if key else "sk-wrong"
        found = await raw(host, head(given, length) + body)
        assert found.startswith(b"HTTP/1.1 413") and b"max_body_bytes" in found
        await assert_served(host, session)


async def test_a_body_of_the_largest_size_is_served():
    async with serving(max_body_bytes=4096) as (host, session):
        assert (await request(host, "/v1/chat/completions", key=session.key, body=BODY.ljust(4096)))[0] == 200


MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost:"


def half_body(key):
    return head(key, "content-length: 99") + b"{"


async def drip(host, start):
    """Send one byte repeatedly until the server has closed the connection; all that it sent."""
    reader, writer = await connect(host)
    try:
        writer.write(start)
        found = asyncio.create_task(reader.read())
        while not (await asyncio.wait([found], timeout=0.01))[0]:
            writer.write(b"a")
        return await found
    except ConnectionError:
        return b""
    finally:
        await close(writer)


@pytest.mark.parametrize("start", [b"", HALF_HEAD, MODELS + HALF_HEAD], ids=["nothing", "half a head", "second head"])
async def test_a_head_that_drips_is_closed(start):
    async with serving(head_timeout_s=0.1) as (host, _):
        found = await drip(host, start)
        assert b"200" not in found and found.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize("key", [True, False], ids=["key", "no key"])
async def test_a_body_that_does_not_come_is_refused(key):
    async with serving(body_timeout_s=0.1) as (host, session):
        found = await raw(host, half_body(session.key if key else "sk-wrong"))
        assert found.startswith(b"HTTP/1.1 408")
        await drip(host, half_body(session.key if key else "sk-wrong"))
        assert session.requests == []


MODELS_AND_CLOSE = MODELS.replace(b"host: x", b"host: x\r\nconnection: close")


async def test_a_client_that_reads_nothing_is_closed():
    async with serving(body_timeout_s=0.1, max_connections=1) as (host, session):
        session.script = [answer("x" * 2 * 10**7)]  # more than the buffers of a connection hold
        _, writer = await connect(host)
        writer.write(head(session.key, f"content-length: {len(BODY)}") + BODY)
        await session.answered.wait()
        while not await raw(host, MODELS_AND_CLOSE):
            pass  # the only connection is still in use
        await close(writer)


WRONG_KEY = MODELS.replace(b"host: x", b"host: x\r\nx-api-key: sk-wrong")


def models(session, *, close=False):
    """A request with the key of the session."""
    return MODELS.replace(
        b"host: x", b"host: x%s\r\nx-api-key: %s" % (b"\r\nconnection: close" * close, session.key.encode())
    )


async def opened_with_a_key(host, session, count):
    """Connections that have had an answer."""
    made = []
    for _ in range(count):
        reader, writer = await connect(host)
        writer.write(models(session))
        await reader.readuntil(b"async_rl")
        made.append((reader, writer))
    return made


@pytest.mark.parametrize(
    "start", [b"", HALF_HEAD, half_body("sk-wrong"), WRONG_KEY], ids=["nothing", "head", "body", "wrong"]
)
async def test_connections_without_a_key_take_no_place_of_those_with_one(start):
    async with serving(max_connections=8) as (host, session):
        kept = await opened_with_a_key(host, session, 3)
        others = [await connect(host) for _ in range(40)]
        for _, writer in others:
            writer.write(start)
        await assert_served(host, session)
        for reader, writer in kept:
            writer.write(models(session))
            await reader.readuntil(b"async_rl")
        closed = [asyncio.create_task(reader.read()) for reader, _ in others[:30]]  # the oldest
        await asyncio.gather(*closed, return_exceptions=True)
        for _, writer in [*kept, *others]:
            await close(writer)


async def test_connections_with_a_key_are_bounded_and_lose_their_place_with_it():
    async with serving(max_connections=2) as (host, session):
        kept = await opened_with_a_key(host, session, 2)
        assert await raw(host, models(session)) == b""
        kept[0][1].write(WRONG_KEY)
        await kept[0][0].readuntil(b"401")
        assert b"200" in await raw(host, models(session, close=True))
        for _, writer in kept:
            await close(writer)


@pytest.mark.parametrize("length", ["content-length: 16777216", "transfer-encoding: chunked"])
@pytest.mark.parametrize("key", [True, False], ids=["key", "no key"])
async def test_a_client_that_sends_a_large_body_first_reads_the_refusal(length, key):
    async with serving(max_body_bytes=4096) as (host, session):
        chunk = b"%x\r\n%s\r\n" % (1 << 16, b" " * (1 << 16)) if "chunked" in length else b" " * (1 << 16)
        reader, writer = await connect(host)
        writer.write(head(session.key if key else "sk-wrong", length))
        for _ in range((1 << 24) // (1 << 16)):
            writer.write(chunk)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if "chunked" in length else b"")
        found = await reader.read()
        assert found.startswith(b"HTTP/1.1 413") and b"max_body_bytes" in found and found.endswith(b"}")
        await close(writer)
        await assert_served(host, session)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("parts", [False, True], ids=["messages", "parts"])
async def test_a_body_with_too_many_messages_or_parts_is_refused(path, parts):
    async with serving() as (host, session):
        content = [{"type": "text", "text": "a"}] * 20_000
        messages = [{"role": "user", "content": content}] if parts else [ASK] * 20_000
        body = {"model": "m", "max_tokens": 9, "messages": messages, "input": messages if "responses" in path else ""}
        status, _, found = await request(host, path, key=session.key, body=body)
        assert status == 400 and "more than 20000 objects" in found["error"]["message"]
        assert session.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"model": "\xff"}',
        b"\xef\xbb\xbf{}",
        BODY.decode().encode("utf-16"),
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b'{"model": "\\ud800"}',
        b'{"model": %s}' % (b"9" * 5000),
        b'{"a":' * 50_000,
        b"[" * 500_000,
        b'{"model": {"a": 1}, "messages": [], "input": []}',
        BODY[:-1],
        BODY + b"x",
    ],
    ids=lambda body: f"{body[:20]}",
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_a_body_that_is_no_request_is_refused(path, body):
    async with serving() as (host, session):
        status, _, found = await request(host, path, key=session.key, body=body)
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        assert session.requests == []


async def test_lone_surrogates_of_a_body_become_replacement_characters():
    async with serving() as (host, session):
        content = r"\ud83d\ude00 \uD83D\n \\ud83d \\\udc00 \u00e9"
        body = BODY.replace(json.dumps(ASK["content"]).encode(), f'"{content}"'.encode())
        assert body != BODY
        assert (await request(host, "/v1/chat/completions", key=session.key, body=body))[0] == 200
        [found] = session.requests
        assert found.messages[-1].content == "😀 �\n \\ud83d \\� é"


@pytest.mark.parametrize("depth", [50, 300, 900])
async def test_a_tool_schema_of_any_depth_is_served_or_refused(depth):
    schema = json.loads('{"a":' * depth + "{}" + "}" * depth)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with serving() as (host, session):
        body = CHAT | {"tools": [tool], "messages": [ASK]}
        assert (await request(host, "/v1/chat/completions", key=session.key, body=body))[0] in (200, 400)
        used = {"type": "tool_use", "id": "call_1", "name": "f", "input": schema}
        history = [ASK, {"role": "assistant", "content": [used]}, ASK]
        body = {"model": "m", "max_tokens": 9, "messages": history}
        assert (await request(host, "/v1/messages", key=session.key, body=body))[0] in (200, 400)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_an_internal_error_is_logged_and_not_shown(path, caplog):
    async with serving() as (host, session):
        session.script = [RuntimeError("/secret/path")]
        body = {"model": "m", "input": "x", "messages": [ASK], "max_tokens": 9, "token_ids": [1], "sampling_params": {}}
        with caplog.at_level(logging.ERROR):
            status, _, found = await request(host, path, key=session.key, body=body)
        assert status == 500 and "secret" not in json.dumps(found)
        assert "/secret/path" in caplog.text


async def test_a_websocket_is_not_served():
    async with serving() as (host, session):
        upgrade = ["upgrade: websocket", "connection: upgrade", "sec-websocket-key: a", "sec-websocket-version: 13"]
        found = await request(host, "/v1/models", key=session.key, method="GET", headers=upgrade)
        assert found[0] in (200, 400, 404)


@pytest.mark.parametrize("count", ["-1", "x", "²", "9" * 5000, ""])
async def test_a_retry_count_that_is_no_number_is_harmless(count):
    async with serving() as (host, session):
        headers = [f"x-stainless-retry-count: {count}"]
        status, _, _ = await request(host, "/v1/chat/completions", key=session.key, body=BODY, headers=headers)
        assert status == 200
        assert session.requests[0].is_retry == (count[:1] == "9")
