"""Scores of trajectories: rewards from plain Python functions, and functions that many tasks need.

    def exact(completion: Completion, answer: str) -> bool:     `answer` is a column of the prompt's row
        return completion.text.strip() == answer

    Task(rewards={"right": math_answer(), "length": (0.5, overlong_penalty(max_tokens=2048, buffer=512))}, ...)

Those here that need an answer compare with the column `answer` of a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from agent_loop.boundary import (
    boundary,
    call_function,
    check_columns,
    function_name,
    named_parameters,
    report_late,
    slot,
    uncounted,
)
from agent_loop.loop import Message, Prompt
from agent_loop.timeline import timed
from agent_loop.user_errors import DescribedError, describe_error, failure_of
from message_queue.errors import OvertimeError, RewardError, RolloutError
from message_queue.tokens import StopReason

START_S = 120.0  # for a process to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A rollout as the reward sees it."""

    turns: tuple[str, ...]
    """Text of each sampled turn, without end-of-turn tokens."""
    stop_reason: StopReason
    """Why the last turn ended; LENGTH if it was cut off, TOOL_CALL if its calls were not executed because no turn was
    left."""
    num_tokens: int = 0
    """Sampled tokens of all turns."""
    messages: tuple[Message, ...] = ()
    """The conversation: the messages of the prompt, each turn, and after it the replies to its calls as the model saw
    them (role `tool`)."""

    @property
    def text(self) -> str:
        """Text of the last turn."""
        return self.turns[-1]


class Score(NamedTuple):
    """A reward and its parts."""

    value: float
    """The reward."""
    parts: Mapping[str, float] = {}
    """Name -> value before its weight; they become the entries `reward/NAME` of `Trajectory.info`."""


RewardFunction = Callable[..., Any]
"""A function of any of `prompt`, `completion` and the keys of `prompt.target`; returns a number."""


class Reward(Protocol):
    """Scores a completion. May take its time: it runs under `limits.reward_timeout_s`."""

    async def score(self, prompt: Prompt, *, completion: Completion) -> float | Score:
        """A finite number, and its parts if there are any. Any exception drops the group."""
        ...


async def score_in_time(reward: Reward, prompt: Prompt, *, completion: Completion, timeout_s: float) -> Score:
    """Score within `timeout_s`.

    Raises:
        RewardError: no score in time, an exception, or a score that is not finite.
    """
    try:
        with timed("reward"):
            found = await boundary(
                lambda: reward.score(prompt, completion=completion), name="the reward", timeout_s=timeout_s
            )
        score = found if isinstance(found, Score) else Score(found)
        score = Score(float(score.value), {name: float(value) for name, value in score.parts.items()})
    except RewardError:
        raise
    except Exception as error:
        cause = describe_error(error)
        if isinstance(error, OvertimeError):
            cause = f"no score in {timeout_s:g} s (limits.reward_timeout_s)"
        raise RewardError(f"reward of prompt {prompt.index} failed: {cause}") from error
    for name, value in (("", score.value), *((f" {name}", value) for name, value in score.parts.items())):
        if not math.isfinite(value):
            raise RewardError(f"reward{name} of prompt {prompt.index} is {value}; rewards are finite")
    return score


