"""Advantages: of the prompt group, and of the batch."""

import statistics
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.advantage import (
    AdvantageConfig,
    AdvantageName,
    Advantages,
    batch_rewards,
    group_advantages,
)
from async_rl.trainer.batch.training_batch import training_batch
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead, head_of
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup
from tests.helpers import numerics
from tests.helpers.groups import segment, trajectory

pytestmark = pytest.mark.numerics

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)


def group(rewards, *, number=0, tokens=None):
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


@given(REWARDS, st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_advantages_of_a_group_sum_to_zero_in_the_order_of_rewards(rewards, name):
    values, spread = group_advantages(rewards, name)
    # Each is stored in float32; before, differences of rewards of up to 10 are divided by 1e-6 or more in float64.
    lost = numerics.FACTOR * np.finfo(np.float64).eps * len(values) * 10 / 1e-6
    numerics.assert_within(abs(values.astype(np.float64).sum()), numerics.EPSILON * np.abs(values).sum() + lost)
    if spread:
        assert (np.diff(values[np.argsort(rewards, kind="stable")]) >= 0).all()


def whitened(value, tokens):
    """As verl's masked_whiten, of a value among those of all tokens."""
    return (value - statistics.mean(tokens)) / (statistics.variance(tokens) + 1e-8) ** 0.5


def by_formula(name, groups, lengths):
    """Advantages of lists of rewards, one trajectory after the other; lengths: tokens of each trajectory."""
    means = [statistics.mean(rewards) for rewards in groups]
    pairs = [(r, mean) for rewards, mean in zip(groups, means, strict=True) for r in rewards]
    of_tokens = [pair for pair, n in zip(pairs, lengths, strict=True) for _ in range(n)]

    def advantage(r, rewards, mean):
        match name:
            case "grpo":
                return (r - mean) / (statistics.stdev(rewards) + 1e-6)
            case "dr_grpo":
                return r - mean
            case "rloo":
                return r - (sum(rewards) - r) / (len(rewards) - 1)
            case "reinforce_plus_plus":
                return whitened(r, [reward for reward, _ in of_tokens])
            case "reinforce_plus_plus_baseline":
                return whitened(r - mean, [reward - of_group for reward, of_group in of_tokens])

    return [advantage(r, rewards, mean) for rewards, mean in zip(groups, means, strict=True) for r in rewards]


@pytest.mark.parametrize("name", AdvantageName.__args__)
def test_every_advantage_is_its_formula_over_unequal_groups(name):
    rewards = [[1.0, 0.0, 0.25], [0.75, 0.75], [0.0, 2.0], [0.5, 0.0, 0.0, 0.0, 1.0]]
    lengths = [[1, 9, 4], [3, 6], [2, 3], [5, 1, 1, 7, 2]]
    made = [group(r, number=i, tokens=n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    found = batch_rewards(made, AdvantageConfig(name=name)).advantages()
    assert found.values.dtype == np.float32
    expected = by_formula(name, rewards, [n for tokens in lengths for n in tokens])
    np.testing.assert_allclose(found.values, expected, rtol=numerics.EPSILON)
    of_group = name in ("grpo", "dr_grpo", "rloo")  # the second group has no spread, but the batch has
    assert found.informative.tolist() == [len(r) != 2 or r[0] != r[1] or not of_group for r in rewards for _ in r]


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50)), min_size=2, max_size=12))
def test_reinforce_plus_plus_is_white_over_tokens_of_groups_of_one(trajectories):
    rewards, lengths = zip(*trajectories, strict=True)
    groups = [group([reward], number=i, tokens=[n]) for i, (reward, n) in enumerate(trajectories)]
    found = batch_rewards(groups, AdvantageConfig(name="reinforce_plus_plus")).advantages().values.astype(np.float64)
    if np.ptp(rewards) > 0.1:
        tokens = np.repeat(found, lengths)
        assert tokens.mean() == pytest.approx(0, abs=1e-5)
        assert tokens.std(ddof=1) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("name", AdvantageName.__args__)
@pytest.mark.parametrize("rewards", [[], [[1.0]], [[0.5, 0.5], [0.5]], [[0.3, 0.3 + 1e-9]]])
def test_advantages_of_rewards_without_spread_are_zero(name, rewards):
    found = batch_rewards([group(r, number=i) for i, r in enumerate(rewards)], AdvantageConfig(name=name)).advantages()
    assert len(found.values) == sum(map(len, rewards))
    assert not found.values.any() and not found.informative.any()


