"""Code of the guides in use: a task with a tool, copied from its page, and rolled out by a fake engine."""

import importlib
import json
import sys

import pytest

from agent_loop import SamplingConfig, TurnLimits
from agent_loop.programs.program import ModelAccess, command
from agent_loop.tools.tool import PauseGate
from async_rl import Task, TaskConfig, build_task
from async_rl.rollout.rollouter import Rollouter
from message_queue.trajectory import Admission
from recipes.calculator.tokenizer import END_OF_TURN, build_tokenizer
from tests.docs.pages import module_of
from tests.helpers.fakes import SPEC, FakeEngine, TurnScript

TOKENIZER = build_tokenizer()
LIMITS = TurnLimits(max_turns=3, max_tokens=300)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Copies a block of a guide into a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    copied = []

    def copy(page, title):
        (tmp_path / title).write_text(module_of(page, title))
        importlib.invalidate_caches()
        copied.append(title.removesuffix(".py"))

    yield copy
    for name in copied:
        sys.modules.pop(name, None)


def products(*, seed=0):
    return build_task(TaskConfig(factory="products:task"), seed=seed)


async def roll(task, *turns):
    """A group of two trajectories of the first prompt, each with these turns."""
    engine = FakeEngine(TurnScript([ids(turn + END_OF_TURN) for turn in turns], opening=ids("<|im_start|>assistant\n")))
    loop = task.build_loop(
        engine=engine, tokenizer=TOKENIZER, sampling=SamplingConfig(), limits=LIMITS, gate=PauseGate()
    )
    rollouter = Rollouter(loop=loop, routing=SPEC, trajectories_per_group=2)
    admission = Admission(group=0, prompt=0, admitted_version=0, admitted_update=0)
    return (await rollouter.roll(task.train_prompt(0), admission)).trajectories


def call_for(prompt):
    a, b = prompt.messages[0].content.split("*")
    return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


async def test_the_task_of_the_guide_calls_its_tool_and_rewards_the_product(guide):
    guide("docs/guides/task.md", "products.py")
    task = products()
    prompt = task.train_prompt(0)
    answer = prompt.target["answer"]
    for said, reward in ((answer, 1.0), ("7", 0.0)):
        for trajectory in await roll(task, call_for(prompt), said):
            assert (trajectory.reward, trajectory.info["tool_calls"], trajectory.info["tool_errors"]) == (reward, 1, 0)
            assert f"<tool_response>\n{answer}\n</tool_response>" in TOKENIZER.decode(trajectory.token_ids().tolist())


def test_a_task_without_a_model_or_demonstrations_says_what_to_set(guide, tmp_path):
    guide("docs/guides/task.md", "products.py")
    with pytest.raises(ValueError, match=r"model\.checkpoint"):
        products().save_initial_checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match=r"warm_start\.steps"):
        products().demonstrations(0, 1)


async def test_the_tool_of_the_guide_works_in_a_task(guide):
    guide("docs/guides/tool.md", "lookup.py")
    from lookup import lookup

    task = Task(prompts=["?"], tools=[lookup], rewards=lambda completion: completion.text == "7")
    calls = "".join(
        f'<tool_call>{{"name": "lookup", "arguments": {{"word": "{word}"}}}}</tool_call>' for word in ("turn", "chunk")
    )
    for trajectory in await roll(task, calls, "7"):
        assert (trajectory.reward, trajectory.info["tool_calls"], trajectory.info["tool_errors"]) == (1, 2, 1)
        text = TOKENIZER.decode(trajectory.token_ids().tolist())
        assert "\none model call\n" in text and "\nerror: no entry for 'chunk'\n" in text


async def test_the_class_of_the_guide_has_a_board_for_each_rollout(guide):
    guide("docs/guides/tool.md", "board.py")
    from board import Board

    task = Task(prompts=[{"prompt": "?", "size": 1}], tools=[Board], rewards=lambda completion: completion.text == "7")
    call = '<tool_call>{"name": "move", "arguments": {"x": %d, "y": 0}}</tool_call>'
    for trajectory in await roll(task, call % 0 + call % 1, call % 0, "7"):
        assert (trajectory.reward, trajectory.info["tool_calls"], trajectory.info["tool_errors"]) == (1, 3, 0)
        text = TOKENIZER.decode(trajectory.token_ids().tolist())
        assert [text.count(f"\n{reply}\n") for reply in ("1 stones", "2 stones", "outside of the board")] == [1, 1, 1]


async def test_a_program_reads_the_json_of_the_guide(tmp_path):
    copy = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read()); print('said'); print(0.5)"
    program = command(sys.executable, "-c", copy, str(tmp_path / "stdin.json"))
    task = Task(prompts=[{"prompt": "1+2", "answer": "3"}], agent=program)
    access = ModelAccess(base_url="http://127.0.0.1", api_key="key", model="policy")
    assert await program(task.train_prompt(0), access) == 0.5
    shown = json.loads(module_of("docs/guides/agent.md", "stdin.json"))
    assert json.loads((tmp_path / "stdin.json").read_text()) == shown


def test_paths_of_prompts_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "tasks").mkdir()
    source = "from async_rl import Task\ntask = Task(prompts='rows.jsonl', rewards=lambda completion: 1.0)\n"
    (tmp_path / "tasks" / "mine.py").write_text(source)
    for folder, text in ((tmp_path, "here"), (tmp_path / "tasks", "there")):
        (folder / "rows.jsonl").write_text(json.dumps({"prompt": text}))
    monkeypatch.chdir(tmp_path)
    task = build_task(TaskConfig(factory=f"{tmp_path}/tasks/mine.py:task"), seed=0)
    assert task.train_prompt(0).messages[0].content == "here"


def test_the_readme_shows_the_task_of_the_guide():
    assert module_of("README.md", "products.py") == module_of("docs/guides/task.md", "products.py")
