"""A user's own model, dataset, tool, reward and sweep: the installed wheel, in a folder outside the repository."""

import json
import re

import pytest

from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer
from tests.e2e.runs import python
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.wheel import environment_of, install_wheel

SMALL = (
    "total_train_steps=2",
    "rollout.groups_per_batch=4",
    "rollout.trajectories_per_group=4",
    "rollout.limits.max_tokens=96",
    "validation.prompts=4",
    "checkpoint.every=0",
    "rollout.drop_without_spread=2",
)
DATASET = """
from agent_loop import in_processes
from async_rl import Task


def exact(completion, answer):
    return completion.text.strip() == answer


def short(completion):
    return -len(completion.text)


task = Task(
    prompts="rows.jsonl",
    template="{a}+{b}",
    validation=0.2,
    max_prompt_tokens=60,
    rewards={"exact": exact, "short": (0.01, in_processes(short))},
)
"""
COUNTER = """
import uuid
from pathlib import Path

from agent_loop import tool_use
from agent_loop.tools.tool import ToolCall

FOLDER = Path(__file__).parent


class Counter:
    def open(self, a):
        self.name, self.calls = uuid.uuid4(), 0
        self._note("open")

    def count(self) -> int:
        "Counts the calls of this rollout."
        self.calls += 1
        self._note(self.calls)
        return self.calls

    def close(self):
        self._note("close")

    def _note(self, event):
        with (FOLDER / "events").open("a") as file:
            file.write(f"{self.name} {event}\\n")


def fails_once():
    (FOLDER / "events.failed").touch(exist_ok=False)
    raise RuntimeError("the first reward")


def exact_but_first(completion, answer):
    return exact(completion, answer) if (FOLDER / "events.failed").exists() else fails_once()


tool_use.parse_tool_calls = lambda text: [ToolCall("count", {})] * 2  # a random model makes no calls
task = Task(prompts="rows.jsonl", template="{a}+{b}", validation=0.2, max_prompt_tokens=60, tools=[Counter],
            rewards={"exact": exact_but_first, "short": (0.01, in_processes(short))})
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of a user who installed the wheel."""
    return environment_of(install_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and a dataset."""
    save_initial_checkpoint(tmp_path / "model", tokenizer=build_tokenizer(), seed=0, config=TinyModelConfig())
    rows = [{"a": a, "b": b, "answer": str(a + b)} for a in range(5) for b in range(5)]
    rows += [{"a": "9" * 120, "b": 0, "answer": "9" * 120}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def run(folder, environment, *arguments, module="async_rl.run", code=0):
    given = (*arguments, "model.checkpoint=model", *SMALL)
    return python("-m", module, *given, code=code, cwd=folder, env=environment)


def check_counters(events):
    """Each rollout had its own counter, opened and closed once, also when its reward failed."""
    found = {}
    for name, event in map(str.split, events):
        found.setdefault(name, []).append(event)
    assert len(found) > 2 * 4 * 4, "the rollouts of two steps, and another for the one that failed"
    for first, *calls, last in found.values():
        assert (first, last) == ("open", "close")
        assert calls == [str(number + 1) for number in range(len(calls))]
    assert any(calls for _, *calls, _ in found.values()), "each turn that is executed calls its counter twice"


@WHOLE_RUN
def test_own_task_is_trained_from_a_folder_of_the_user(folder, environment):
    (folder / "mine.py").write_text(DATASET + COUNTER)
    done = run(folder, environment, "--task", "mine.py", "name=mine")
    steps = [json.loads(line) for line in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    assert [step["train_step"] for step in steps] == [1, 2]
    assert re.search("rows of .* are left out: more than 60 tokens", done.stdout)
    infos = {f"info/{key}" for key in ("turns", "tool_calls", "reward/exact", "reward/short")}
    assert all(infos <= set(step) for step in steps)
    (*_, validation) = (folder / "outputs/mine/validation.jsonl").read_text().splitlines()
    assert {f"validation/{key}" for key in infos} <= set(json.loads(validation))
    check_counters((folder / "events").read_text().splitlines())
    assert (folder / "outputs/mine/final/config.json").is_file()


@WHOLE_RUN
def test_a_sweep_over_an_own_task_runs_from_a_folder_of_the_user(folder, environment):
    (folder / "mine.py").write_text(DATASET)
    cells = ("losses", "loss=ppo_clip", "seed=0", "staleness.max_staleness=1", "trainer.updates_per_batch=1")
    task = ("task=python", "task.factory=mine.py:task")
    run(folder, environment, *cells, *task, "--out", "sweep", module="async_rl.recipes.staleness.sweep")
    assert (folder / "sweep/figure.png").read_bytes().startswith(b"\x89PNG")
    steps = (folder / "sweep/max_staleness_1-loss_ppo_clip-seed_0/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2 and all(json.loads(step)["staleness/max"] <= 1 for step in steps)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"rows.jsonl"', '"absent.jsonl"', "absent.jsonl"),
        ("{b}", "{c}", "'c'"),
        ("def exact(completion, answer)", "def exact(completion, answr)", "answr"),
        ("import Task", "import Tusk", "Tusk"),
        ("=60", "=96", "rollout.limits.max_tokens=96"),
        ("    max_prompt_tokens=60,\n", "", "rollout.limits.max_tokens"),
        ("task = Task", "other = Task", "task"),
    ],
)
def test_own_task_with_an_error_is_refused_before_a_process_starts(folder, environment, old, new, named):
    (folder / "mine.py").write_text(DATASET.replace(old, new))
    (line,) = run(folder, environment, "--task", "mine.py", "name=mine", code=2).stderr.splitlines()
    assert named in line and not (folder / "outputs").exists()
