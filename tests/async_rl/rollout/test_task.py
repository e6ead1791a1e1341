"""Tasks from prompts, rewards and tools, and how a run finds them."""

import json
from dataclasses import replace

import pytest

from agent_loop import SamplingConfig, SingleTurnLoop, ToolUseLoop, TurnLimits, external
from agent_loop.loop import Message, Prompt, ToolUse
from agent_loop.tools.tool import PauseGate
from async_rl import Task, TaskConfig, build_task
from async_rl.rollout.prompts import prompt_order
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
        ("mine.py:absent", {}, "absent"),
        ("mine.py:chosen", {"row": 2}, "row"),
        ("mine.py:fails", {}, r"KeyError.*mine\.py:14 in fails"),
        ("mine.py:other", {}, "int"),
        ("mine.py:ROWS", {}, "list"),
        ("broken.py:task", {}, r"ZeroDivisionError.*broken\.py:2"),
        ("absent.py:task", {}, r"absent\.py"),
    ],
)
def test_a_task_that_cannot_be_built_is_refused_with_its_line(file, name, options, named):
    (file.parent / "broken.py").write_text("x = 1\nx = 1 / 0\n")
    with pytest.raises(ValueError, match=named):
        build(f"{file.parent / name}", **options)


def test_a_row_that_the_rewards_cannot_use_is_refused_at_the_first_prompt():
    task = Task(prompts=[*ROWS, {"prompt": "q"}], rewards=exact)
    with pytest.raises(ValueError, match=r"exact.*answer"):
        task.train_prompt(0)


def test_named_sets_are_held_out_and_keep_their_names():
    sets = {"easy": ROWS[:3], "generated": lambda: ({"prompt": f"g{i}", "answer": ""} for i in range(99))}
    task = Task(prompts=[*ROWS, *ROWS[:2]], rewards=exact, validation=sets)
    found = {name: [prompt.messages[-1].content for prompt in of] for name, of in task.validation_prompts(4).items()}
    assert found == {"easy": ["q0", "q1", "q2"], "generated": ["g0", "g1", "g2", "g3"]}
    assert texts(map(task.train_prompt, range(17))) == sorted(row["prompt"] for row in ROWS[3:])
    assert len(task.notes) == 1


@pytest.mark.parametrize(
    ("prompts", "sets", "named"),
    [
        *((ROWS, sets, named) for sets, named in (({}, "no sets"), ({"": ROWS}, "''"), ({"a/b": ROWS}, "a/b"))),
        (ROWS, {"hard": []}, "hard"),
        (lambda: iter(ROWS), 0.5, ""),
    ],
)
def test_held_out_prompts_that_a_run_cannot_name_or_read_are_refused(prompts, sets, named):
    with pytest.raises(ValueError, match=rf"validation.*{named}"):
        Task(prompts=prompts, rewards=exact, validation=sets).validation_prompts(1)
    assert list(Task(prompts=ROWS, rewards=exact).validation_prompts(4)) == []


@pytest.mark.parametrize("tools, kind", [([], SingleTurnLoop), ([lambda: None], ToolUseLoop)])
def test_a_task_with_tools_has_a_loop_of_several_turns(tools, kind):
    for tool in tools:
        tool.__doc__ = "Does nothing."
    task = Task(prompts=ROWS, rewards=exact, tools=tools)
    limits = TurnLimits(max_turns=2, max_tokens=50)
    parts = {"engine": None, "tokenizer": build_tokenizer(), "sampling": SamplingConfig(), "gate": PauseGate()}
    assert isinstance(task.build_loop(limits=limits, **parts), kind)


@pytest.mark.parametrize(
    "options",
    [
        {"agents": ["planner"]},
        {"agents": {"planner": "yes"}},
        {"agents": {"": True}},
        {"agents": {"planner": False, "policy": False}},
        {"agents": {"planner": True}, "agent": None, "rewards": exact},
    ],
)
def test_agents_that_cannot_be_used_are_refused(options):
    with pytest.raises(ValueError, match="agents is"):
        Task(**{"prompts": ROWS, "agent": external, **options})
    assert Task(prompts=ROWS, agent=external, agents={"critic": False}).agents == {"critic": False}


LONG = {"prompt": "9" * 40, "answer": "9"}
LIMITS = TurnLimits(max_turns=1, max_tokens=40)


