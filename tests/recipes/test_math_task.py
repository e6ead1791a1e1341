import asyncio
import json
import re

import numpy as np
import pytest

from agent_loop.loop import TurnLimits
from async_rl.config import RECIPES, ConfigError, load_config, recipe_overrides
from async_rl.controller.preflight import check_run
from recipes.math.make_sample import SAMPLE, write_sample
from recipes.math.task import math_task, read_gsm8k
from tests.helpers.fakes import FakeEngine, TurnScript
from tests.helpers.tasks import roll_task

LIMITS = TurnLimits(max_turns=1, max_tokens=128)


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_the_committed_sample_is_what_make_sample_writes(tmp_path):
    write_sample(tmp_path)
    names = [path.name for path in sorted(SAMPLE.iterdir())]
    assert names == ["train.jsonl", "validation.jsonl"]
    assert all((tmp_path / name).read_text() == (SAMPLE / name).read_text() for name in names)


def test_solutions_of_the_sample_are_right_and_no_question_is_asked_twice_or_held_out_and_trained():
    rows = [row for name in ("train", "validation") for row in read_gsm8k(str(SAMPLE / f"{name}.jsonl"), name=name)]
    for row in rows:
        steps = re.findall(r"<<(\d+)([-+*])(\d+)=(\d+)>>(\d+)", row["solution"])
        assert steps and all(str(eval(a + sign + b)) == c == d for a, sign, b, c, d in steps)
        assert steps[-1][-1] == row["answer"]
    assert len({row["question"] for row in rows}) == len(rows)


def test_read_gsm8k_takes_the_number_after_the_last_mark(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "#### 3?", "answer": "1,200+34=1,234\n#### 1,234 "})
    (row,) = read_gsm8k(path, name="train")
    assert row == {"question": "#### 3?", "solution": "1,200+34=1,234\n#### 1,234 ", "answer": "1234"}


@pytest.mark.parametrize("row", [{"question": "?", "answer": "7"}, {"question": "?"}, {"answer": "#### 7"}, "text", 7])
def test_read_gsm8k_refuses_rows_of_another_form_and_names_them(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", {"question": "?", "answer": "#### 7"}, row)
    with pytest.raises(ValueError, match=r"row 1 of .*rows\.jsonl"):
        read_gsm8k(path, name="task.options.train")


def test_demonstrations_are_prompts_with_their_solutions_in_the_loss():
    task = math_task()
    tokenizer = task._words()
    for index, (token_ids, mask) in enumerate(task.demonstrations(5, 20), start=5):
        target = task.train_prompt(index).target
        assert tokenizer.decode(token_ids[mask]) == target["solution"] + tokenizer.eos_token
        assert target["question"] in tokenizer.decode(token_ids[~mask])
        assert not np.any(np.diff(mask.astype(int)) < 0) and len(token_ids) <= LIMITS.max_tokens


def roll(task, prompt, reply):
    """The trajectory of a prompt that an engine answers with `reply`."""
    pytest.importorskip("math_verify")
    tokenizer = task._words()
    reply_ids = tokenizer.encode(reply + tokenizer.eos_token, add_special_tokens=False)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    engine = FakeEngine(TurnScript([reply_ids], opening=opening))
    return asyncio.run(roll_task(task, engine, tokenizer=tokenizer, limits=LIMITS, prompt=prompt))


@pytest.mark.parametrize(("said", "reward"), [("{}", 1), ("{}1", 0), ("", 0)])
def test_the_reward_of_the_math_task_is_1_for_the_right_answer(said, reward):
    task = math_task()
    prompt = task.train_prompt(0)
    reply = f"So it is\n#### {said.format(prompt.target['answer'])}" if said else "So it is"
    assert roll(task, prompt, reply).reward == reward


def test_the_math_recipe_can_start(tmp_path):
    config = load_config([*recipe_overrides(RECIPES / "math" / "recipe.yaml"), f"output_dir={tmp_path / 'run'}"])
    assert len(check_run(config).held_out[""]) == config.validation.prompts


def test_the_math_recipe_needs_a_checkpoint_for_files_of_the_user(tmp_path):
    path = write(tmp_path / "rows.jsonl", *({"question": f"{n}?", "answer": f"#### {n}"} for n in range(100)))
    overrides = [*recipe_overrides(RECIPES / "math" / "recipe.yaml"), f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"model\.checkpoint is null"):
        check_run(load_config([*overrides, f"task.options.train={path}"]))
