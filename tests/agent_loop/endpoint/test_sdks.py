"""The clients of OpenAI and Anthropic against the endpoint, over HTTP."""

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import ContextFull, RequestError, SessionEnded, SessionFailed, arguments_text
from tests.agent_loop.endpoint.scripted import (
    ASK,
    CALL,
    CALLING,
    SCHEMA,
    TOOL,
    answer,
    anthropic_client,
    openai_client,
    serving,
)

USER = Message(role="user", content=ASK["content"])
REPLY = Message(role="tool", content="4 degrees", tool_call_id=CALL.id)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3).map(arguments_text)


async def final(api, end, asked, *, stream):
    """The whole answer; `end` is the method of a stream that gives it."""
    if not stream:
        return await api.create(**asked)
    async with api.stream(**asked) as events:
        return await getattr(events, end)()


async def chat(client, history, *, stream):
    asked = {"model": "planner", "messages": history, "tools": [TOOL]}
    found = await final(client.chat.completions, "get_final_completion", asked, stream=stream)
    return [found.choices[0].message], [{"role": "tool", "tool_call_id": CALL.id, "content": "4 degrees"}]


async def respond(client, history, *, stream):
    tool = {"type": "function", **TOOL["function"], "strict": True}
    asked = {"model": "planner", "input": history, "tools": [tool]}
    found = await final(client.responses, "get_final_response", asked, stream=stream)
    return found.output, [{"type": "function_call_output", "call_id": CALL.id, "output": "4 degrees"}]


async def message(client, history, *, stream):
    tool = {"name": "weather", "description": "Forecast", "input_schema": SCHEMA}
    asked = {"model": "planner", "max_tokens": 99, "messages": history, "tools": [tool]}
    found = await final(client.messages, "get_final_message", asked, stream=stream)
    result = {"type": "tool_result", "tool_use_id": CALL.id, "content": [{"type": "text", "text": "4 degrees"}]}
    return [{"role": "assistant", "content": found.content}], [{"role": "user", "content": [result]}]


FORMATS = [(openai_client, chat), (openai_client, respond), (anthropic_client, message)]
each_format = pytest.mark.parametrize(("connect", "ask"), FORMATS, ids=["chat", "responses", "messages"])
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@each_format
@each_way
@pytest.mark.parametrize(
    "found", [CALLING, answer(""), answer("a\n b "), answer("", calls=(CALL,)), answer("", reasoning="r")]
)
async def test_an_answer_and_the_reply_to_its_call_come_back_in_the_next_request(connect, ask, stream, found):
    async with serving() as (host, session), connect(host, session) as client:
        session.script = [found, answer()]
        sent, reply = await ask(client, [ASK], stream=stream)
        await ask(client, [ASK, *sent, *(reply if found.message.tool_calls else [ASK])], stream=stream)
        first, second = session.requests
    assert first.messages == (USER,) and first.tools == second.tools == (TOOL,)
    assert second.messages == (USER, found.message, REPLY if found.message.tool_calls else USER)


@pytest.fixture
async def served():
    async with serving() as found:
        yield found


@pytest.fixture
async def client(served, connect):
    async with connect(*served) as client:
        yield client


@each_format
@each_way
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.text(),
    reasoning=st.none() | st.text(min_size=1),
    arguments=st.lists(ARGUMENTS, max_size=2),
    reply=st.text(min_size=1),
)
async def test_any_text_and_arguments_survive(
    served, client, connect, ask, stream, content, reasoning, arguments, reply
):
    calls = tuple(ToolUse(id=f"call_{n}", name="f", arguments=text) for n, text in enumerate(arguments))
    found = answer(content, reasoning=reasoning, calls=calls)
    session = served[1]
    session.script, session.requests = [found, answer()], []
    sent, _ = await ask(client, [ASK], stream=stream)
    await ask(client, [ASK, *sent, {"role": "user", "content": reply}], stream=stream)
    assert session.requests[1].messages == (USER, found.message, Message(role="user", content=reply))


CLIENT_SIDE = ("id", "index", "parsed", "parsed_arguments")


