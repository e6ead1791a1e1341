"""GAE over the sampled tokens of trajectories: closed forms, and a plain recursion in float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.controller.prepare import prepare
from async_rl.trainer.critic.gae import GAE, batch_advantages, explained_variance, token_advantages, whitened
from message_queue.heads import head_of
from message_queue.queue import Batch
from message_queue.tokens import StopReason
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.groups import segment
from tests.helpers.losses import batch_config

UNITS = st.floats(0, 1, width=32)
NUMBERS = st.floats(-5, 5, width=32)


def advantages(values, rewards, *, counts=None, after=None, gamma=1.0, lam=1.0):
    counts = [len(values)] if counts is None else counts
    after = np.zeros(len(counts)) if after is None else after
    return token_advantages(
        np.array(values, float),
        np.array(rewards, float),
        counts=np.array(counts),
        after=np.array(after, float),
        gamma=gamma,
        lam=lam,
    )


def recursion(values, rewards, after, *, gamma, lam):
    """delta_i + gamma lam A_(i+1) of one trajectory, from its end."""
    found, later, following = [], 0.0, after
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        later = reward + gamma * following - value + gamma * lam * later
        following = value
        found.append(later)
    return found[::-1]


@given(
    st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=9), min_size=1, max_size=6),
    st.lists(NUMBERS, min_size=6, max_size=6),
    UNITS,
    UNITS,
)
def test_advantages_are_those_of_the_recursion_of_each_trajectory(trajectories, after, gamma, lam):
    expected = [
        x
        for of, end in zip(trajectories, after, strict=False)
        for x in recursion([v for v, _ in of], [r for _, r in of], end, gamma=gamma, lam=lam)
    ]
    tokens = [token for of in trajectories for token in of]
    found = advantages(
        [v for v, _ in tokens],
        [r for _, r in tokens],
        counts=[len(of) for of in trajectories],
        after=after[: len(trajectories)],
        gamma=gamma,
        lam=lam,
    )
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_with_lam_1_the_advantage_is_the_discounted_return_minus_the_value():
    values, gamma = np.array([0.3, -0.2, 0.7, 0.1]), 0.9
    returns = 2.0 * gamma ** np.arange(3, -1, -1)
    assert advantages(values, [0, 0, 0, 2.0], gamma=gamma) == pytest.approx(returns - values, rel=1e-14)


def test_exact_values_leave_no_advantage():
    values = 2.0 * 0.9 ** np.arange(3, -1, -1)
    assert advantages(values, [0, 0, 0, 2.0], gamma=0.9, lam=0.4) == pytest.approx(np.zeros(4), abs=1e-15)


def test_the_example_of_the_module():
    assert advantages([0.5, 0.25], [0, 1], lam=0.5).tolist() == [0.125, 0.75]


@given(st.lists(NUMBERS, min_size=2, max_size=20))
def test_whitened_advantages_have_mean_0_and_variance_1(values):
    found = whitened(np.array(values, float))
    assert abs(found.mean()) < 1e-9 * max(1.0, np.abs(found).max())
    if np.var(values) > 1e-3:
        assert found.var(ddof=1) == pytest.approx(1, rel=1e-4)


def test_fewer_than_two_advantages_cannot_be_whitened():
    assert whitened(np.array([3.0])).tolist() == [0] and whitened(np.zeros(0)).tolist() == []


def test_explained_variance_is_1_of_exact_values_and_0_of_a_constant():
    returns = np.array([1.0, 0.0, 2.0])
    assert explained_variance(returns + 0.3, returns) == pytest.approx(1)
    assert explained_variance(np.full(3, 7.0), returns) == pytest.approx(0)
    assert explained_variance(2 * returns, returns) == pytest.approx(0)
    assert math.isnan(explained_variance(returns, np.ones(3))) and math.isnan(
        explained_variance(returns[:0], returns[:0])
    )


@pytest.mark.parametrize(("field", "value"), [("gamma", 1.1), ("lam", -0.1)])
def test_a_discount_outside_0_and_1_is_refused(field, value):
    with pytest.raises(ValueError, match=f"advantage.{field}"):
        GAE(**{field: value})


# ---- from heads


def made(*turns, reward, stop_reason=StopReason.STOP, forks=()):
    """A trajectory whose turns are segments of (tokens, version) after an observation of two tokens.

    forks: (turns shared with the root, tokens, version).
    """
    root = Trajectory(routing=None)
    for tokens, version in turns:
        root.observe(np.arange(2, dtype=np.int32))
        root.extend(segment(tokens, version=version))
    for shared, tokens, version in forks:
        fork = root.fork(turns=shared)
        fork.observe(np.arange(3, dtype=np.int32))
        fork.extend(segment(tokens, version=version))
    root.close(stop_reason=stop_reason, reward=reward)
    return root


def prepared(*trajectories, min_update=0, gae):
    groups = [
        PromptGroup(group=n, prompt=n, admitted_version=0, admitted_update=0, trajectories=[t])
        for n, t in enumerate(trajectories)
    ]
    updates = {version: version for version in range(6)}
    return prepare(
        Batch(groups=[head_of(g) for g in groups], update=5, version_updates=updates, min_update=min_update),
        [content_of(group) for group in groups],
        batch_config(advantage=gae),
        version_updates=updates,
    ).batch


def of_batch(gae, batch, values, *, ends=None, **options):
    return batch_advantages(
        gae,
        np.array(values, float),
        tokens=batch.num_loss_tokens,
        trajectory=batch.trajectory,
        rewards=batch.rewards.values,
        ends=np.zeros(len(batch)) if ends is None else ends,
        truncated=batch.truncated,
        **options,
    )


DISCOUNTED = GAE(gamma=0.9, lam=0.8, whiten=False)
TOOLS = made((2, 5), (3, 5), reward=1.0)
FORKS = made((2, 5), (1, 5), reward=0.5, forks=[(1, 3, 5)])
CUT = made((2, 5), (1, 5), reward=0.25, stop_reason=StopReason.LENGTH, forks=[(1, 1, 5)])
OLD = made((2, 1), (2, 5), reward=-1.0)
VALUES = np.random.default_rng(0).normal(size=5 + 6 + 4 + 4)


def expected_of(values, reward, *, after=0.0):
    return recursion(list(values), [0.0] * (len(values) - 1) + [reward], after, gamma=0.9, lam=0.8)


def test_the_next_state_of_a_token_is_the_next_sampled_one_over_tools_and_forks():
    batch = prepared(TOOLS, FORKS, gae=DISCOUNTED)
    assert batch.informative.all() and len(batch) == 3, "a fork is a sequence of its trajectory"
    found, returns = of_batch(DISCOUNTED, batch, VALUES[:11])
    assert found == pytest.approx([*expected_of(VALUES[:5], 1.0), *expected_of(VALUES[5:11], 0.5)], rel=1e-12)
    assert returns == pytest.approx(found + VALUES[:11], rel=1e-12)


def test_a_trajectory_that_a_limit_cut_continues_with_the_value_after_its_last_sequence():
    batch = prepared(TOOLS, CUT, gae=DISCOUNTED)
    assert batch.truncated == [1]
    found, _ = of_batch(DISCOUNTED, batch, VALUES[:9], ends=np.array([7.0, 5.0, 3.0]))
    assert found == pytest.approx(
        [*expected_of(VALUES[:5], 1.0), *expected_of(VALUES[5:9], 0.25, after=3.0)], rel=1e-12
    )


def test_tokens_that_are_too_old_are_left_out_and_change_no_other_advantage():
    values = VALUES[:4]
    whole, _ = of_batch(DISCOUNTED, prepared(OLD, gae=DISCOUNTED), values)
    young, _ = of_batch(DISCOUNTED, prepared(OLD, gae=DISCOUNTED, min_update=3), values[2:])
    assert young == pytest.approx(whole[2:], rel=1e-12)


def test_a_trajectory_without_a_token_in_the_loss_has_no_part():
    old = made((2, 1), reward=9.0, stop_reason=StopReason.LENGTH)
    batch = prepared(old, TOOLS, gae=DISCOUNTED, min_update=3)
    assert batch.informative.tolist() == [False, True]
    found, _ = of_batch(DISCOUNTED, batch, VALUES[:5], ends=np.array([5.0, 5.0]))
    assert found == pytest.approx(expected_of(VALUES[:5], 1.0), rel=1e-12)


def test_penalties_lower_the_reward_of_each_token():
    batch, penalties = prepared(TOOLS, gae=DISCOUNTED), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    found, _ = of_batch(DISCOUNTED, batch, VALUES[:5], penalties=penalties)
    rewards = [-0.1, -0.2, -0.3, -0.4, 0.5]
    assert found == pytest.approx(recursion(list(VALUES[:5]), rewards, 0.0, gamma=0.9, lam=0.8), rel=1e-12)


def test_advantages_are_whitened_over_the_tokens_of_the_batch_and_returns_are_not():
    batch, plain = (
        prepared(TOOLS, FORKS, gae=DISCOUNTED),
        of_batch(DISCOUNTED, prepared(TOOLS, FORKS, gae=DISCOUNTED), VALUES[:11]),
    )
    found, returns = of_batch(GAE(gamma=0.9, lam=0.8), batch, VALUES[:11])
    assert found == pytest.approx(whitened(plain[0])) and returns == pytest.approx(plain[1])
