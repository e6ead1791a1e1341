"""Tasks from prompts, rewards and tools, and how a run finds them."""

import pytest

from agent_loop import SamplingConfig, SingleTurnLoop, ToolUseLoop, TurnLimits
from agent_loop.tools import PauseGate
from async_rl import Task, TaskConfig, build_task
from recipes.calculator.tokenizer import build_tokenizer

ROWS = [{"prompt": f"q{i}", "answer": str(i)} for i in range(20)]
FILE = """
from async_rl import Task
from beside import ROWS

def exact(completion, answer):
    return completion.text == answer

task = Task(prompts=ROWS, rewards=exact)

def chosen(*, rows=1, seed):
    return Task(prompts=[str(seed)] * rows, rewards=lambda completion: 0.0)

def fails():
    return {}["absent"]

def other():
    return 3
"""


def exact(completion, answer):
    return completion.text == answer


def build(task, **options):
    return build_task(TaskConfig(factory=task, options=options), seed=5)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text(f"ROWS = {ROWS!r}\n")
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_the_prompts_of_a_task_are_its_rows_and_repeat_with_the_seed():
    task = Task(prompts=ROWS, rewards=exact, validation=0.25)
    task.seed = 5
    train, held_out = [task.train_prompt(i) for i in range(30)], task.validation_prompts(100)
    assert len(held_out) == 5 and not {p.messages for p in train} & {p.messages for p in held_out}
    assert {p.target["answer"] for p in (*train, *held_out)} == {row["answer"] for row in ROWS}
    again = Task(prompts=ROWS, rewards=exact, validation=0.25)
    again.seed = 5
    assert again.train_prompt(29) == train[29] and again.validation_prompts(2) == held_out[:2]


def test_a_task_in_a_file_is_found_with_the_modules_beside_it(file):
    task = build(f"{file}:task")
    assert task.seed == 5 and task.train_prompt(0).target in ROWS
    assert build(f"{file}:chosen", rows=3).train_prompt(0).messages[0].content == "5"


@pytest.mark.parametrize(
    "name, options, named",
    [
        ("absent", {}, "absent"),
        ("chosen", {"row": 2}, "row"),
        ("fails", {}, r"KeyError.*mine\.py:14 in fails"),
        ("other", {}, "int"),
        ("ROWS", {}, "list"),
    ],
)
def test_a_task_that_cannot_be_built_is_refused_with_its_line(file, name, options, named):
    with pytest.raises(ValueError, match=named):
        build(f"{file}:{name}", **options)


def test_a_task_file_that_fails_or_is_absent_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\nx = 1 / 0\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError.*broken\.py:2"):
        build(f"{tmp_path / 'broken.py'}:task")
    with pytest.raises(ValueError, match=r"absent\.py"):
        build(f"{tmp_path / 'absent.py'}:task")


def test_a_row_that_the_rewards_cannot_use_is_refused_at_the_first_prompt():
    task = Task(prompts=[*ROWS, {"prompt": "q"}], rewards=exact)
    with pytest.raises(ValueError, match=r"exact.*answer"):
        task.train_prompt(0)


def test_held_out_prompts_that_the_task_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"validation\.prompts"):
        Task(prompts=ROWS, rewards=exact).validation_prompts(4)
    with pytest.raises(ValueError, match="validation"):
        Task(prompts=lambda: iter(ROWS), rewards=exact, validation=0.5).validation_prompts(4)


@pytest.mark.parametrize("tools, kind", [([], SingleTurnLoop), ([lambda: None], ToolUseLoop)])
def test_a_task_with_tools_has_a_loop_of_several_turns(tools, kind):
    for tool in tools:
        tool.__doc__ = "Does nothing."
    task = Task(prompts=ROWS, rewards=exact, tools=tools)
    limits = TurnLimits(max_turns=2, max_tokens=50)
    loop = task.build_loop(
        engine=None, tokenizer=build_tokenizer(), sampling=SamplingConfig(), limits=limits, gate=PauseGate()
    )
    assert isinstance(loop, kind)
