"""Group-relative advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.batch.advantage import AdvantageConfig, Advantages, compute_advantages, group_advantages
from message_queue.trajectory import PromptGroup
from tests.unit.groups import trajectory

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)
NAMES = st.sampled_from(["grpo", "dr_grpo", "rloo"])


def group(*rewards, number=0):
    return PromptGroup(
        group=number,
        prompt=0,
        admitted_version=0,
        admitted_update=0,
        trajectories=[trajectory(reward=reward) for reward in rewards],
    )


@given(REWARDS, NAMES)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, name):
    values, spread = group_advantages(rewards, name)
    assert abs(values.astype(np.float64).sum()) <= 1e-3
    if spread:
        assert (np.diff(values[np.argsort(rewards, kind="stable")]) >= 0).all()


@given(REWARDS, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    plain, spread = group_advantages(rewards, "grpo")
    shifted, same_spread = group_advantages(rewards + shift, "grpo")
    if spread == same_spread and np.ptp(rewards) > 1e-2:
        np.testing.assert_allclose(shifted, plain, atol=1e-4)


def test_each_advantage_is_its_formula():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, "dr_grpo")[0], rewards - 0.5)
    np.testing.assert_allclose(group_advantages(rewards, "grpo")[0], (rewards - 0.5) / (rewards.std(ddof=1) + 1e-4))
    np.testing.assert_allclose(group_advantages(rewards, "rloo")[0][0], 1.0 - (0 + 0 + 1) / 3)


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0, 0.0], [0.3, 0.3 + 1e-9]])
def test_a_group_without_spread_has_nothing_to_teach(rewards):
    values, spread = group_advantages(np.array(rewards), "grpo")
    assert not values.any()
    assert not spread


def test_groups_are_normalised_apart_and_kept_in_order():
    found = compute_advantages([group(1.0, 0.0), group(5.0, 5.0, 5.0, number=1)], AdvantageConfig())
    assert found.values.dtype == np.float32
    assert found.informative.tolist() == [True, True, False, False, False]
    assert found.values[0] == pytest.approx(-found.values[1])
    assert not found.values[2:].any()


def test_a_trajectory_without_reward_is_refused():
    open_group = group(1.0, 0.0, number=7)
    open_group.trajectories[1].reward = None
    with pytest.raises(ValueError, match="group 7: trajectory 1 has no reward"):
        compute_advantages([open_group], AdvantageConfig())


def test_advantages_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match=r"need \[S\]"):
        Advantages(values=np.zeros(3, np.float32), informative=np.ones(2, np.bool_))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"advantage\.name is 'gae'"):
        AdvantageConfig(name="gae")
