"""The boundary around user code: nothing that it does ends, hangs or bends a run."""

import asyncio
import concurrent.futures
import inspect
import json
import logging
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from agent_loop import boundary as boundary_module
from agent_loop.boundary import UserThreads, boundary, slot
from agent_loop.environment import EnvironmentClass, Step
from agent_loop.loop import Message, Prompt
from agent_loop.reward import Completion, FunctionReward, in_processes, score_in_time, weighted
from agent_loop.tools.functions import FunctionTool, ToolClass, open_tools
from agent_loop.tools.tool import ToolCall, ToolRunner
from agent_loop.user_errors import LeakedError, describe_error
from async_rl.rollout.rollouter import DroppedGroup, FailureConfig, Rollouter
from async_rl.rollout.validator import Validator
from message_queue.errors import OvertimeError, RewardError, RolloutError
from message_queue.tokens import StopReason
from tests.helpers.stored import admission

ROOT = Path(__file__).parents[2]
PROMPT = Prompt(index=7, messages=(Message(role="user", content="?"),), target={})
COMPLETION = Completion(turns=("x",), stop_reason=StopReason.STOP)
AT_ONCE = 500


class Mute(Exception):
    def __str__(self):
        return self.detail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("smile \ud83d"), "ValueError: smile \ufffd"),
        (Mute(), "Mute: (its text cannot be shown: AttributeError)"),
        (LeakedError(asyncio.CancelledError("a scope")), "CancelledError: a scope"),
        (ExceptionGroup("two", [ExceptionGroup("one", [KeyError("x")])]), "KeyError: 'x'"),
        (LeakedError(BaseExceptionGroup("one", [SystemExit(3)])), "SystemExit: 3"),
    ],
)
def test_every_error_has_a_text_that_can_be_written(error, text):
    assert describe_error(error) == text
    json.dumps(text).encode()


# ---- cancels and exits that leave user code


def raises(error):
    def leak():
        raise error

    return leak


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def awaits_a_cancelled_task():
    task = asyncio.ensure_future(asyncio.sleep(1000))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def async_generator_leaks():
    async def words():
        yield "x"
        raise asyncio.CancelledError("of a generator")

    async for _ in words():
        pass


def as_async(leak):
    async def leak_async():
        leak()

    return leak_async


def as_method(leak):
    async def call_async(self, text=""):
        await leak()

    return call_async if inspect.iscoroutinefunction(leak) else lambda self, text="": leak()


