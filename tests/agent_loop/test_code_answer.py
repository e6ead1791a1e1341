"""The reward that runs the code of an answer against the tests of its row."""

import json

import pytest

from agent_loop.code_answer import code_answer
from agent_loop.functions import FunctionReward, weighted
from agent_loop.loop import Message, Prompt
from agent_loop.reward import Completion, RewardError, score_in_time
from agent_loop.sandbox import SandboxError, SandboxLimits, check_sandbox
from message_queue.tokens import StopReason

try:
    check_sandbox()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0"]
PAIRS = [{"input": "2\n3\n", "output": "5\n"}, {"input": "0\n0", "output": "0"}]
ADD = "print(int(input()) + int(input()))\n"


def fenced(code, language="python"):
    return f"```{language}\n{code}```"


async def score(text, tests, **options):
    prompt = Prompt(index=0, messages=(Message(role="user", content="?"),), target={"tests": tests})
    completion = Completion(turns=(text,), stop_reason=StopReason.STOP)
    reward = FunctionReward(weighted(code_answer(**options)))
    return (await score_in_time(reward, prompt, completion=completion, timeout_s=120)).value


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        (ASSERTS, DOUBLE),  # MBPP
        ("\n".join(ASSERTS), DOUBLE),
        (f"def check(candidate):\n    {ASSERTS[1].replace('double', 'candidate')}\ncheck(double)", DOUBLE),  # HumanEval
        (json.dumps(ASSERTS), DOUBLE),
        (PAIRS, ADD),
        (json.dumps({"inputs": ["2\n3\n", ["0", "0"]], "outputs": ["5\n", ["0"]]}), ADD),  # TACO, APPS
    ],
    ids=["list", "text", "check", "json", "pairs", "columns"],
)
async def test_code_answer_is_1_if_all_tests_pass_and_0_otherwise(tests, code):
    assert await score(f"Like this:\n{fenced(code)}\nIt works.", tests) == 1
    assert await score(fenced(code.replace("2 * x", "x + 2").replace(" + int", " - int")), tests) == 0


async def test_partial_is_the_share_of_tests_that_pass():
    assert await score(fenced("def double(x):\n    return x + 2\n"), ASSERTS, partial=True) == 0.5


async def test_the_last_code_block_counts():
    assert await score(fenced("def double(x): 0\n") + "\nNo:\n" + fenced(DOUBLE, ""), ASSERTS) == 1
    assert await score(fenced(DOUBLE) + "\nNo:\n" + fenced("def double(x): 0\n"), ASSERTS) == 0


@pytest.mark.parametrize("text", ["", DOUBLE, f"```python\n{DOUBLE}", "```python\ndef double(:\n```"])
async def test_an_answer_without_complete_code_is_0(text):
    assert await score(text, ASSERTS) == 0


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)\n",
        "import os\nos._exit(0)\n",
        "import atexit, os\natexit.register(lambda: os._exit(0))\n",
        "def double(x): raise SystemExit(0)\n",
        "print('passed')\n",
        "while True: pass\n",
    ],
)
async def test_an_answer_that_ends_before_the_test_has_failed(code):
    assert await score(fenced(code), ASSERTS, limits=SandboxLimits(wall_s=2)) == 0


async def test_prints_and_the_main_block_of_an_answer_do_not_matter_for_asserts():
    code = DOUBLE + "print('double')\nif __name__ == '__main__':\n    raise ValueError\n"
    assert await score(fenced(code), ASSERTS) == 1


async def test_the_wall_time_is_for_all_tests_of_a_completion():
    slow = "import time\ndef double(x):\n    time.sleep(x)\n    return 2 * x\n"
    tests = ["assert double(0) == 0", "assert double(1000) == 2000", "assert double(0) == 0"]
    assert await score(fenced(slow), tests, partial=True, limits=SandboxLimits(wall_s=5)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "tests", [None, 7, "", [], [7], [{"input": "2"}], {"inputs": ["1"], "outputs": []}, {"fn_name": "f", "inputs": []}]
)
async def test_tests_of_another_form_are_refused_by_name(tests):
    with pytest.raises(RewardError, match="test"):
        await score(fenced(DOUBLE), tests)
