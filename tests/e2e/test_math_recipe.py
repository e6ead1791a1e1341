"""The math recipe on its sample, with the real engine and trainer."""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.math.task import math_task
from tests.e2e.runs import check_records, check_rollouts

SMALL = (
    "warm_start.steps=60",
    "total_train_steps=2",
    "rollout.groups_per_batch=4",
    "rollout.trajectories_per_group=4",
    "validation.prompts=8",
    "validation.sampling.temperature=0",
)


def run(module, *arguments):
    command = [sys.executable, "-m", f"async_rl.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def said(path):
    """Prompt, response and reward of each rollout of a round."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["prompt"], row["response"], row["reward"]) for row in rows]


def test_the_math_recipe_trains_a_model_that_answers_in_the_format(tmp_path):
    directory = tmp_path / "run"
    folders = (f"output_dir={directory}", f"warm_start.cache={tmp_path / 'warm_start'}")
    run("run", "--recipe", "math", *SMALL, *folders)
    steps, groups = check_records(directory, steps=2, staleness=1)
    check_rollouts(directory, steps, groups)
    assert all(step["reward/mean"] > 0 for step in steps)

    run("evaluate", str(directory))
    last = said(directory / "validation_rollouts.jsonl")
    assert len(last) == 8 and said(directory / "evaluation-1" / "rollouts.jsonl") == last
    run("evaluate", str(directory / "final"), "--recipe", "math", *SMALL[4:], "--out", str(tmp_path / "out"))
    assert said(tmp_path / "out" / "rollouts.jsonl") == last

    tokenizer = AutoTokenizer.from_pretrained(directory / "final")
    model = AutoModelForCausalLM.from_pretrained(directory / "final", dtype=torch.float32)
    answers = []
    for prompt in math_task().validation_prompts(8):
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**asked, max_new_tokens=64, do_sample=False)[0, asked["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(answer, skip_special_tokens=True).rpartition("\n#### ")[2])
    assert sum(answer.isdigit() for answer in answers) >= 6, answers
