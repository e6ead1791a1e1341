"""Tools and rewards from functions."""

import json
import threading

import pytest

from agent_loop.loop import Message, Prompt
from agent_loop.reward import Completion, FunctionReward, score_in_time, weighted
from agent_loop.tools.functions import FunctionTool
from agent_loop.tools.tool import ToolCall, ToolRunner
from agent_loop.user_errors import user_line
from message_queue.errors import RewardError
from message_queue.tokens import StopReason
from tests.helpers.fakes import FakeReward


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two integers.

    Args:
        a: first factor.
    """
    return a * b


def prompt(**target):
    return Prompt(index=7, messages=(Message(role="user", content="?"),), target=target)


def completion(*turns):
    return Completion(turns=turns, stop_reason=StopReason.STOP)


async def call(tool, **arguments):
    [reply] = await ToolRunner([FunctionTool(tool)], timeout_s=5).run([ToolCall(tool.__name__, arguments)])
    return reply


async def score(rewards, *turns, **target):
    reward = FunctionReward(weighted(rewards))
    return await score_in_time(reward, prompt(**target), completion=completion(*turns), timeout_s=5)


def test_a_function_tool_is_described_by_its_signature_and_docstring():
    tool = FunctionTool(multiply)
    assert (tool.name, tool.description) == ("multiply", "Multiplies two integers.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "first factor."},
            "b": {"type": "integer", "default": 2},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "arguments, text, failed",
    [
        ({"a": 3, "b": 4}, "12", False),
        ({"a": "3"}, "6", False),
        ({"a": "three"}, "a:", True),
        ({"b": 1}, "a:", True),
        ({"a": 1, "c": 1}, "c:", True),
    ],
)
async def test_arguments_of_a_function_tool_are_checked_and_converted(arguments, text, failed):
    reply = await call(multiply, **arguments)
    assert text in reply.text and reply.failed == failed


async def test_the_result_of_a_function_tool_is_text_or_json():
    async def words(text: str) -> list[str]:
        """Splits a text."""
        return text.split()

    def greet(name: str) -> str:
        """Greets."""
        return f"hello {name}"

    assert (await call(words, text="a b")).text == '["a", "b"]'
    assert (await call(greet, name="b")).text == "hello b"


def without_docstring(a: int) -> int:
    return a


def without_annotation(a):
    """Has one."""
    return a


def without_schema(a: threading.Lock) -> None:
    """Has one."""


@pytest.mark.parametrize("function", [without_docstring, without_annotation, without_schema])
def test_a_function_tool_that_cannot_be_described_is_refused(function):
    with pytest.raises(ValueError, match=function.__name__):
        FunctionTool(function)


async def test_a_reward_function_gets_columns_prompt_and_completion_by_name():
    def exact(completion, answer, prompt, scale=1.0):
        return scale * (completion.text == answer) + prompt.index

    assert await score(exact, "no", "42", answer="42") == (8.0, {})
    assert await score(exact, "42", answer="42", scale=3) == (10.0, {})


async def test_weighted_rewards_are_added_and_named():
    async def short(completion):
        return len(completion.text) < 3

    def exact(completion, answer):
        return completion.text == answer

    assert await score([exact, short], "42", answer="42") == (2.0, {"exact": 1.0, "short": 1.0})
    found = await score({"right": exact, "brief": (0.5, short)}, "7", answer="42")
    assert found == (0.5, {"right": 0.0, "brief": 1.0})


def test_an_error_inside_a_library_names_the_line_of_the_user():
    with pytest.raises(ValueError) as error:
        json.loads("{")
    assert "test_functions.py" in user_line(error.value)
    assert user_line(ValueError("never raised")) == ""


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (FakeReward(seconds=30), r"limits\.reward_timeout_s"),
        (FakeReward(value=float("inf")), "inf"),
        (FunctionReward(weighted([lambda completion: float("nan")])), "nan"),
    ],
)
async def test_a_reward_without_a_finite_score_in_time_is_refused_with_its_prompt(reward, named):
    with pytest.raises(RewardError, match=f"prompt 7 .*{named}"):
        await score_in_time(reward, prompt(), completion=completion("x"), timeout_s=0.1)


def test_prompt_without_messages_is_refused():
    with pytest.raises(ValueError, match="prompt 3"):
        Prompt(index=3, messages=())


def test_a_reward_with_an_unknown_parameter_is_refused_with_the_columns():
    def exact(completion, anwser):
        return 0

    with pytest.raises(ValueError, match=r"anwser.*answer"):
        FunctionReward(weighted(exact)).check({"answer": "42"})


@pytest.mark.parametrize("rewards", [[], {}, {"a": 3}, [len, len], {"a": ("x", len)}])
def test_rewards_that_are_no_functions_are_refused(rewards):
    with pytest.raises(ValueError):
        weighted(rewards)


def test_a_reward_with_a_variable_number_of_parameters_is_refused():
    with pytest.raises(ValueError, match="named"):
        FunctionReward({"named": (1.0, lambda *anything: 0.0)})