def number_or_nan(value: object) -> float:
    """A number of Python, numpy or torch as float; NaN for anything else, a text included."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(cast(Any, value))
    except Exception:  # noqa: BLE001 - conversion of a foreign object
        return math.nan


# ---- functions


class FunctionReward:
    """A Reward: the weighted sum of functions. Each function becomes a metric with its name.

    Args:
        functions: name -> (weight, function).

    Raises:
        ValueError: a function has parameters that are no names, such as `*args`.
    """

    def __init__(self, functions: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._functions = dict(functions)
        self._parameters = {
            name: named_parameters(function, name=f"reward {name}") for name, (_, function) in functions.items()
        }

    def check(self, target: Mapping[str, Any]) -> None:
        """Check that a row has the columns that the functions need.

        Raises:
            ValueError: names the function, its parameter and the columns.
        """
        for name, parameters in self._parameters.items():
            check_columns(parameters, target, name=f"reward {name}", beside=("prompt", "completion"))
            if parameters and not any(each in ("prompt", "completion", *target) for each in parameters):
                raise ValueError(
                    f"reward {name} uses neither the completion nor a column; its parameters are "
                    f"{', '.join(parameters)}: call it if it makes a reward, as in math_answer()"
                )

    async def score(self, prompt: Prompt, *, completion: Completion) -> Score:
        """See `Reward`."""
        parts: dict[str, float] = {}
        available = {**prompt.target, "prompt": prompt, "completion": completion}
        for name, (_, function) in self._functions.items():
            arguments = {key: available[key] for key in self._parameters[name] if key in available}
            try:
                parts[name] = float(await call_function(function, arguments))
            except RolloutError:
                raise
            except Exception as error:
                raise RewardError(f"reward {name} of prompt {prompt.index} failed: {describe_error(error)}") from error
        value = sum(weight * parts[name] for name, (weight, _) in self._functions.items())
        return Score(value, parts if len(parts) > 1 else {})


def weighted(
    rewards: RewardFunction | Sequence[RewardFunction] | Mapping[str, Any],
) -> dict[str, tuple[float, RewardFunction]]:
    """name -> (weight, function), from the `rewards` of a task.

    `exact` and `[exact, short]` have weight 1 each; `{"exact": exact, "short": (0.2, short)}` names and weighs them.

    Raises:
        ValueError: nothing, two functions of one name, or a value that is no function.
    """
    found: dict[str, tuple[Any, Any]] = {}
    given: Any = rewards  # of a user, who may have no type checker
    if not callable(given) and (isinstance(given, str) or not isinstance(given, Mapping | Sequence)):
        raise ValueError(f"rewards is {rewards!r}; give a function, a list of functions, or a mapping of names to them")
    if isinstance(rewards, Mapping):
        for name, value in cast(Mapping[str, Any], rewards).items():
            found[name] = value if isinstance(value, tuple) else (1.0, value)
    else:
        functions = [rewards] if callable(rewards) else list(rewards)
        found = {getattr(function, "__name__", repr(function)): (1.0, function) for function in functions}
        if len(found) < len(functions):
            raise ValueError("two rewards have one name; give a mapping of names to functions")
    if not found:
        raise ValueError("rewards is empty; give a function")
    for name, (weight, function) in found.items():
        if not callable(function) or not isinstance(weight, int | float):
            raise ValueError(f"reward {name} is {(weight, function)}; give a function, or (weight, function)")
    return found


# ---- rewards that many tasks need


def exact_match(completion: Completion, answer: Any) -> bool:
    """Whether the text of the last turn is the answer, apart from space around it.

    A whole number is also the answer of a column that holds it as 51.0: pandas makes floats of columns with gaps.
    """
    return completion.text.strip() in _answer_texts(answer)


def regex_match(pattern: str) -> RewardFunction:
    """Whether the last match of a pattern in the last turn is the answer.

    Args:
        pattern: its first group is compared, or the whole match without a group: `r"####\\s*(-?[\\d,.]+)"`.
    """
    compiled = re.compile(pattern)

    def regex_match(completion: Completion, answer: Any) -> bool:
        found = list(compiled.finditer(completion.text))
        group = found[-1].group(min(1, compiled.groups)) if found else None
        return group is not None and group.strip() in _answer_texts(answer)

    return regex_match


def _answer_texts(answer: Any) -> set[str]:
    """Texts that are the answer: `{"51.0", "51"}` of 51.0 as a float, a Decimal, a number of numpy or a text."""
    text = str(answer).strip()
    if isinstance(answer, float) and answer.is_integer():  # 1e16 has no zeros
        return {text, str(int(answer))}
    whole = re.fullmatch(r"([+-]?\d+)\.0+", text)
    return {text, whole[1]} if whole else {text}


def math_answer(*, processes: int = 1) -> RewardFunction:
    """Whether the last turn ends in an expression equal to the answer, as the package `math-verify` decides.

    If the turn has `\\boxed{}`, the content of the last one counts, or that of all as a set. 12% equals 12 and 0.12.

    Args:
        processes: number in each rollout worker; they parse and compare.
    """
    return in_processes(_equal_expressions, processes=processes)


def overlong_penalty(*, max_tokens: int, buffer: int) -> RewardFunction:
    """0 for rollouts of at most `max_tokens - buffer` sampled tokens, then falling to -1 at `max_tokens`.

    With max_tokens=100 and buffer=20: 0 at 80 tokens, -0.5 at 90, -1 at 100 and beyond. Soft overlong punishment of
    DAPO (arXiv:2503.14476, section 3.4).
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer is {buffer}; must be between 1 and max_tokens={max_tokens}")

    def overlong_penalty(completion: Completion) -> float:
        return -min(1.0, max(0.0, (completion.num_tokens - (max_tokens - buffer)) / buffer))

    return overlong_penalty


