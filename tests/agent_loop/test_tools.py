import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.tool import (
    MAX_DEPTH,
    MalformedCall,
    PauseGate,
    ToolCall,
    ToolReply,
    ToolRunner,
    opened_reasoning,
    parse_tool_calls,
    split_turn,
    truncate,
)
from message_queue.errors import ToolError
from tests.helpers.fakes import FakeTool

pytestmark = pytest.mark.virtual_time

CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>'


async def run(tool, *texts, timeout_s=1.0, **options):
    calls = [call for text in texts for call in parse_tool_calls(text)]
    return await ToolRunner([tool], timeout_s=timeout_s, **options).run(calls)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ('{"name": "tool"', "JSON"),
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
        ('{"name": "tool", "arguments": {"x": %s}}' % ("9" * 5000), "JSON"),
        ('["tool"]', "JSON object"),
        ('{"arguments": {}}', 'string "name"'),
        ('{"name": "tool"}', 'object "arguments"'),
        ('{"name": "tool", "arguments": "x=1"}', 'object "arguments"'),
        ('{"name": 3, "arguments": {}}', 'string "name"'),
        ('{"name": "tool", "arguments": {}} and more', "JSON"),
        *(
            (f'{{"name": "tool", "arguments": {{"x": [{x}]}}}}', "NaN")
            for x in ("NaN", "Infinity", "-Infinity", "1e400")
        ),
        ('{"name": "tool", "arguments": {"x": %s}}' % ("[" * MAX_DEPTH + "]" * MAX_DEPTH), "nested"),
        ('{"name": "tool", "arguments": {"x": %s}}' % ('{"a":' * 300 + "1" + "}" * 300), "nested"),
    ],
)
def test_malformed_tool_call_names_its_cause(body, cause):
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert cause in call.cause


def test_tool_call_without_an_end_does_not_swallow_the_next():
    first, second = parse_tool_calls(f"<tool_call>{{ {CALL}")
    assert isinstance(first, MalformedCall) and "</tool_call>" in first.cause
    assert second == ToolCall("tool", {"x": 1})


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", "[", "1", "\n"])).map("".join))
def test_parse_tool_calls_finds_one_call_per_opening_marker(text):
    assert len(parse_tool_calls(text)) == text.count("<tool_call>")


def called(text):
    """Arguments of the calls."""
    return [call.arguments if isinstance(call, ToolCall) else call.cause for call in parse_tool_calls(text)]


ONE, TWO = (CALL.replace("1", number) for number in "12")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>I could {ONE}</think>\n{TWO}", [2]),
        (f"\n<think>I could {ONE}</think>", []),
        (f"<think>I could {ONE}", []),
        (f"Hm. <think>{ONE}</think> {TWO} <think> or {ONE}", [2]),
        (f"I could {ONE}\n</think>\n{TWO}", [2]),
        (f"<think>a</think>{ONE}</think>{TWO}", [1, 2]),
        (f"{ONE}<think></think>{TWO}", [1, 2]),
        (f"<think><think>{ONE}</think>{TWO}", [2]),
    ],
)
def test_a_call_in_reasoning_is_text(text, calls):
    assert called(text) == [{"x": x} for x in calls]


@pytest.mark.parametrize("marker", ["<tool_call>", "</tool_call>", "<think>", "</think>", "</tool_call><tool_call>{"])
def test_a_marker_in_the_json_of_a_call_is_text(marker):
    call = '<tool_call>{"name": "tool", "arguments": %s}</tool_call>'
    values = {"x": f"a {marker} b", marker: [marker]}
    assert called(f"{call % json.dumps(values)}{ONE}") == [values, {"x": 1}]
    assert called(f"<think>{ONE}</think>{call % json.dumps(values)}") == [values]


def test_a_turn_has_reasoning_content_and_the_text_of_its_calls():
    assert split_turn(f"<think>\nhm</think>\nso {ONE} and {TWO} end") == (
        "\nhm",
        "\nso ",
        [(ToolCall("tool", {"x": 1}), ONE), (ToolCall("tool", {"x": 2}), TWO)],
    )
    assert split_turn(f"hm</think>so{ONE}")[:2] == ("hm", "so")
    assert split_turn(f"<think>hm{ONE}") == (f"hm{ONE}", "", [])
    assert split_turn("so <think>hm</think>")[:2] == (None, "so <think>hm</think>")


