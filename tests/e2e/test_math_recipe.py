"""The math recipe on its sample, with the real engine and trainer."""

import json
import re

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.math.make_sample import SAMPLE
from tests.conformance.reference import reference
from tests.e2e.runs import check_records, check_rollouts, python
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.numerics import FACTOR

SMALL = (
    "warm_start.steps=60",
    "total_train_steps=2",
    "rollout.groups_per_batch=4",
    "rollout.trajectories_per_group=4",
    "validation.prompts=8",
    "validation.sampling.temperature=0",
)


def said(path):
    """Prompt, response and reward of each rollout of a round."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["prompt"], row["response"], row["reward"]) for row in rows]


@WHOLE_RUN
def test_the_math_recipe_trains_a_model_that_answers_in_the_format(tmp_path):
    directory = tmp_path / "run"
    folders = (f"output_dir={directory}", f"warm_start.cache={tmp_path / 'warm_start'}")
    python("-m", "async_rl.run", "--recipe", "math", *SMALL, *folders)
    steps, groups = check_records(directory, steps=2, staleness=1)
    check_rollouts(directory, steps, groups)

    python("-m", "async_rl.evaluate", directory)
    last = said(directory / "validation_rollouts.jsonl")
    assert len(last) == 8 and said(directory / "evaluation-1" / "rollouts.jsonl") == last
    options = ("--recipe", "math", *SMALL[4:], "rollout.limits.max_tokens=128", "--out", tmp_path / "out")
    python("-m", "async_rl.evaluate", directory / "final", *options)
    assert said(tmp_path / "out" / "rollouts.jsonl") == last

    check_rewards(last)
    check_transformers(directory / "final", last)


def check_rewards(rollouts):
    """Most answers have the format, and the reward is 1 for those with the number of the sample, else 0."""
    rows = [json.loads(line) for line in (SAMPLE / "validation.jsonl").read_text().splitlines()]
    solutions = {row["question"]: row["answer"] for row in rows}
    stated = []
    for prompt, response, reward in rollouts:
        (solution,) = [text for question, text in solutions.items() if question in prompt]
        number = re.search(r"#### (-?\d+)\b", response)
        stated += [number] if number else []
        assert reward == (number is not None and number[1] == solution.rpartition("#### ")[2])
    assert len(stated) >= 6, rollouts


def check_transformers(checkpoint, rollouts):
    """Each token of the greedy rollouts is the most likely one for transformers too, or tied with it in float32."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    compared = 0
    for prompt, response, _ in rollouts:
        asked = tokenizer.encode(prompt, add_special_tokens=False)
        token_ids = np.array([*asked, *tokenizer.encode(response, add_special_tokens=False)], np.int32)
        assert tokenizer.decode(token_ids) == prompt + response
        expected = reference(model, token_ids)
        tied_routes = np.flatnonzero((expected.margins <= FACTOR * expected.score_errors).any(1))
        settled = tied_routes[0] if len(tied_routes) else len(token_ids)
        rows = expected.logprobs[len(asked) - 1 : settled]
        chosen = token_ids[len(asked) : len(asked) + len(rows), None]
        gaps = rows.max(1, keepdims=True) - np.take_along_axis(rows, chosen, 1)
        assert gaps.max(initial=0.0) <= 2 * expected.logprob_bound, (prompt, response, gaps.argmax())
        compared += len(rows)
    assert compared > 100
