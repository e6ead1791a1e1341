"""Advantages: of the prompt group, and of the batch."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.advantage import (
    AdvantageConfig,
    AdvantageName,
    Advantages,
    compute_advantages,
    group_advantages,
)
from message_queue.heads import head_of
from message_queue.trajectory import PromptGroup
from tests.helpers import numerics
from tests.helpers.groups import segment, trajectory

pytestmark = pytest.mark.numerics

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)
NAMES = st.sampled_from(["grpo", "dr_grpo", "rloo"])


def group(*rewards, number=0, tokens=None):
    made = PromptGroup(
        group=number,
        prompt=0,
        admitted_version=0,
        admitted_update=0,
        trajectories=[
            trajectory(segment(n), reward=reward)
            for reward, n in zip(rewards, tokens or [3] * len(rewards), strict=True)
        ],
    )
    return head_of(made)


@given(REWARDS, NAMES)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, name):
    values, spread = group_advantages(rewards, name)
    # Each is stored in float32; before, differences of rewards of up to 10 are divided by 1e-6 or more in float64.
    lost = numerics.FACTOR * np.finfo(np.float64).eps * len(values) * 10 / 1e-6
    numerics.assert_within(abs(values.astype(np.float64).sum()), numerics.EPSILON * np.abs(values).sum() + lost)
    if spread:
        assert (np.diff(values[np.argsort(rewards, kind="stable")]) >= 0).all()


@given(REWARDS, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    plain, spread = group_advantages(rewards, "grpo")
    shifted, same_spread = group_advantages(rewards + shift, "grpo")
    if spread == same_spread and np.ptp(rewards) > 1e-2:
        # Float64 numbers of up to 110 are rounded, and their differences to the mean are of the size of the spread.
        lost = numerics.FACTOR * np.finfo(np.float64).eps * 110 / 1e-2
        np.testing.assert_allclose(shifted, plain, rtol=numerics.EPSILON, atol=len(rewards) * lost)


def test_each_advantage_is_its_formula():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, "dr_grpo")[0], rewards - 0.5)
    np.testing.assert_allclose(group_advantages(rewards, "grpo")[0], (rewards - 0.5) / (rewards.std(ddof=1) + 1e-6))
    np.testing.assert_allclose(group_advantages(rewards, "rloo")[0][0], 1.0 - (0 + 0 + 1) / 3)


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0, 0.0], [0.3, 0.3 + 1e-9]])
def test_a_group_without_spread_has_nothing_to_teach(rewards):
    values, spread = group_advantages(np.array(rewards), "grpo")
    assert not values.any()
    assert not spread


def whitened(value, tokens):
    """As verl's masked_whiten, of a value among those of all tokens."""
    return (value - statistics.mean(tokens)) / (statistics.variance(tokens) + 1e-8) ** 0.5


def by_formula(name, groups, lengths):
    """Advantages of lists of rewards, one trajectory after the other; lengths: tokens of each trajectory."""
    lengths = iter(lengths)
    everyone, centred = [], []
    for rewards in groups:
        for r in rewards:
            n = next(lengths)
            everyone += [r] * n
            centred += [r - sum(rewards) / len(rewards)] * n
    out = []
    for rewards in groups:
        mean = sum(rewards) / len(rewards)
        for i, r in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            out.append(
                {
                    "grpo": lambda: (r - mean) / (statistics.stdev(rewards) + 1e-6),  # noqa: B023
                    "dr_grpo": lambda: r - mean,  # noqa: B023
                    "rloo": lambda: r - sum(others) / len(others),  # noqa: B023
                    "reinforce_plus_plus": lambda: whitened(r, everyone),  # noqa: B023
                    "reinforce_plus_plus_baseline": lambda: whitened(r - mean, centred),  # noqa: B023
                }[name]()
            )
    return out


@pytest.mark.parametrize("name", AdvantageName.__args__)
def test_every_advantage_is_its_formula_over_groups_of_unequal_size(name):
    rewards = [[1.0, 0.0, 0.25], [0.0, 2.0], [0.5, 0.0, 0.0, 0.0, 1.0]]
    lengths = [[1, 9, 4], [2, 3], [5, 1, 1, 7, 2]]
    made = [group(*r, number=i, tokens=n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    found = compute_advantages(made, AdvantageConfig(name=name))
    expected = by_formula(name, rewards, [n for tokens in lengths for n in tokens])
    np.testing.assert_allclose(found.values, expected, rtol=numerics.EPSILON)
    assert found.informative.all()


def test_over_the_batch_a_group_without_spread_is_whitened_too():
    groups = [group(1.0, 1.0), group(0.0, 1.0, number=1, tokens=[1, 3])]
    found = compute_advantages(groups, AdvantageConfig(name="reinforce_plus_plus"))
    assert found.informative.all() and found.values[0] > 0
    found = compute_advantages(groups, AdvantageConfig(name="reinforce_plus_plus_baseline"))
    assert found.informative.all() and found.values[0] < 0  # below the mean over tokens, that of the longer answers


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50)), min_size=2, max_size=12))
def test_reinforce_plus_plus_is_white_over_tokens(trajectories):
    rewards, lengths = zip(*trajectories, strict=True)
    found = compute_advantages(
        [group(*rewards, tokens=list(lengths))], AdvantageConfig(name="reinforce_plus_plus")
    ).values.astype(np.float64)
    if np.ptp(rewards) > 0.1:
        tokens = np.repeat(found, lengths)
        assert tokens.mean() == pytest.approx(0, abs=1e-5)
        assert tokens.std(ddof=1) == pytest.approx(1, rel=1e-2)


def test_over_the_batch_groups_of_one_trajectory_suffice():
    groups = [group(reward, number=i) for i, reward in enumerate([0.0, 1.0, 1.0])]
    found = compute_advantages(groups, AdvantageConfig(name="reinforce_plus_plus"))
    assert found.informative.all()
    numerics.assert_within(abs(found.values.sum()), numerics.EPSILON * np.abs(found.values).sum())


@pytest.mark.parametrize("name", AdvantageName.__args__)
@pytest.mark.parametrize("rewards", [[], [[1.0]], [[0.5, 0.5], [0.5]]])
def test_without_any_spread_there_is_nothing_to_teach(name, rewards):
    found = compute_advantages([group(*r, number=i) for i, r in enumerate(rewards)], AdvantageConfig(name=name))
    assert len(found.values) == sum(map(len, rewards))
    assert not found.values.any() and not found.informative.any()


def test_groups_are_normalised_apart_and_kept_in_order():
    found = compute_advantages([group(1.0, 0.0), group(5.0, 5.0, 5.0, number=1)], AdvantageConfig())
    assert found.values.dtype == np.float32
    assert found.informative.tolist() == [True, True, False, False, False]
    assert found.values[0] == pytest.approx(-found.values[1])
    assert not found.values[2:].any()


def test_advantages_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match=r"need \[S\]"):
        Advantages(values=np.zeros(3, np.float32), informative=np.ones(2, np.bool_))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"advantage\.name is 'gae'"):
        AdvantageConfig(name="gae")