@pytest.mark.parametrize(
    ("before", "opens"), [("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)]
)
def test_a_prompt_that_ends_with_think_opens_the_reasoning(before, opens):
    assert called(opened_reasoning(f"<|im_start|>assistant\n{before}") + ONE) == ([] if opens else [{"x": 1}])


@given(
    st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", '{"', '"', "a", " "])).map(
        "".join
    )
)
def test_the_parts_of_a_turn_are_in_its_text(text):
    reasoning, content, calls = split_turn(text)
    at = 0
    for part in (reasoning or "", content, *(said for _, said in calls)):
        at = text.index(part, at) + len(part)


@pytest.mark.parametrize(
    ("sampled", "seen"),
    [
        (r"smile \ud83d", "smile \ufffd"),
        (r"\udc00\ud800", "\ufffd\ufffd"),
        (r"\ud83d\ude00", "😀"),
        (r"a\u0000b", "a\x00b"),
    ],
)
def test_sampled_surrogates_become_safe_in_names_keys_and_values(sampled, seen):
    text = '<tool_call>{"name": "%s", "arguments": {"%s": ["%s", {"a": "%s"}]}}</tool_call>' % ((sampled,) * 4)
    assert text.isascii()
    assert parse_tool_calls(text) == [ToolCall(seen, {seen: [seen, {"a": seen}]})]


async def test_the_reply_of_a_tool_is_safe():
    def broken(_arguments):
        raise ToolError("no \ud83d")

    [reply] = await run(FakeTool(behave=lambda _: "smile \ud83d"), CALL)
    [failed] = await run(FakeTool(behave=broken), CALL)
    assert (reply.text, failed.text) == ("smile \ufffd", "error: no \ufffd")


async def test_tool_replies_come_in_the_order_of_the_calls():
    tool = FakeTool(behave=lambda arguments: f"got {arguments['x']}")
    replies = await run(tool, CALL, "<tool_call>{</tool_call>", CALL.replace("1", "2"))
    assert [r.failed for r in replies] == [False, True, False]
    assert [r.text for r in replies if not r.failed] == ["got 1", "got 2"]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ToolError("x must be even"), "error: x must be even"),
        (KeyError("y"), "KeyError"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError"),
        (TimeoutError("upstream"), "TimeoutError"),
    ],
)
async def test_error_of_a_tool_is_a_failed_reply_that_names_it(error, shown):
    def behave(_):
        raise error

    (reply,) = await run(FakeTool(behave=behave), CALL)
    assert reply.failed and shown in reply.text


async def test_unknown_tool_is_a_failed_reply_in_the_words_of_the_task():
    (reply,) = await run(FakeTool(name="other"), CALL)
    assert reply.failed and "other" in reply.text
    assert await run(FakeTool(name="other"), CALL, error_text=lambda _: "error") == [ToolReply("error", failed=True)]


async def test_slow_tool_is_cancelled_and_a_failed_reply():
    tool = FakeTool(seconds=30)
    (reply,) = await run(tool, CALL, timeout_s=0.01)
    assert reply.failed and "0.01 s" in reply.text
    assert tool.cancelled == 1


async def test_tools_wait_at_a_closed_gate_and_run_once_after_it_opens():
    tool, gate = FakeTool(), PauseGate()
    gate.pause()
    task = asyncio.create_task(run(tool, CALL, CALL, gate=gate, timeout_s=0.02))
    await asyncio.sleep(0.05)  # longer than the time-out: the wait at the gate does not count
    assert tool.calls == []
    gate.resume()
    assert [r.failed for r in await task] == [False, False]
    assert len(tool.calls) == 2


def test_tool_runner_refuses_two_tools_with_one_name():
    with pytest.raises(ValueError, match="'tool', 'tool'"):
        ToolRunner([FakeTool(), FakeTool()], timeout_s=1)


def test_truncate_leaves_a_reply_of_the_largest_size_unchanged():
    assert [truncate("abcdef", max_chars=limit) for limit in (None, 6)] == ["abcdef"] * 2