REWARDS_OF_GROUPS = [[1.0, 0.0, 0.25], [0.75, 0.75]]
LENGTHS_OF_GROUPS = [[1, 9, 4], [3, 6]]


def rewards_of(name):
    """Rewards of two groups; the tokens of trajectory i are at the places of `trajectory` that are i."""
    pairs = zip(REWARDS_OF_GROUPS, LENGTHS_OF_GROUPS, strict=True)
    made = [group(r, number=i, tokens=n) for i, (r, n) in enumerate(pairs)]
    return batch_rewards(made, AdvantageConfig(name=name)), batch_rewards(made, AdvantageConfig(name=name)).advantages()


@pytest.mark.parametrize("name", AdvantageName.__args__)
def test_the_kl_in_the_reward_is_subtracted_before_baseline_and_normalisation(name):
    rewards, _ = rewards_of(name)
    lengths = [n for of in LENGTHS_OF_GROUPS for n in of]
    trajectory = np.repeat(np.arange(5), lengths)
    kl = np.random.default_rng(0).normal(size=len(trajectory))
    found = rewards.with_kl(kl, trajectory=trajectory, coefficient=0.3)
    penalties = [0.3 * sum(kl[trajectory == i]) for i in range(5)]
    np.testing.assert_allclose(found.penalties, penalties)
    of_groups = np.split(rewards.values - penalties, [3])
    if name == "reinforce_plus_plus":
        flat = [r for of in REWARDS_OF_GROUPS for r in of]
        same = trajectory[:, None] == trajectory
        returns = [flat[trajectory[i]] - 0.3 * sum(kl[i:][same[i, i:]]) for i in range(len(kl))]
        expected = [whitened(value, returns) for value in returns]
    else:
        expected = np.repeat(by_formula(name, [of.tolist() for of in of_groups], lengths), lengths)
    np.testing.assert_allclose(found.tokens, expected, rtol=10 * numerics.EPSILON)
    np.testing.assert_array_equal(found.trajectories, found.tokens[np.cumsum(lengths) - lengths])
    assert found.tokens[trajectory > 2].any(), "a group with equal rewards has advantages from its KL"


@pytest.mark.parametrize("name", AdvantageName.__args__)
def test_the_kl_in_the_reward_counts_tokens_that_are_too_old_for_the_loss(name):
    rewards, without = rewards_of(name)
    in_loss = [1, 2, 0, 3, 4]  # of (1, 9, 4, 3, 6) sampled tokens
    trajectory = np.repeat(np.arange(5), in_loss)
    nothing = rewards.with_kl(np.zeros(10), trajectory=trajectory, coefficient=0.3)
    np.testing.assert_allclose(nothing.tokens, without.values[trajectory], rtol=numerics.EPSILON)
    np.testing.assert_allclose(nothing.trajectories, without.values, rtol=numerics.EPSILON)
    found = rewards.with_kl(np.arange(10.0), trajectory=trajectory, coefficient=0.3)
    assert found.penalties[2] == 0.0
    masked = rewards.with_kl(np.zeros(0), trajectory=np.zeros(0, np.int64), coefficient=0.3)
    assert len(masked.tokens) == 0
    np.testing.assert_allclose(masked.trajectories, without.values, rtol=numerics.EPSILON)


# ---- several agents

AGENTS = ("critic", "judge", "planner", "policy")
ROLLOUTS = st.fixed_dictionaries({agent: st.none() | st.integers(0, 4) for agent in AGENTS})


@st.composite
def batches_of_agents(draw):
    """Heads of groups, whose rollouts have one or two sequences of each of some agents; the judge is never trained."""
    heads = []
    for number in range(draw(st.integers(1, 4))):
        rollouts = []
        for made in draw(st.lists(ROLLOUTS, min_size=1, max_size=5)):
            rewards = {agent: quarter / 4 for agent, quarter in made.items() if quarter is not None}
            agents = draw(
                st.permutations([*rewards, *draw(st.lists(st.sampled_from([*rewards] or ["judge"]), max_size=2))])
            )
            trained = {agent: reward for agent, reward in rewards.items() if agent != "judge"}
            failed = not trained or draw(st.integers(0, 9)) == 0
            lengths = [draw(st.integers(1, 4)) for _ in agents]
            rollouts.append(
                TrajectoryHead(
                    length=99,
                    sequences=tuple(SequenceHead(9, ((0, n),), a) for n, a in zip(lengths, agents, strict=True)),
                    num_segments=1,
                    num_aborts=0,
                    row_bytes=0,
                    missing_rows=0,
                    reward=-1.0,
                    rewards=None if failed else trained,
                    stop_reason=StopReason.ERROR if failed else StopReason.STOP,
                )
            )
        heads.append(
            GroupHead(group=number, prompt=0, admitted_version=0, admitted_update=0, trajectories=tuple(rollouts))
        )
    return heads