def measured(**options):
    task = Task(**{"prompts": ROWS, "rewards": exact, **options})
    task.measure_prompts(build_tokenizer(), LIMITS)
    return task


def texts(prompts):
    return sorted(prompt.messages[0].content for prompt in prompts)


def test_longer_rows_are_left_out_and_counted_as_the_template_renders_them():
    task = measured(prompts=[*ROWS, LONG, LONG], validation=[LONG, {"prompt": "v", "answer": ""}], max_prompt_tokens=30)
    assert texts(map(task.train_prompt, range(20))) == sorted(row["prompt"] for row in ROWS)
    assert texts(task.validation_prompts(9)) == ["v"]
    assert [note.partition(" are left out")[0] for note in task.notes] == [
        "1 of 2 rows of validation",
        "2 of 22 rows of prompts",
    ]
    assert "max_prompt_tokens" in task.notes[1]

    with pytest.raises(ValueError, match=r"no row of prompts.*20 of 20.*max_prompt_tokens"):
        measured(system="9" * 20, max_prompt_tokens=30).train_prompt(0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompts": [*ROWS, LONG]}, r"prompt 20 has .* tokens .*limits\.max_tokens is 40"),
        ({"validation": [LONG]}, r"limits\.max_tokens"),
        ({"prompts": lambda: iter([LONG] * 9)}, r"limits\.max_tokens"),
        ({"prompts": lambda: iter(ROWS), "max_prompt_tokens": 30}, "max_prompt_tokens is 30"),
        ({"max_prompt_tokens": 40}, r"max_prompt_tokens is 40 with rollout\.limits\.max_tokens=40"),
        ({"prompts": ROWS, "validation": ROWS}, "no row of prompts is left.*validation"),
    ],
)
def test_rows_that_the_run_cannot_use_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        measured(**options).train_prompt(0)


class OwnLoop(Task):
    def build_loop(self, **parts):
        raise NotImplementedError


def test_a_limit_of_prompts_that_a_loop_of_its_own_would_not_know_is_refused():
    with pytest.raises(ValueError, match=r"max_prompt_tokens is 30, and OwnLoop defines build_loop"):
        OwnLoop(prompts=ROWS, rewards=exact, max_prompt_tokens=30).measure_prompts(build_tokenizer(), LIMITS)


def test_prompts_of_a_file_are_measured_too(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": LONG["prompt"]}], "target": {"answer": "9"}}))
    with pytest.raises(ValueError, match=r"prompts\.jsonl.*limits\.max_tokens"):
        prompt_order(measured(), prompt_file=path, seed=0)


def test_rows_that_are_held_out_are_left_out_of_training_and_counted():
    task = Task(prompts=[*ROWS, *ROWS[:2]], validation=[ROWS[3], ROWS[0]], rewards=exact)
    assert texts(map(task.train_prompt, range(19))) == sorted(["q1", "q1", "q2", *(f"q{i}" for i in range(4, 20))])
    assert [note.partition(" are left out")[0] for note in task.notes] == ["3 of 22 rows of prompts"]
    halves = Task(prompts=ROWS * 2, validation=0.25, rewards=exact)
    held_out = set(texts(halves.validation_prompts(99)))
    assert not held_out & set(texts(map(halves.train_prompt, range(50)))) and len(halves.notes) == 1


FIRST_SYSTEM_ONLY = "{% for m in messages %}{% if loop.first or m.role != 'system' %}" + (
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize("template", [None, FIRST_SYSTEM_ONLY])
def test_a_system_message_or_call_that_the_template_leaves_out_is_refused(template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    task = Task(prompts=ROWS, rewards=exact)
    task.measure_prompts(tokenizer, replace(LIMITS, max_tokens=4096))
    systems = [Message(role="system", content=text) for text in ("Be  short.", "Be\nkind.")]
    user = Message(role="user", content="hi")
    prompt = Prompt(index=4, messages=(*systems, user))
    if template is None:
        task.check_length(prompt)
    else:
        with pytest.raises(ValueError, match=r"prompt 4 has 'Be\\nkind\.' in a system message"):
            task.check_length(prompt)
    call = Message(role="assistant", content="", tool_calls=(ToolUse(id="c", name="add", arguments="{}"),))
    with pytest.raises(ValueError, match="prompt 4 has 'add' in a system message or a tool call"):
        task.check_length(Prompt(index=4, messages=(user, call)))
