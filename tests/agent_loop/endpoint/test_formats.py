"""Requests, answers and errors of each wire format, without a server."""

import importlib
import json
import warnings
from http import HTTPStatus

import pytest
from anthropic.types import ErrorResponse, RawMessageStreamEvent
from anthropic.types import Message as AnthropicMessage
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import (
    ContextFull,
    EndpointError,
    RequestError,
    SessionEnded,
    SessionFailed,
    TokenRequest,
)
from agent_loop.programs.endpoint import chat_completions, messages, responses, tokens
from agent_loop.programs.endpoint.body import Call
from tests.agent_loop.endpoint.scripted import ASK, CALL, CALLING, SCHEMA, TOOL, answer, sse_data

TOKENS = answer(finish="length", prompt_tokens=3, cached_tokens=2)
BODIES = {
    chat_completions: {"model": "planner", "messages": [ASK]},
    responses: {"model": "planner", "input": [ASK]},
    messages: {"model": "planner", "messages": [ASK], "max_tokens": 9},
    tokens: {"token_ids": [1, 2, 3], "sampling_params": {"logprobs": 1}},
}
CHATS = (chat_completions, responses, messages)
USER = Message(role="user", content=ASK["content"])
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def call(body):
    return Call(body=body, id="7", created=9)


def read(form, **fields):
    return form.read(call(BODIES[form] | fields))


def name_of(form):
    return form.__name__.rpartition(".")[2] if hasattr(form, "__name__") else None


@pytest.mark.parametrize("form", CHATS, ids=name_of)
def test_a_request_of_each_format_is_the_same_request(form):
    tool = TOOL["function"] | {"type": "function"} if form is responses else TOOL
    if form is messages:
        tool = {"name": "weather", "description": "Forecast", "input_schema": SCHEMA}
    limit = {chat_completions: "max_completion_tokens", responses: "max_output_tokens", messages: "max_tokens"}[form]
    system = {chat_completions: {}, responses: {"instructions": "be brief"}, messages: {"system": "be brief"}}[form]
    if form is chat_completions:
        system = {"messages": [{"role": "developer", "content": "be brief"}, ASK]}
    found = form.read(call(BODIES[form] | system | {limit: 9, "tools": [tool]}))
    assert found.messages == (Message(role="system", content="be brief"), USER)
    assert found.tools == (TOOL,)
    assert (found.agent, found.max_tokens) == ("planner", 9)


@pytest.mark.parametrize("form", CHATS, ids=name_of)
def test_sampling_settings_of_a_request_are_ignored(form):
    settings = {"temperature": 0.1, "top_p": 0.5, "top_k": 3, "seed": 1, "presence_penalty": 1.0, "unknown": {}}
    assert read(form, **settings) == read(form)


@pytest.mark.parametrize("form", CHATS, ids=name_of)
def test_tool_choice_none_shows_no_tools(form):
    tool = {"type": "custom", "input_schema": SCHEMA} if form is messages else {}
    none = {"type": "none"} if form is messages else "none"
    assert read(form, tools=[TOOL | TOOL["function"] | tool], tool_choice=none).tools == ()
    forced = {"type": "any"} if form is messages else "required"
    assert len(read(form, tools=[TOOL | TOOL["function"] | tool], tool_choice=forced).tools) == 1


