"""`async_rl.train`: values as overrides, tasks as objects, callbacks and signals; tests/e2e has real runs."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import async_rl
from async_rl import Task, TaskConfig, build_task
from async_rl.config import ConfigError, composed_values, load_config
from async_rl.controller.interrupt import run_in_thread, stop_on_interrupt
from async_rl.files.masking import dotted
from async_rl.metrics import callbacks
from async_rl.metrics.callbacks import Callbacks
from async_rl.rollout.task import pickled_task
from async_rl.run import config_overrides
from tests.architecture.test_imports import ROOT
from tests.async_rl.test_run import model as model  # a fixture

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
SCRIPT = """
import sys
from pathlib import Path
import helper
from async_rl import Task
from async_rl.rollout.task import pickled_task

class Mine(Task):
    def hint(self):
        return helper.HINT

def exact(completion, answer):
    return float(completion.text == helper.strip(answer))

rows = [{"prompt": "1+1=", "answer": "2 "}]
Path(sys.argv[1]).write_bytes(pickled_task(Mine(prompts=rows, rewards=exact, end_of_turn="<|im_end|>")))
"""
READ = """
import sys
from async_rl import TaskConfig, build_task

task = build_task(TaskConfig(factory=f"{sys.argv[1]}:task"), seed=7)
print(type(task).__name__, task.hint(), task.seed, task.train_prompt(0).target['answer'])
"""


def exact(completion, answer):
    return completion.text == answer


def mine(words=1, seed=0):
    return Task(prompts=ROWS * words, rewards=exact, end_of_turn="<|im_end|>")


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 3, "rollout.workers": 2, "name": "a b"},
        {"rollout": {"workers": 2, "limits": {"max_tokens": 200}}, "engine.replicas": 2},
        {"optimizer.lr": 1e-7, "model.checkpoint": None, "validation.every": 0},
        {"tracking.trackers": ["tensorboard", "wandb"], "cluster": {"rank_env": {"A": "1", "B": "${x} 'y' \\"}}},
        {"name": "null", "output_dir": "1e3"},
        {"task": {"options": {"max_operand": 9, "deep": [{"a": True, "b": None}, ["c,d", 0.5]]}}},
    ],
)
def test_values_arrive_in_the_config_as_they_were_given(given):
    expected, found = dict(dotted(given)), dict(dotted(composed_values(list(config_overrides(given)))))
    assert {key: found[key] for key in expected} == expected


def test_the_config_of_train_is_that_of_the_command():
    given = {"rollout": {"workers": 2}, "engine": "sglang", "engine.python": Path("/bin/true"), "staleness": "drop"}
    command = ["rollout.workers=2", "engine=sglang", "engine.python=/bin/true", "staleness=drop"]
    assert load_config(list(config_overrides(given))) == load_config(command)
    assert list(config_overrides({"a": {}})) == ["a={}"]


@pytest.mark.parametrize("value", [object(), {1, 2}, print, [object()]])
def test_a_value_of_another_kind_is_refused_with_its_key(value):
    with pytest.raises(ValueError, match=r"rollout\.workers is"):
        list(config_overrides({"rollout": {"workers": value}}))


def test_a_refused_run_raises_all_problems_and_leaves_nothing(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="wish"):
        async_rl.train(mine, {"wish": 1})
    layout = {"trainer.ranks": 8, "trainer.parallel.tensor": 8, "validation.prompts": 0}
    with pytest.raises(ValueError, match="4 attention heads"):
        async_rl.train(mine(), {"model.checkpoint": model, "name": "mine", **layout})
    with pytest.raises(ValueError, match=r"absent\.py"):
        async_rl.train("absent.py", {"model.checkpoint": model, "name": "mine"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("task", "part"), [(5, "task is 5"), (mine(), "pickle")])
def test_a_task_that_cannot_be_used_is_refused(task, part, tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    if isinstance(task, Task):
        task.lock = threading.Lock()
    with pytest.raises(ValueError, match=part):
        async_rl.train(task, {"model.checkpoint": model, "name": "mine"})
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_script_is_read_in_another_process_and_folder(tmp_path):
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    (home / "helper.py").write_text("HINT = 'think'\n\ndef strip(text):\n    return text.strip()\n")
    (home / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    file = tmp_path / "task.pkl"
    subprocess.run([sys.executable, "home/script.py", file], cwd=tmp_path, env=environment, check=True)
    found = subprocess.check_output([sys.executable, "-c", READ, file], cwd=away, env=environment, text=True)
    assert found == "Mine think 7 2 \n"


def test_a_pickled_task_or_function_has_the_seed_and_options_of_the_run(tmp_path):
    task = mine()
    order = [task.train_prompt(i).messages for i in range(4)]  # of seed 0; the run must not keep it
    (tmp_path / "task.pkl").write_bytes(pickled_task(task))
    (tmp_path / "function.pkl").write_bytes(pickled_task(mine))
    orders = []
    for seed in range(8):
        found = build_task(TaskConfig(factory=f"{tmp_path}/task.pkl:task"), seed=seed)
        orders.append([found.train_prompt(i).messages for i in range(4)])
    assert orders[0] == order and len(set(map(tuple, orders))) > 1
    options = TaskConfig(factory=f"{tmp_path}/function.pkl:task", options={"words": 2})
    assert len(build_task(options, seed=0)._prompts) == 8


# ---- callbacks


async def told(functions, *events, warnings):
    calls = Callbacks(functions)
    async with calls.calling(lambda failure: warnings.append(failure.text)):
        for kind, step, metrics in events:
            calls.tell(kind, step, metrics)


async def test_callbacks_get_their_events_in_order_with_their_own_copy_of_the_metrics():
    seen, warnings, metrics = [], [], {"loss": 1.0}

    async def later(event):
        await asyncio.sleep(0)
        seen.append((event.kind, event.train_step, dict(event.metrics)))
        event.metrics["loss"] = 9.0

    functions = {"step": later, "end": lambda event: seen.append((event.kind, event.train_step, dict(event.metrics)))}
    await told(
        functions, ("step", 1, metrics), ("publish", 1, {}), ("step", 2, metrics), ("end", 2, {}), warnings=warnings
    )
    assert seen == [("step", 1, {"loss": 1.0}), ("step", 2, {"loss": 1.0}), ("end", 2, {})]
    assert metrics == {"loss": 1.0} and not warnings


def fails(event):
    raise ValueError("mine")


def leaves(event):
    sys.exit(3)


async def fails_later(event):
    raise asyncio.CancelledError


async def hangs(event):
    await asyncio.Event().wait()


@pytest.mark.parametrize("function", [fails, leaves, fails_later, 5])
async def test_a_callback_that_fails_is_a_warning_and_the_next_is_called(function):
    seen, warnings = [], []
    functions = {"step": function, "end": lambda event: seen.append(event.kind)}
    await told(functions, ("step", 4, {}), ("end", 4, {}), warnings=warnings)
    assert seen == ["end"] and len(warnings) == 1 and "on_step of train step 4" in warnings[0]


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_callback_that_hangs_ends_with_its_time(blocks, monkeypatch):
    monkeypatch.setattr(callbacks, "CALL_S", 0.05)
    release, warnings = threading.Event(), []
    try:
        await told({"step": (lambda event: release.wait()) if blocks else hangs}, ("step", 4, {}), warnings=warnings)
    finally:
        release.set()
    assert len(warnings) in (1, 2) and any("0.05 s" in warning for warning in warnings)


async def test_the_oldest_events_of_a_slow_callback_are_left_out(monkeypatch):
    monkeypatch.setattr(callbacks, "MOST_WAITING", 3)
    seen = []
    await told({"step": lambda event: seen.append(event.train_step)}, *[("step", n, {}) for n in range(9)], warnings=[])
    assert seen == [6, 7, 8]


async def test_an_error_of_the_run_does_not_wait_for_callbacks():
    calls = Callbacks({"step": hangs})
    with pytest.raises(RuntimeError, match="the run"):
        async with calls.calling(lambda text: None):
            calls.tell("step", 1, {})
            raise RuntimeError("the run")


# ---- signals


async def interrupted(times, *, done):
    """A run that gets Ctrl-C."""
    stop, notes = asyncio.Event(), []
    async with stop_on_interrupt(stop.set, note=notes.append):
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        if times > 1:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
    done.append(len(notes))
    return True


@pytest.mark.parametrize("in_loop", [False, True])
def test_the_first_interrupt_stops_softly_and_the_second_at_once(in_loop):
    async def cell():
        return run_in_thread(lambda: interrupted(1, done=done))

    done, before = [], signal.getsignal(signal.SIGINT)
    assert asyncio.run(cell()) if in_loop else run_in_thread(lambda: interrupted(1, done=done))
    assert done == [1]
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(lambda: interrupted(2, done=done))
    assert done == [1] and signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_does_not_end_the_wait_is_handled():
    """As one that comes just before the wait: the main thread gets it, and is not woken."""

    async def run():
        stop = asyncio.Event()
        async with stop_on_interrupt(stop.set, note=lambda _text: None):
            signal.raise_signal(signal.SIGINT)  # to the thread of the run
            async with asyncio.timeout(60):
                await stop.wait()
        return True

    assert run_in_thread(run)


def test_an_interrupt_before_a_run_can_stop_softly_cancels_it():
    closed = []

    async def starts():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(starts)
    assert closed


def test_a_thread_that_is_not_the_main_one_may_train():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run_in_thread, lambda: asyncio.sleep(0, "done")).result() == "done"