def of_agent(agent, heads):
    """(rewards, tokens) of each group, lists over the rollouts that train the agent."""
    found = []
    for head in heads:
        sound = [t for t in head.trajectories if t.rewards is not None and agent in t.rewards]
        tokens = [sum(n for s in t.sequences if s.agent == agent for _, n in s.spans) for t in sound]
        found.append(([t.rewards[agent] for t in sound], tokens))
    return [(rewards, tokens) for rewards, tokens in found if rewards]


def expected_of_agent(name, groups):
    """Advantages of one agent, of lists of rewards and tokens; 0 if there is nothing to compare."""
    if name in ("grpo", "dr_grpo", "rloo"):
        return [
            value
            for rewards, tokens in groups
            for value in (by_formula(name, [rewards], tokens) if len(set(rewards)) > 1 else [0.0] * len(rewards))
        ]
    of_groups = [rewards for rewards, _ in groups]
    shown = [r - (statistics.mean(of) if name.endswith("baseline") else 0) for of in of_groups for r in of]
    if max(shown, default=0) - min(shown, default=0) < 1e-6:
        return [0.0] * len(shown)
    return by_formula(name, of_groups, [n for _, tokens in groups for n in tokens])


@given(batches_of_agents(), st.sampled_from(AdvantageName.__args__), st.randoms(use_true_random=False))
def test_advantages_of_each_agent_are_relative_to_the_same_agent_alone(heads, name, chance):
    rewards = batch_rewards(heads, AdvantageConfig(name=name))
    found = rewards.advantages()
    if not len(found.values):
        return
    nothing = [None] * len(heads)
    batch = training_batch(heads, nothing, advantages=found, current_update=0, version_updates={0: 0}, rewards=rewards)
    places = [(heads[g].trajectories[t], at) for g, t, at in batch.index.tolist()]
    agents = np.array([t.sequences[at].agent for t, at in places])
    assert int(batch.num_loss_tokens.sum()) == sum(sum(head.tokens_per_version().values()) for head in heads)
    assert sorted(set(batch.trajectory.tolist())) == list(range(len(found.values)))
    assert (np.diff(batch.trajectory) >= 0).all(), "as `with_kl` needs it"
    assert "judge" not in agents and not any(t.failed for t, _ in places)
    kl = np.array([chance.uniform(-1, 1) for _ in range(int(batch.num_loss_tokens.sum()))])
    of_token = np.repeat(batch.trajectory, batch.num_loss_tokens)
    with_kl = rewards.with_kl(kl, trajectory=of_token, coefficient=0.3)
    for agent in set(agents):
        own, first = np.unique(batch.trajectory[agents == agent], return_index=True)
        expected = expected_of_agent(name, of_agent(agent, heads))
        np.testing.assert_allclose(found.values[own], expected, rtol=numerics.EPSILON, atol=1e-12)
        assert batch.advantages[agents == agent][first].tolist() == found.values[own].tolist()
        alone = [replace(h, trajectories=tuple(only(agent, t) for t in h.trajectories)) for h in heads]
        of_own = np.isin(of_token, own)
        numbers = np.searchsorted(own, of_token[of_own])
        single = batch_rewards(alone, AdvantageConfig(name=name)).with_kl(
            kl[of_own], trajectory=numbers, coefficient=0.3
        )
        assert single.tokens.tolist() == with_kl.tokens[of_own].tolist()
        assert single.penalties.tolist() == with_kl.penalties[own].tolist()


def only(agent, head):
    """The rollout with one agent trained; failed if it is not there."""
    if head.rewards is None or agent not in head.rewards:
        return msgspec.structs.replace(head, rewards=None, stop_reason=StopReason.ERROR)
    return msgspec.structs.replace(head, rewards={agent: head.rewards[agent]})


def test_advantages_of_unequal_length_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="informative"):
        Advantages(values=np.zeros(3, np.float32), informative=np.ones(2, np.bool_))
    with pytest.raises(ValueError, match=r"advantage\.name"):
        AdvantageConfig(name="gae")