def cosine_length(
    reward: RewardFunction,
    *,
    max_tokens: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> RewardFunction:
    """A reward that depends on the number of sampled tokens: short right answers are worth more, short wrong ones less.

    With max_tokens=1000 a right answer has 1.0 at 0 tokens, 0.75 at 500, and 0.5 at 1000 and beyond; a wrong one has
    -1.0, -0.75 and -0.5. Cosine reward of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373),
    without its value for cut-off answers: add `overlong_penalty` for that.

    Args:
        reward: decides whether an answer is right: its result is above 0.
        max_tokens: tokens at which the second value of each pair is reached.
        right: values of a right answer at 0 tokens and at `max_tokens`.
        wrong: values of a wrong answer.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; must be at least 1")
    needed = inspect.signature(reward)
    parameters = list(needed.parameters)

    @functools.wraps(reward)
    async def cosine_length(*, completion: Completion, **columns: Any) -> float:
        given = {**columns, "completion": completion}
        found = await call_function(reward, {name: given[name] for name in parameters if name in given})
        first, last = right if found > 0 else wrong
        progress = min(1.0, completion.num_tokens / max_tokens)
        return last + 0.5 * (first - last) * (1.0 + math.cos(progress * math.pi))

    own = [] if "completion" in parameters else [inspect.Parameter("completion", inspect.Parameter.KEYWORD_ONLY)]
    shown: Any = cosine_length
    shown.__signature__ = needed.replace(parameters=[*needed.parameters.values(), *own])
    shown.__name__ = "cosine_length"
    return shown


def in_processes(function: Callable[..., Any], *, processes: int = 1) -> RewardFunction:
    """A reward function that runs in separate processes, for one that needs the CPU for long.

    The processes start at the first calls. Calls that find none free wait, and `limits.reward_timeout_s` does not
    include the wait. A process that dies, or whose call is late, is replaced.

    Args:
        function: reward function; it and its arguments are sent to the processes.
        processes: number in each rollout worker.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; must be at least 1")
    pickler: Any = cloudpickle  # by value: the function may be in a file that the processes cannot import
    sent = functools.cache(lambda: pickler.dumps(function))
    slots, free, name = asyncio.Semaphore(processes), list[_Process](), function_name(function)

    @functools.wraps(function)
    async def call(**arguments: Any) -> Any:
        async with slot(slots):
            process = free.pop() if free else _Process()
            try:
                result = await process.call(sent(), arguments)
            except BaseException as error:
                process.kill()
                report_late(f"reward {name}", "its process is replaced")
                if isinstance(error, BrokenProcessPool):
                    raise RolloutError(f"a process of reward {name} died") from error
                raise
            free.append(process)
        if isinstance(result, DescribedError):
            raise result
        return result

    return call


class _Process:
    """A process that makes one call at a time."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_worker)
        self._pid = self._pool.submit(os.getpid)

    async def call(self, function: bytes, arguments: Mapping[str, Any]) -> Any:
        """See `_run`. BrokenProcessPool: the process died. TimeoutError: it did not start."""
        with uncounted():
            async with asyncio.timeout(START_S):
                await asyncio.shield(asyncio.wrap_future(self._pid))
        return await asyncio.wrap_future(self._pool.submit(_run, function, arguments))

    def kill(self) -> None:
        """End the process, also in the middle of a call or of its start."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pid.add_done_callback(_kill)


def _end_with_worker() -> None:
    """In the process: end it with the worker, also if that is killed."""
    worker: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (worker.join(), os._exit(1)), daemon=True).start()


def _kill(pid: Future[int]) -> None:
    if not pid.cancelled() and pid.exception() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid.result(), signal.SIGKILL)


def _run(function: bytes, arguments: Mapping[str, Any]) -> Any:
    """In the process: the result, or a description of the error, whose class may be unknown to the caller."""
    try:
        return cloudpickle.loads(function)(**arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - described here, as its frames do not travel
        return DescribedError(failure_of(error))


def _equal_expressions(completion: Completion, answer: Any) -> bool:
    import math_verify  # pyright: ignore[reportMissingTypeStubs] - it uses the signals of the main thread

    library: Any = math_verify
    wanted = library.parse(f"${answer}$")
    box = _last_box(completion.text)
    texts = dict.fromkeys((box, box.replace("\\%", "%"), completion.text))  # it reads $12\\%$ as 12, and $12%$ as 0.12
    return any(library.verify(wanted, library.parse(text)) for text in texts)


def _last_box(text: str) -> str:
    """The content of the last complete `\\boxed{}`, as a formula; the whole text if there is none."""
    opened, found = list[re.Match[str]](), text
    for mark in re.finditer(r"\\boxed\s*\{|(?<!\\)[{}]", text):
        if mark[0] != "}":
            opened.append(mark)
        elif opened and len((start := opened.pop())[0]) > 1:
            found = f"${text[start.end() : mark.start()]}$"
    return found
