"""Results of validation rounds."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.metrics.validation import ValidationRollout, pass_at, validation_result


def rollout(reward, *, version=1, error=None):
    """One of `reward` x 10 tokens."""
    tokens = int(reward * 10)
    return ValidationRollout(
        reward=reward,
        tokens=tokens,
        cut_off=reward == 0,
        error=error,
        prompt="1+1",
        response="2",
        min_version=version,
        max_version=version,
    )


FAILED = rollout(0.0, version=-1, error="it raised")


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_rollouts_with_a_right_one(right, data):
    k = data.draw(st.integers(1, len(right)))
    choices = list(combinations(right, k))
    share = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, rollouts=len(right), right=sum(right)) == pytest.approx(share, abs=1e-12)


def test_a_validation_result_is_over_all_prompts_and_over_each_set():
    sets = {
        "easy": [[rollout(1.0), rollout(1.0), rollout(0.5), rollout(0.0)]],
        "hard": [[rollout(0.0), rollout(0.0), rollout(1.0), rollout(0.0)], [rollout(0.0, version=3)] * 4],
    }
    whole = validation_result(sets)
    assert (whole.prompts, whole.samples, whole.num_rollouts, whole.failed) == (3, 4, 12, 0)
    assert (whole.success_rate, whole.cut_off, whole.mean_tokens) == (3.5 / 12, 8, 35 / 12)
    assert (whole.min_version, whole.max_version) == (1, 3)
    assert whole.pass_at == {1: 1 / 3, 2: pytest.approx((1 + 0.5 + 0) / 3), 4: 2 / 3}
    assert {name: each.success_rate for name, each in whole.sets.items()} == {"easy": 2.5 / 4, "hard": 1 / 8}
    rows = list(whole.rows(7))
    assert [(row["set"], row["prompt_number"], row["sample"]) for row in rows[3:6]] == [
        ("easy", 0, 3),
        ("hard", 0, 0),
        ("hard", 0, 1),
    ]
    assert rows[6]["reward"] == 1.0 and rows[6]["response"] == "2" and len(rows) == 12
    metrics = whole.metrics()
    assert metrics["validation/success"] == 3.5 / 12 and metrics["validation/hard/success"] == 1 / 8
    assert metrics["validation/easy/pass_at_4"] == 1 and metrics["validation/hard/max_version"] == 3


def test_the_info_of_held_out_rollouts_is_a_metric_over_those_that_have_the_key():
    hard = [replace(rollout(1.0), info={"turns": 3.0, "lines": 7.0}), FAILED]
    result = validation_result({"easy": [[replace(rollout(0.0), info={"turns": 1.0}), FAILED]], "hard": [hard]})
    found = {key: value for key, value in result.metrics().items() if "info/" in key}
    assert found == {
        "validation/info/turns": 2.0,
        "validation/info/lines": 7.0,
        "validation/easy/info/turns": 1.0,
        "validation/hard/info/turns": 3.0,
        "validation/hard/info/lines": 7.0,
    }
    rows = [(row["info/turns"], row["info/lines"]) for row in result.rows(7)]
    assert rows == [(1.0, None), (None, None), (3.0, 7.0), (None, None)]


def test_a_validation_result_excludes_failed_rollouts_and_prompts_with_too_few():
    prompts = [[rollout(1.0), FAILED], [rollout(0.0), rollout(1.0)], [FAILED, FAILED]]
    result = validation_result({"": prompts})
    assert (result.success_rate, result.failed, result.first_error) == (2 / 3, 3, "it raised")
    assert result.pass_at == {1: 0.75, 2: 1.0} and result.sets == {}
    nothing = validation_result({"": [[FAILED, FAILED]]})
    assert all(math.isnan(value) for value in (nothing.success_rate, nothing.mean_tokens, *nothing.pass_at.values()))
    assert validation_result({"": [[rollout(1.0)]]}).pass_at == {}, "success says it all"