ERRORS = [
    asyncio.CancelledError("Cancelled by cancel scope 7f00"),
    concurrent.futures.CancelledError(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(),
    BaseExceptionGroup("tasks", [asyncio.CancelledError("inside")]),
    BaseExceptionGroup("tasks", [ValueError("x"), KeyboardInterrupt()]),
]
LEAKS = [raises(error) for error in ERRORS] + [as_async(raises(error)) for error in ERRORS]
LEAKS += [cancels_itself, awaits_a_cancelled_task, async_generator_leaks]
leaks = pytest.mark.parametrize("leak", LEAKS)


def described(function):
    function.__doc__ = "A tool."
    return function


@leaks
async def test_what_a_tool_lets_out_is_a_failed_reply(leak):
    async def good() -> str:
        """A tool."""
        return "ok"

    runner = ToolRunner([FunctionTool(described(leak)), FunctionTool(good)], timeout_s=60)
    bad, fine = await runner.run([ToolCall(leak.__name__, {}), ToolCall("good", {})])
    assert bad.failed and bad.error and "test_boundary.py" not in bad.text
    assert (fine.text, fine.failed) == ("ok", False)
    assert asyncio.current_task().cancelling() == 0


async def score(reward, *, timeout_s=60):
    return await score_in_time(reward, PROMPT, completion=COMPLETION, timeout_s=timeout_s)


async def in_reward_function(leak):
    await score(FunctionReward(weighted(leak)))


async def in_reward_class(leak):
    class Reward:
        async def score(self, prompt, *, completion):
            return await leak()

    await score(Reward())


async def in_tool_class(leak):
    class Board:
        open = as_method(leak)

        def move(self) -> str:
            """A tool."""
            return "moved"

    async with open_tools(ToolRunner([], timeout_s=60), [ToolClass(Board)], PROMPT, timeout_s=60):
        pass


PLACES = {
    in_reward_function: (RewardError, "prompt 7"),
    in_reward_class: (RewardError, "prompt 7"),
    in_tool_class: (RolloutError, "open of tool Board in a rollout of prompt 7"),
}


@leaks
@pytest.mark.parametrize("place", PLACES)
async def test_what_rewards_and_tool_classes_let_out_fails_the_rollout(leak, place):
    error, text = PLACES[place]
    with pytest.raises(error, match=text):
        await place(leak)


@leaks
@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_what_an_environment_lets_out_fails_its_rollout_and_it_is_closed(leak, method, caplog):
    events = []

    class Environment:
        def step(self, text):
            return Step()

        def close(self):
            events.append("close")

    setattr(Environment, method, as_method(leak))
    opened = EnvironmentClass(Environment).new(PROMPT, timeout_s=60)
    if method == "close":
        async with opened:
            pass
        assert "close of environment" in caplog.text
        return
    with pytest.raises(RolloutError, match=f"{method} of environment"):
        async with opened as (environment, _):
            await environment.call("step", {"text": "x"})
    assert events == ["close"]


class Loop:
    """An agent loop that does not close its trajectory."""

    def __init__(self, leak=None):
        self.leak = leak

    async def run(self, prompt, *, trajectory, session, cache_salt):
        trajectory.observe(np.arange(3, dtype=np.int32))
        if self.leak is not None:
            await (self.leak() or asyncio.sleep(0))


@pytest.mark.parametrize("leak", [None, *[leak for leak in LEAKS if leak.__name__ != "leak"]])
@pytest.mark.parametrize("on_failed", ["drop", "rest"])
async def test_rollout_that_ends_without_closing_its_trajectory_has_failed(leak, on_failed):
    notes, failed = [], []
    rollouter = Rollouter(
        loop=Loop(leak),
        routing=None,
        trajectories_per_group=2,
        failure=FailureConfig(on_failed=on_failed),
        note=notes.append,
        failed=failed.append,
        decode=lambda ids: "x",
    )
    group = await rollouter.roll(PROMPT, admission(0))
    assert isinstance(group, DroppedGroup) and not group.expired
    assert notes and failed and all("failed, 1 of 1 times" in note.text for note in notes)


@pytest.mark.parametrize("leak", [None, cancels_itself, async_generator_leaks])
async def test_validation_rollout_that_leaves_its_trajectory_open_has_failed(leak):
    validator = Validator(loop=Loop(leak), routing=None, decode=lambda ids: "x")
    (found,) = await validator.run([(0, PROMPT)], number=1)
    assert found.error


@pytest.mark.parametrize("times", [1, 2])
async def test_cancel_from_outside_passes_through_and_reaches_the_user_code(times):
    started, ended = asyncio.Event(), []

    async def tool() -> str:
        """A tool."""
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("tool")
        return ""

    task = asyncio.create_task(ToolRunner([FunctionTool(tool)], timeout_s=60).run([ToolCall("tool", {})]))
    await started.wait()
    for _ in range(times):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["tool"]


# ---- code that does not end


@pytest.mark.virtual_time
@pytest.mark.parametrize("cancelled", [True, False])
async def test_code_that_ignores_its_cancel_is_left_behind_by_name(cancelled, caplog):
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    call = asyncio.create_task(boundary(stubborn, name="stubborn", timeout_s=3))
    await asyncio.sleep(1)
    if cancelled:
        call.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else OvertimeError):
        await call
    assert "stubborn ignores" in caplog.text
    release.set()
    await asyncio.sleep(0)


@pytest.mark.virtual_time
async def test_environment_that_ignores_its_cancel_is_not_called_any_more():
    release, closed = asyncio.Event(), []

    class Environment:
        async def step(self, text):
            while not release.is_set():
                with suppress(asyncio.CancelledError):
                    await release.wait()

        async def close(self):
            closed.append(True)

    with pytest.raises(RolloutError, match="took more than 3 s"):
        async with EnvironmentClass(Environment).new(PROMPT, timeout_s=3) as (environment, _):
            await environment.call("step", {"text": "x"})
    assert not closed
    release.set()


@pytest.mark.parametrize("late", [False, True])
async def test_async_methods_of_an_environment_share_one_task(late):
    tasks = []

    class Environment:
        async def reset(self):
            self.stack = AsyncExitStack()
            await self.stack.enter_async_context(anyio.create_task_group())
            tasks.append(asyncio.current_task())

        async def step(self, text):
            try:
                await (asyncio.Event().wait() if late else asyncio.sleep(0))
            finally:
                tasks.append(asyncio.current_task())
            return Step()

        async def close(self):
            await self.stack.aclose()
            tasks.append(asyncio.current_task())

    with pytest.raises(RolloutError, match=r"0\.05 s \(limits\.tool_timeout_s\)") if late else nullcontext():
        async with EnvironmentClass(Environment).new(PROMPT, timeout_s=0.05 if late else 60) as (environment, _):
            await environment.call("step", {"text": "x"})
    assert len(tasks) == 3 and len(set(tasks)) == 1


async def test_as_many_blocking_calls_run_at_once_as_there_are():
    together = threading.Barrier(AT_ONCE, timeout=60)

    def tool() -> str:
        """Waits for all others."""
        together.wait()
        return "ok"

    def reward(completion):
        together.wait()
        return 1.0

    replies = await ToolRunner([FunctionTool(tool)], timeout_s=60).run([ToolCall("tool", {})] * AT_ONCE)
    assert {reply.text for reply in replies} == {"ok"}
    scores = await asyncio.gather(*(score(FunctionReward(weighted(reward))) for _ in range(AT_ONCE)))
    assert {found.value for found in scores} == {1.0}


