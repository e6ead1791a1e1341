import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.loop import RolloutError
from agent_loop.tools import (
    MalformedCall,
    PauseGate,
    ToolCall,
    ToolError,
    ToolReply,
    ToolRunner,
    describe_tool,
    parse_tool_calls,
    truncate,
)
from tests.helpers.fakes import FakeTool

CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>'


def raises(error):
    def behave(_arguments):
        raise error

    return behave


async def run(tool, *texts, timeout_s=1.0, **options):
    calls = [call for text in texts for call in parse_tool_calls(text)]
    return await ToolRunner([tool], timeout_s=timeout_s, **options).run(calls)


def test_one_call_is_read():
    assert parse_tool_calls(CALL) == [ToolCall("tool", {"x": 1})]


def test_several_calls_are_read_in_order_with_text_around_them():
    text = f"first {CALL} then {CALL.replace('1', '2')}."
    assert parse_tool_calls(text) == [ToolCall("tool", {"x": 1}), ToolCall("tool", {"x": 2})]


def test_text_without_a_marker_has_no_calls():
    assert parse_tool_calls('{"name": "tool"}</tool_call>') == []


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ('{"name": "tool"', "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "tool", "arguments": {"x": %s}}' % ("9" * 5000), "not valid JSON"),
        ('["tool"]', "not a JSON object"),
        ('{"arguments": {}}', 'string "name"'),
        ('{"name": "tool"}', 'object "arguments"'),
        ('{"name": "tool", "arguments": "x=1"}', 'object "arguments"'),
        ('{"name": 3, "arguments": {}}', 'string "name"'),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, cause):
    (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert cause in call.cause


def test_a_call_without_an_end_is_malformed_and_does_not_swallow_the_next():
    first, second = parse_tool_calls(f"<tool_call>{{ {CALL}")
    assert first == MalformedCall("the tool call has no </tool_call>")
    assert second == ToolCall("tool", {"x": 1})


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", "[", "1", "\n"])).map("".join))
def test_parsing_never_raises_and_finds_one_call_per_opening_marker(text):
    assert len(parse_tool_calls(text)) == text.count("<tool_call>")


async def test_replies_come_in_the_order_of_the_calls():
    tool = FakeTool(behave=lambda arguments: f"got {arguments['x']}")
    replies = await run(tool, CALL, "<tool_call>{</tool_call>", CALL.replace("1", "2"))
    assert [r.failed for r in replies] == [False, True, False]
    assert [r.text for r in replies if not r.failed] == ["got 1", "got 2"]


async def test_an_unknown_tool_is_told_to_the_model():
    replies = await run(FakeTool(name="other"), CALL)
    assert replies == [ToolReply("error: there is no such tool; the tools are other", failed=True)]


async def test_a_tool_error_is_shown_as_the_tool_put_it():
    assert await run(FakeTool(behave=raises(ToolError("x must be even"))), CALL) == [
        ToolReply("error: x must be even", failed=True)
    ]


@pytest.mark.parametrize("error", [KeyError("y"), ZeroDivisionError("division by zero"), TimeoutError("upstream")])
async def test_whatever_a_tool_raises_is_a_failed_reply_that_names_it(error):
    (reply,) = await run(FakeTool(behave=raises(error)), CALL)
    assert reply.failed
    assert type(error).__name__ in reply.text


async def test_a_slow_tool_is_cancelled_and_the_model_is_told():
    tool = FakeTool(seconds=30)
    replies = await run(tool, CALL, timeout_s=0.01)
    assert replies == [ToolReply("error: tool gave no answer in 0.01 s", failed=True)]
    assert tool.cancelled == 1


async def test_a_rollout_error_passes_through():
    with pytest.raises(RolloutError, match="sandbox gone"):
        await run(FakeTool(behave=raises(RolloutError("sandbox gone"))), CALL)


async def test_the_text_of_errors_is_the_tasks_own():
    assert await run(FakeTool(name="other"), CALL, error_text=lambda _: "error") == [ToolReply("error", failed=True)]


async def test_a_cancelled_rollout_cancels_its_tool():
    tool = FakeTool(seconds=30)
    task = asyncio.create_task(run(tool, CALL))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(tool.calls), tool.cancelled) == (1, 1)


async def test_no_tool_starts_while_the_gate_is_shut_and_each_runs_once_after():
    tool, gate = FakeTool(), PauseGate()
    gate.pause()
    task = asyncio.create_task(run(tool, CALL, CALL, gate=gate, timeout_s=0.02))
    await asyncio.sleep(0.05)  # longer than the time-out: the wait at the gate does not count
    assert tool.calls == []
    gate.resume()
    assert [r.failed for r in await task] == [False, False]
    assert len(tool.calls) == 2


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="name of its own"):
        ToolRunner([FakeTool(), FakeTool()], timeout_s=1)


def test_a_tool_is_described_in_the_format_of_chat_templates():
    assert describe_tool(FakeTool())["function"]["name"] == "tool"


@pytest.mark.parametrize(
    ("limit", "shown"), [(None, "abcdef"), (6, "abcdef"), (4, "abcd... (2 more characters left out)")]
)
def test_a_long_reply_is_cut_and_says_so(limit, shown):
    assert truncate("abcdef", max_chars=limit) == shown