def plain(value):
    """Data of an SDK's objects, without the parts that a stream parses in the client and ids made of the request's."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None and k not in CLIENT_SIDE}
    return plain(value.model_dump()) if hasattr(value, "model_dump") else value


@each_format
async def test_a_stream_and_a_whole_answer_agree(connect, ask):
    async with serving() as (host, session), connect(host, session) as client:
        session.script = [CALLING]
        whole, stream = [await ask(client, [ASK], stream=stream) for stream in (False, True)]
        assert plain(whole) == plain(stream)


@each_format
@each_way
async def test_a_failed_call_is_repeated_and_marked(connect, ask, stream):
    async with serving() as (host, session), connect(host, session, max_retries=2) as client:
        session.script = [SessionFailed("the engine restarts"), answer()]
        await ask(client, [ASK], stream=stream)
        assert [asked.is_retry for asked in session.requests] == [False, True]


ERRORS = [
    (RequestError("n is 2"), "n is 2", "BadRequestError", "BadRequestError"),
    (ContextFull(prompt_tokens=70, max_tokens=64), "64", "BadRequestError", "BadRequestError"),
    (SessionEnded("rollout-0"), "rollout-0 has ended", "ConflictError", "ConflictError"),
    (SessionFailed("the engine fails"), "the engine fails", "InternalServerError", "ServiceUnavailableError"),
    (ValueError("a secret"), "internal error", "InternalServerError", "InternalServerError"),
]


@each_format
@each_way
@pytest.mark.parametrize(("error", "text", "of_openai", "of_anthropic"), ERRORS, ids=lambda e: getattr(e, "code", None))
async def test_an_error_is_an_exception_of_the_sdk(connect, ask, stream, error, text, of_openai, of_anthropic):
    async with serving() as (host, session), connect(host, session) as client:
        session.script = [error]
        kind = getattr(anthropic, of_anthropic) if ask is message else getattr(openai, of_openai)
        with pytest.raises(kind) as raised:
            await ask(client, [ASK], stream=stream)
        assert text in f"{raised.value}"
        assert "secret" not in f"{raised.value}"


STREAMS = [
    (openai_client, lambda client: client.chat.completions.create(model="m", messages=[ASK], stream=True)),
    (openai_client, lambda client: client.responses.create(model="m", input=[ASK], stream=True)),
    (anthropic_client, lambda client: client.messages.create(model="m", messages=[ASK], max_tokens=9, stream=True)),
]


@pytest.mark.parametrize(("connect", "start"), STREAMS, ids=["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("error", "text"),
    [(None, ""), (SessionFailed("the engine fails"), "the engine fails"), (ValueError("a secret"), "internal error")],
    ids=["answer", "error", "internal error"],
)
async def test_a_stream_that_waited_ends_with_an_answer_or_an_error(connect, start, error, text):
    async with serving(keep_alive_s=0.01) as (host, session), connect(host, session) as client:
        session.go.clear()
        session.script = [error or answer()]
        events = await start(client)  # a comment or ping has arrived
        session.go.set()
        if error is None:
            assert [event async for event in events]
            return
        with pytest.raises((openai.APIError, anthropic.APIError)) as raised:
            _ = [event async for event in events]
        assert text in f"{raised.value}"
        assert "secret" not in f"{raised.value}"


async def test_tokens_of_a_prompt_are_counted():
    async with serving() as (host, session), anthropic_client(host, session) as client:
        counted = await client.messages.count_tokens(model="planner", system="be brief", messages=[ASK])
        assert counted.input_tokens == 11
        assert session.requests[0].messages == (Message(role="system", content="be brief"), USER)


async def test_the_beta_client_of_anthropic_is_served():
    async with serving() as (host, session), anthropic_client(host, session) as client:
        found = await client.beta.messages.create(model="m", max_tokens=9, messages=[ASK], betas=["any-2026-01-01"])
        assert found.content[0].text == "4 degrees"


async def test_the_base_url_may_end_with_v1():
    async with serving() as (host, session):
        host.url += "/v1"
        async with openai_client(host, session) as client:
            await chat(client, [ASK], stream=False)
            await respond(client, [ASK], stream=False)


async def test_an_idempotency_key_reaches_the_session():
    async with serving() as (host, session), openai_client(host, session) as client:
        headers = {"idempotency-key": "once"}
        await client.chat.completions.create(model="planner", messages=[ASK], extra_headers=headers)
        assert session.requests[0].idempotency_key == "once"
