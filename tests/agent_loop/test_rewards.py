"""Rewards that many tasks need."""

import os
import signal
import sys
from decimal import Decimal

import numpy as np
import pytest

from agent_loop.loop import Message, Prompt
from agent_loop.reward import (
    Completion,
    FunctionReward,
    cosine_length,
    exact_match,
    in_processes,
    math_answer,
    overlong_penalty,
    regex_match,
    score_in_time,
    weighted,
)
from message_queue.errors import RolloutError
from message_queue.tokens import StopReason


def completion(text="", *, num_tokens=0):
    return Completion(turns=("before", text), stop_reason=StopReason.STOP, num_tokens=num_tokens)


async def score(rewards, text, **target):
    prompt = Prompt(index=0, messages=(Message(role="user", content="?"),), target=target)
    reward = FunctionReward(weighted(rewards))
    return await score_in_time(reward, prompt, completion=completion(text), timeout_s=120)


@pytest.mark.parametrize(
    ("text", "answer", "right"), [("#### 3 then #### 42", "42", 1), ("#### 42 then #### 3", "42", 0), ("42", "42", 0)]
)
async def test_regex_match_compares_the_first_group_of_the_last_match(text, answer, right):
    assert (await score(regex_match(r"####\s*(\d+)"), text, answer=answer)).value == right
    assert (await score(regex_match(r"\d+$"), "is 42", answer="42")).value == 1


@pytest.mark.parametrize(("num_tokens", "value"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (300, -1)])
def test_overlong_penalty_falls_linearly_inside_the_buffer(num_tokens, value):
    assert overlong_penalty(max_tokens=100, buffer=20)(completion(num_tokens=num_tokens)) == value


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        *(("51", answer, True) for answer in (51, 51.0, "51", "51.0", " 51 ", Decimal(51), Decimal("51.00"))),
        *(("51", answer, True) for answer in (np.int64(51), np.float32(51), np.float64(51))),
        *(
            ("51", answer, False)
            for answer in (51.5, "51.5", 5.1, "510", None, float("nan"), float("inf"), [51], "51a")
        ),
        (" 42\n", "42", True),
        ("42.", "42", False),
        ("", "42", False),
        ("-3", -3.0, True),
        ("10000000000000000", 1e16, True),
        ("0.5", 0.5, True),
        ("0.5", np.float32(0.5), True),
        ("51.0", 51.0, True),
        ("1", True, False),
        ("0", False, False),
        ("1", np.True_, False),
        ("True", True, True),
        ("", None, False),
        ("nan", None, False),
        ("v1", "v1.0", False),
        ("1.0", "1.0.0", False),
    ],
)
async def test_an_answer_is_the_text_or_the_whole_number_that_the_column_holds(text, answer, right):
    assert (await score(exact_match, text, answer=answer)).value == right
    assert (await score(regex_match("#### *(.*)"), f"#### {text}", answer=answer)).value == (right and text != "")


async def test_a_group_that_did_not_match_is_no_answer():
    optional = regex_match("#### *(-?[0-9]+)?")
    for text, answer, right in (
        ("#### no", "7", 0),
        ("#### 7", "7", 1),
        ("#### 7 #### no", "7", 0),
        ("#### no", "None", 0),
        ("#### no", "", 0),
    ):
        assert (await score(optional, text, answer=answer)).value == right


async def test_math_answer_accepts_equal_expressions():
    pytest.importorskip("math_verify")
    reward = math_answer()
    for text, answer, right in (
        (r"so the answer is $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"$x = \frac{2}{4}$", r"\frac{1}{2}", 1),
        (r"$\boxed{3}$", "0.5", 0),
        ("no number at all", "0.5", 0),
        (r"first \boxed{8}, no: \boxed{7}", "7", 1),
        (r"first \boxed{8}, no: \boxed{7}", "8", 0),
        (r"\boxed{1}, \boxed{2}", "1,2", 1),
        (r"\boxed{7} and \boxed{", "7", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"so \boxed{12\%}", "12%", 1),
        (r"so \boxed{12\%}", r"12\%", 1),
        (r"so \boxed{12\%}", "0.12", 1),
        (r"so $\boxed{12.5\%}$", 12.5, 1),
        (r"so \boxed{12%}", "12%", 1),
        (r"so \boxed{13\%}", "12%", 0),
        ("so 12%", "12%", 1),
        (r"\boxed{" * 300, "7", 0),
        (r"\boxed{51}", 51.0, 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", 1),
        (r"\boxed{8} and $7$", "7", 0),
    ):
        assert (await score({"math": reward}, text, answer=answer)).value == right, (text, answer)


async def test_in_processes_runs_elsewhere_and_survives_the_death_of_a_process():
    def process(completion):
        if completion.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    reward = in_processes(process)
    first = (await score(reward, "")).value
    assert first not in (0, os.getpid()) and (await score(reward, "")).value == first
    with pytest.raises(RolloutError, match=r"prompt 0 .*reward process died"):
        await score(reward, "die")
    assert (await score(reward, "")).value not in (first, os.getpid())


class OwnError(Exception):
    """Cannot be sent: it is made of two arguments and shows one."""

    def __init__(self, text, number):
        super().__init__(text)


@pytest.mark.parametrize("where", [lambda function: function, in_processes], ids=["in_a_thread", "in_processes"])
@pytest.mark.parametrize("name", ["OwnError: absent", "StopIteration:", "SystemExit: 3"])
async def test_an_error_of_a_reward_names_the_line_of_the_user_and_the_prompt(name, where):
    def fails(completion):
        if name[0] == "O":
            raise OwnError("absent", 1)
        return next(iter(())) if name[1] == "t" else sys.exit(3)

    with pytest.raises(RolloutError) as error:
        await score(where(fails), "")
    assert f"{name} ({__file__}:" in str(error.value) and "in fails)" in str(error.value)
    assert "reward fails of prompt 0" in str(error.value)


@pytest.mark.parametrize(
    ("text", "num_tokens", "value"),
    [("42", 0, 1.0), ("42", 50, 0.75), ("42", 100, 0.5), ("42", 300, 0.5), ("7", 0, -1.0), ("7", 100, -0.5)],
)
async def test_cosine_length_prefers_short_right_and_long_wrong_answers(text, num_tokens, value):
    reward = FunctionReward(weighted(cosine_length(exact_match, max_tokens=100)))
    prompt = Prompt(index=0, messages=(Message(role="user", content="?"),), target={"answer": "42"})
    reward.check(prompt.target)
    score = await reward.score(prompt, completion=completion(text, num_tokens=num_tokens))
    assert score.value == pytest.approx(value)


async def test_cosine_length_takes_a_reward_without_the_completion_and_an_async_one():
    async def given(answer):
        return answer == "42"

    assert (await score(cosine_length(given, max_tokens=100), "", answer="42")).value == 1
    with pytest.raises(ValueError, match="answer"):
        FunctionReward(weighted(cosine_length(given, max_tokens=100))).check({"other": "42"})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: cosine_length(exact_match, max_tokens=0), "max_tokens"),
        (lambda: in_processes(exact_match, processes=0), "processes"),
        (lambda: overlong_penalty(max_tokens=100, buffer=0), "buffer"),
        (lambda: overlong_penalty(max_tokens=100, buffer=101), "buffer"),
    ],
)
def test_a_reward_of_an_impossible_size_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()