async def test_calls_that_hang_disable_no_later_call_and_are_reported_by_name(caplog):
    release = threading.Event()

    def fetch(wait: bool) -> str:
        """Waits for a server that does not answer."""
        if wait:
            release.wait()
        return "ok"

    runner = ToolRunner([FunctionTool(fetch)], timeout_s=0.05)
    with caplog.at_level(logging.WARNING, "agent_loop.tools"):
        replies = await runner.run([ToolCall("fetch", {"wait": True})] * 50)
    assert all(reply.failed for reply in replies)
    assert "fetch has not returned in 0.05 s; its thread is replaced (50 calls of it are left behind)" in caplog.text
    found = await ToolRunner([FunctionTool(fetch)], timeout_s=60).run([ToolCall("fetch", {"wait": False})])
    assert [reply.text for reply in found] == ["ok"]
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "product"), 60) == "product"
    release.set()
    while boundary_module._threads[asyncio.get_running_loop()][1]["fetch"]:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)


async def test_function_with_too_many_lost_calls_fails_and_others_go_on(monkeypatch):
    release = threading.Event()

    def hangs(completion):
        release.wait()

    def fine(completion):
        return 1.0

    hung, other = (FunctionReward(weighted(function)) for function in (hangs, fine))
    monkeypatch.setattr(boundary_module, "MAX_LOST", 1)
    with pytest.raises(RewardError, match="no score"):
        await score(hung, timeout_s=0.05)
    with pytest.raises(RewardError, match=r"1 calls of .*hangs have not returned"):
        await score(hung)
    assert (await score(other)).value == 1.0
    release.set()


async def test_process_that_can_start_no_thread_fails_the_rollout_by_name(monkeypatch):
    def refuse(*_args, **_options):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(UserThreads, "submit", refuse)

    def tool() -> str:
        """A tool."""
        return ""

    with pytest.raises(RolloutError, match="no thread for tool"):
        await ToolRunner([FunctionTool(tool)], timeout_s=60).run([ToolCall("tool", {})])


@pytest.mark.virtual_time
async def test_wait_for_a_slot_does_not_count_as_time_of_the_call():
    slots = asyncio.Semaphore(1)

    async def tool() -> str:
        """A tool."""
        async with slot(slots):
            await asyncio.sleep(2)
        return "ok"

    async def reward(completion):
        return float(await tool() == "ok")

    replies, *scores = await asyncio.gather(
        ToolRunner([FunctionTool(tool)], timeout_s=3).run([ToolCall("tool", {})] * 20),
        *(score(FunctionReward(weighted(reward)), timeout_s=3) for _ in range(9)),
    )
    assert {reply.text for reply in replies} == {"ok"} and {found.value for found in scores} == {1.0}

    async def late():
        async with slot(slots):
            await asyncio.sleep(4)

    with pytest.raises(OvertimeError):
        await asyncio.gather(*(boundary(late, name="late", timeout_s=3) for _ in range(2)))


def test_process_with_a_hung_call_ends():
    code = """
import asyncio, threading
from agent_loop.boundary import UserThreads
from agent_loop.tools.functions import FunctionTool
from agent_loop.tools.tool import ToolCall, ToolRunner
def hang() -> str:
    "Hangs."
    threading.Event().wait()
async def hang_elsewhere() -> str:
    "Hangs in a thread of the event loop."
    await asyncio.to_thread(hang)
async def main():
    asyncio.get_running_loop().set_default_executor(UserThreads())
    await ToolRunner([FunctionTool(hang_elsewhere)], timeout_s=0.1).run([ToolCall("hang_elsewhere", {})] * 40)
    await asyncio.to_thread(print, "product")
    print((await ToolRunner([FunctionTool(hang)], timeout_s=0.1).run([ToolCall("hang", {})]))[0].failed)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "product\nTrue\n" and "hang has not returned in 0.1 s" in done.stderr


def hangs_in_a_process(completion, hang):
    while hang:
        pass
    return 1.0


async def test_process_whose_call_is_late_is_replaced(caplog):
    reward = FunctionReward(weighted(in_processes(hangs_in_a_process)))

    async def score_of(*, hang, timeout_s):
        prompt = replace(PROMPT, target={"hang": hang})
        return await score_in_time(reward, prompt, completion=COMPLETION, timeout_s=timeout_s)

    late = [asyncio.create_task(score_of(hang=True, timeout_s=1)) for _ in range(2)]
    fine = [asyncio.create_task(score_of(hang=False, timeout_s=120)) for _ in range(3)]
    assert [(await task).value for task in fine] == [1.0] * 3
    for task in late:
        with pytest.raises(RewardError, match="no score in 1 s"):
            await task
    assert "hangs_in_a_process has not returned in 1 s; its process is replaced" in caplog.text