@pytest.mark.parametrize(
    ("form", "fields", "named"),
    [
        (chat_completions, {"n": 2}, "n"),
        (chat_completions, {"functions": [{"name": "f"}]}, "functions"),
        (chat_completions, {"logit_bias": {"5": 1}}, "logit_bias"),
        (chat_completions, {"response_format": {"type": "json_schema"}}, "response_format.type"),
        (chat_completions, {"top_logprobs": 3}, "top_logprobs"),
        (chat_completions, {"modalities": ["text", "audio"]}, "modalities"),
        (chat_completions, {"store": True}, "store"),
        (chat_completions, {"messages": []}, "messages"),
        (chat_completions, {"messages": [1]}, "messages[0]"),
        (chat_completions, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (chat_completions, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat_completions, {"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
        (chat_completions, {"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        (chat_completions, {"messages": [{"role": "assistant", "function_call": {}}, {}]}, "messages[1].role"),
        (chat_completions, {"tools": [{"type": "custom"}]}, "tools[0].type"),
        (chat_completions, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (chat_completions, {"max_tokens": 0}, "max_tokens"),
        (chat_completions, {"max_tokens": True}, "max_tokens"),
        (chat_completions, {"stop": [""]}, "stop"),
        (chat_completions, {"model": None}, "model"),
        (chat_completions, {"stream_options": 3}, "stream_options"),
        (responses, {"background": True}, "background"),
        (responses, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (responses, {"conversation": "conv_1"}, "conversation"),
        (responses, {"store": True}, "store"),
        (responses, {"text": {"format": {"type": "json_schema"}}}, "text.format.type"),
        (responses, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (responses, {"include": ["message.output_text.logprobs"]}, "include"),
        (responses, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (responses, {"input": []}, "input"),
        (messages, {"max_tokens": None}, "max_tokens"),
        (messages, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.type"),
        (messages, {"mcp_servers": [{}]}, "mcp_servers"),
        (messages, {"messages": [ASK, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (messages, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (messages, {"messages": [{"role": "user", "content": []}]}, "messages"),
        (tokens, {"token_ids": []}, "token_ids"),
        (tokens, {"token_ids": [-1]}, "token_ids"),
        (tokens, {"token_ids": [2**31]}, "token_ids"),
        (tokens, {"token_ids": [1.5]}, "token_ids"),
        (tokens, {"sampling_params": None}, "sampling_params"),
        (tokens, {"sampling_params": {"n": 2}}, "sampling_params.n"),
        (tokens, {"sampling_params": {"stop": ["."]}}, "sampling_params.stop"),
        (tokens, {"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        (tokens, {"output_mode": "text"}, "output_mode"),
        (tokens, {"features": {"mm_hashes": {}}}, "features"),
    ],
    ids=lambda value: name_of(value) or f"{value}"[:40],
)
def test_a_request_that_cannot_be_met_is_refused_by_name(form, fields, named):
    with pytest.raises(RequestError) as refused:
        read(form, **fields)
    assert refused.value.field == named
    assert named in f"{refused.value}"


def test_an_empty_input_is_an_empty_message():
    assert read(responses, input="").messages == (Message(role="user", content=""),)


def test_texts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}, ASK]
    for form in (chat_completions, messages):
        assert [m.content for m in read(form, messages=history).messages[:2]] == ["a\nb", "ab"]


def test_tool_results_of_anthropic_are_messages_of_their_own():
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "4"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "call_2"},
        {"type": "text", "text": "And tomorrow?"},
    ]
    assert read(messages, messages=[{"role": "user", "content": results}]).messages == (
        Message(role="tool", content="4", tool_call_id="call_1"),
        Message(role="tool", content="", tool_call_id="call_2"),
        Message(role="user", content="And tomorrow?"),
    )


def test_the_changing_header_of_claude_code_is_no_part_of_the_system_text():
    system = [{"type": "text", "text": f"x-anthropic-billing-header: {n}"} for n in (1, 2)]
    found = read(messages, system=[*system, {"type": "text", "text": "be brief", "cache_control": {}}])
    assert found.messages == (Message(role="system", content="be brief"), USER)


def test_items_of_one_turn_are_one_message():
    items = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m"}]},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "id": "rs2", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "m"},
        {"role": "assistant", "content": "n"},
    ]
    calls = (ToolUse(id="call_1", name="f", arguments="{}"), ToolUse(id="call_2", name="g", arguments=""))
    assert read(responses, input=items).messages == (
        Message(role="assistant", content="m", reasoning="r", tool_calls=calls),
        Message(role="tool", content="4", tool_call_id="call_1"),
        Message(role="assistant", content="m"),
        Message(role="assistant", content="n"),
    )


ANSWERS = {
    "text": answer(),
    "empty": answer(""),
    "call": CALLING,
    "only a call": answer("", calls=(CALL, CALL)),
    "cut": answer("4 deg", finish="length", reasoning="short"),
}


@pytest.mark.parametrize("found", ANSWERS.values(), ids=ANSWERS)
def test_answers_and_events_have_the_types_of_the_sdks(found):
    body = BODIES[chat_completions] | {"logprobs": True, "stream_options": {"include_usage": True}}
    ChatCompletion.model_validate(chat_completions.write(found, call(body)))
    for chunk in sse_data(chat_completions.FORMAT.stream(found, call(body))):
        ChatCompletionChunk.model_validate(chunk)
    asked = call(BODIES[responses])
    Response.model_validate(responses.write(found, asked))
    events = sse_data(responses.FORMAT.stream(found, asked))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    asked = call(BODIES[messages])
    AnthropicMessage.model_validate(messages.write(found, asked))
    for event in sse_data(messages.FORMAT.stream(found, asked)):
        TypeAdapter(RawMessageStreamEvent).validate_python(event)


def test_answers_in_tokens_have_the_types_of_vllm():
    with warnings.catch_warnings(action="ignore"):  # of torch, in its own modules
        protocol = importlib.import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    asked = call(BODIES[tokens] | {"stream_options": {"include_usage": True}, "return_token_ids": True})
    whole = protocol.GenerateTokensResponse.model_validate(tokens.write(TOKENS, asked))
    first, last = (
        protocol.GenerateTokensStreamResponse.model_validate(e) for e in sse_data(tokens.FORMAT.stream(TOKENS, asked))
    )
    for found in (whole, first):
        (choice,) = found.choices
        assert choice.token_ids == [5, 6]
        assert choice.finish_reason == "length"
        assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.25]
        assert found.prompt_token_ids == [1, 2, 3]
    sent = tokens.write(TOKENS, asked)["choices"][0]["logprobs"]["content"]
    assert [(each["token_id"], each["token"]) for each in sent] == [(5, "token_id:5"), (6, "token_id:6")]
    assert whole.usage == last.usage
    assert (whole.usage.total_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (5, 2)


def test_a_request_in_tokens_takes_limits_and_stop_tokens():
    sampling = {"max_tokens": 4, "stop_token_ids": [7], "temperature": 0.0, "logprobs": 0}
    assert read(tokens, sampling_params=sampling, model="solver") == TokenRequest(
        token_ids=(1, 2, 3), agent="solver", max_tokens=4, stop_token_ids=(7,)
    )


def test_cached_tokens_are_counted_as_each_format_does():
    chat = chat_completions.write(answer(), call(BODIES[chat_completions]))["usage"]
    assert (chat["prompt_tokens"], chat["prompt_tokens_details"]["cached_tokens"], chat["total_tokens"]) == (11, 8, 13)
    response = responses.write(answer(), call(BODIES[responses]))["usage"]
    assert (response["input_tokens"], response["input_tokens_details"]["cached_tokens"]) == (11, 8)
    message = messages.write(answer(), call(BODIES[messages]))["usage"]
    assert (message["input_tokens"], message["cache_read_input_tokens"], message["output_tokens"]) == (3, 8, 2)


def test_the_end_of_an_answer_has_the_name_of_each_format():
    def ends(found):
        chat = chat_completions.write(found, call(BODIES[chat_completions]))["choices"][0]["finish_reason"]
        response = responses.write(found, call(BODIES[responses]))
        message = messages.write(found, call(BODIES[messages]))
        return chat, response["status"], message["stop_reason"], message["stop_sequence"]

    assert ends(answer()) == ("stop", "completed", "end_turn", None)
    assert ends(CALLING) == ("tool_calls", "completed", "tool_use", None)
    assert ends(answer(finish="length")) == ("length", "incomplete", "max_tokens", None)
    assert ends(answer(stop_text="END")) == ("stop", "completed", "stop_sequence", "END")


ERRORS = [
    (RequestError("n is 2", field="n"), "invalid_request_error", "invalid_request_error"),
    (EndpointError("no", status=HTTPStatus.UNAUTHORIZED), "authentication_error", "authentication_error"),
    (EndpointError("no", status=HTTPStatus.FORBIDDEN), "permission_error", "permission_error"),
    (EndpointError("no", status=HTTPStatus.NOT_FOUND), "invalid_request_error", "not_found_error"),
    (EndpointError("no", status=HTTPStatus.TOO_MANY_REQUESTS), "rate_limit_error", "rate_limit_error"),
    (EndpointError("no", status=HTTPStatus.INTERNAL_SERVER_ERROR), "server_error", "api_error"),
    (SessionFailed("no"), "server_error", "overloaded_error"),
]


@pytest.mark.parametrize(("error", "of_openai", "of_anthropic"), ERRORS, ids=lambda e: type(e).__name__)
def test_errors_have_the_shape_of_each_format(error, of_openai, of_anthropic):
    assert chat_completions.error(error)["error"]["type"] == of_openai
    assert ErrorResponse.model_validate(messages.error(error)).error.type == of_anthropic
    assert tokens.error(error)["error"]["code"] == error.status


def test_a_full_context_has_the_code_or_text_that_agents_look_for():
    error = ContextFull(prompt_tokens=70, max_tokens=64)
    assert chat_completions.error(error)["error"]["code"] == "context_length_exceeded"
    assert messages.error(error)["error"]["message"] == "prompt is too long: 70 tokens > 64 maximum"


def test_an_error_of_a_stream_is_an_event_of_the_format():
    error = SessionEnded("rollout-0")
    assert sse_data(chat_completions.FORMAT.error_event(error)) == [chat_completions.error(error)]
    (event,) = sse_data(responses.FORMAT.error_event(error))
    assert TypeAdapter(ResponseStreamEvent).validate_python(event).code == "session_ended"
    assert messages.FORMAT.error_event(error).startswith("event: error\n")
    assert sse_data(messages.FORMAT.error_event(error)) == [messages.error(error)]


def test_logprobs_are_sent_when_they_are_asked_for():
    asked = call(BODIES[chat_completions] | {"logprobs": True})
    whole = chat_completions.write(answer(), asked)["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["logprob"]) for token in whole] == [("token_id:5", -0.5), ("token_id:6", -0.25)]
    first, *rest = sse_data(chat_completions.FORMAT.stream(answer(), asked))
    assert first["choices"][0]["logprobs"]["content"] == whole
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in rest)
    assert chat_completions.write(answer(), call(BODIES[chat_completions]))["choices"][0]["logprobs"] is None


def test_a_long_value_is_cut_in_an_error():
    with pytest.raises(RequestError) as refused:
        read(chat_completions, n="x" * 10_000)
    assert len(json.dumps(chat_completions.error(refused.value))) < 400


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE = {
    chat_completions: BODIES[chat_completions]
    | {
        "messages": [
            {"role": "system", "content": PARTS},
            ASK,
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": PARTS},
        ],
        "tools": [TOOL],
        "stream_options": {"include_usage": True},
        "stop": ["."],
    },
    responses: BODIES[responses]
    | {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "r"}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "4"},
        ],
        "tools": [{"type": "function", **TOOL["function"]}],
        "text": {"format": {"type": "text"}},
    },
    messages: BODIES[messages]
    | {
        "system": PARTS,
        "messages": [
            {"role": "user", "content": PARTS},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": [1]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": PARTS}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
    },
    tokens: BODIES[tokens] | {"stream_options": {}, "request_id": "a", "return_token_ids": True},
}

NAMES = (
    "agent arguments call_id content description format function id include include_usage input input_schema "
    "instructions is_error max_completion_tokens max_output_tokens max_tokens messages model n name output "
    "output_config parameters reasoning_content request_id role sampling_params stop stop_sequences stop_token_ids "
    "stream stream_options summary system text thinking token_ids tool_call_id tool_calls tool_choice tool_use_id "
    "tools type"
)
TEXTS = (
    "assistant auto custom developer function function_call function_call_output input_text message none output_text "
    "reasoning system text thinking tokens tool tool_result tool_use user"
)
KEYS, WORDS = st.sampled_from(NAMES.split()), st.sampled_from(["", *TEXTS.split()])
LEAVES = st.none() | st.booleans() | st.integers(-1, 3) | st.floats(allow_nan=False) | WORDS
FIELDS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=25,
)


@pytest.mark.parametrize("form", [*CHATS, tokens], ids=name_of)
@given(fields=st.dictionaries(KEYS, FIELDS, max_size=4), at=st.integers(0, 10**6), value=FIELDS)
def test_any_body_is_read_and_answered_or_refused(form, fields, at, value):
    body = altered(WHOLE[form], at=at, value=value) | fields
    asked = call(body)
    try:
        form.FORMAT.read(asked)
    except RequestError as refused:
        json.dumps(form.FORMAT.error(refused))
        return
    found = TOKENS if form is tokens else CALLING
    json.dumps(form.write(found, asked))
    assert form.FORMAT.stream(found, asked)


def altered(body, *, at, value):
    """The body with one of its values replaced: the one with number `at`, counted in depth."""
    copy = json.loads(json.dumps(body))
    places = list(walk(copy))
    holder, key = places[at % len(places)]
    holder[key] = value
    return copy


def walk(value):
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from walk(value[key])
