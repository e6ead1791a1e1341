import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools import (
    MalformedCall,
    PauseGate,
    ToolCall,
    ToolError,
    ToolReply,
    ToolRunner,
    parse_tool_calls,
    truncate,
)
from tests.helpers.fakes import FakeTool

pytestmark = pytest.mark.virtual_time

CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>'


async def run(tool, *texts, timeout_s=1.0, **options):
    calls = [call for text in texts for call in parse_tool_calls(text)]
    return await ToolRunner([tool], timeout_s=timeout_s, **options).run(calls)


def test_tool_calls_are_read_in_order_with_text_around_them():
    text = f"first {CALL} then {CALL.replace('1', '2')}."
    assert parse_tool_calls(text) == [ToolCall("tool", {"x": 1}), ToolCall("tool", {"x": 2})]
    assert parse_tool_calls('{"name": "tool"}</tool_call>') == []


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


def test_truncate_cuts_a_long_reply_and_notes_the_count():
    assert [truncate("abcdef", max_chars=limit) for limit in (None, 6)] == ["abcdef"] * 2
    assert truncate("abcdef", max_chars=4).startswith("abcd... (2 ")
