"""A reward that runs the code of an answer against tests.

rows = [{"prompt": "Write double(x).", "tests": ["assert double(2) == 4", "assert double(0) == 0"]}]
Task(prompts=rows, rewards=code_answer())
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from agent_loop.boundary import slot
from agent_loop.reward import Completion, RewardFunction
from agent_loop.text import shown
from agent_loop.tools.sandbox import SandboxLimits, SandboxResult, check_sandbox, run_python

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)

_PEER = Path(__file__).with_name("code_peer.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One test of a row."""

    code: str = ""
    """Python code that is run after the answer and fails by an exception; "" compares outputs."""
    stdin: str = ""
    """Input of the answer if outputs are compared."""
    stdout: str = ""
    """What the answer has to print, apart from space at the ends of lines and of the text."""


def code_answer(
    *, partial: bool = False, limits: SandboxLimits | None = None, at_once: int | None = None
) -> RewardFunction:
    """Whether the last code block of the last turn passes the tests of the row (in `agent_loop.tools.sandbox`).

    The column `tests` is Python code, such as `assert` statements; or a list of such texts, as in MBPP; or a list of
    mappings with `input` and `output`, which are compared with stdin and stdout; or a mapping with the lists `inputs`
    and `outputs`, as in APPS and TACO; or any such value as JSON.

    Each test runs in a sandbox, and the answer in another one. Only data come from there (`agent_loop.code_peer`), so
    that the answer cannot see the test or change its verdict. A test uses functions and classes of the answer as if
    they were in its process, with three limits. It imports itself what it compares with. An object of the answer
    equals other such objects as the class says, and never a value of the test. Patches and files are its own.

    Args:
        partial: whether the reward is the share of tests that pass. Otherwise it is 1 if all pass, else 0, and no test
            is run after one that failed.
        limits: bounds of each test and of the answer. `wall_s` is for all tests of a completion together: tests not run
            by then have failed.
        at_once: completions that are tested at once in each rollout worker; None is the number of cores. Others wait,
            and `rollout.limits.reward_timeout_s` does not include the wait.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    check_sandbox()
    bounds = limits or SandboxLimits()
    slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def code_answer(completion: Completion, tests: Any) -> float:
        wanted = _read_tests(tests)
        blocks = _BLOCK.findall(completion.text)
        if not blocks:
            return 0.0
        async with slot(slots):
            passed = await _count_passed(blocks[-1], wanted, limits=bounds, all_tests=partial)
        return passed / len(wanted) if partial else float(passed == len(wanted))

    return code_answer


async def _count_passed(answer: str, tests: Sequence[_Test], *, limits: SandboxLimits, all_tests: bool) -> int:
    """Tests that pass; without `all_tests` none is run after the first that fails."""
    clock = asyncio.get_running_loop().time
    end, passed = clock() + limits.wall_s, 0
    for test in tests:
        if (left := end - clock()) <= 0:
            break
        bounds = replace(limits, wall_s=left)
        if test.code:
            passes = await _passes_code(answer, test.code, limits=bounds)
        else:
            result = await run_python(answer, stdin=test.stdin, limits=bounds)
            passes = result.exit_code == 0 and _lines(result.stdout) == _lines(test.stdout)
        passed += passes
        if not (passes or all_tests):
            break
    return passed


async def _passes_code(answer: str, test: str, *, limits: SandboxLimits) -> bool:
    """Whether the test ends by itself before the answer's process does. Only then it has printed the mark."""
    mark = secrets.token_hex(16)
    (asked, to_answer), (answered, to_test) = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        for end in (asked, to_answer, answered, to_test):
            stack.callback(os.close, end)
        serves = _run_peer("serve_answer", asked, to_test, answer, limits=limits)
        tests = _run_peer("run_test", answered, to_answer, test, mark, limits=limits)
        programs = [asyncio.create_task(serves), asyncio.create_task(tests)]
        try:
            await asyncio.wait(programs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for program in programs:
                program.cancel()
            await asyncio.wait(programs)
        results = [program.result() for program in programs if not program.cancelled()]
    return any(result.exit_code == 0 and mark in result.stdout for result in results)


async def _run_peer(start: str, reading: int, writing: int, *given: str, limits: SandboxLimits) -> SandboxResult:
    source = f"{_PEER.read_text(encoding='utf-8')}\n{start}()\n"
    stdin = json.dumps([reading, writing, *given])
    return await run_python(source, stdin=stdin, limits=limits, inherited=(reading, writing))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _read_tests(tests: Any) -> list[_Test]:
    """The tests of a row. ValueError: the column has another form."""
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # it is code
            tests = json.loads(tests)
    if isinstance(tests, Mapping):
        columns = cast(Mapping[str, Any], tests)
        if columns.get("fn_name"):
            raise ValueError("tests has fn_name, calls of a function; write them as assert statements")
        if len(columns.get("inputs") or ()) != len(columns.get("outputs") or ()):
            raise ValueError("tests has inputs and outputs of different number")
        pairs = zip(columns.get("inputs") or (), columns.get("outputs") or (), strict=True)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    listed: Any = [tests] if isinstance(tests, str) else tests
    if not listed or not isinstance(listed, Sequence):
        raise ValueError(f"tests is {shown(tests)}; give code with assert statements, or input and output")
    return list(map(_read_test, cast(Sequence[Any], listed)))


def _read_test(test: Any) -> _Test:
    if isinstance(test, str) and test.strip():
        return _Test(code=test)
    if isinstance(test, Mapping) and {"input", "output"} <= set(cast(Mapping[str, Any], test)):
        return _Test(stdin=_text(test["input"]), stdout=_text(test["output"]))
    raise ValueError(
        f"a test is {shown(cast(object, test))}; give code with assert statements, or a mapping with input and output"
    )


def _text(value: Any) -> str:
    """Text of an input or output; a list has its lines."""
    return "\n".join(map(str, cast(list[Any], value))) if isinstance(value, list) else str(value)
