"""Advantages: of the prompt group, and of the batch."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.bounds import bounded
from agent_loop.loop import Message, Prompt
from async_rl.controller.checkpoints import RunState
from async_rl.trainer.batch import advantage
from async_rl.trainer.batch.advantage import Advantage, Advantages, BatchRewards, PromptValues, batch_rewards
from async_rl.trainer.batch.baselines import SPO, Contrastive
from async_rl.trainer.batch.training_batch import training_batch
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead, head_of
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup
from tests.helpers import numerics
from tests.helpers.groups import segment, trajectory
from tests.helpers.losses import ADVANTAGES

pytestmark = pytest.mark.numerics

COMPARING = sorted(ADVANTAGES.keys() - {"contrastive", "gae", "spo"})
"""Baselines that compare rewards with one another; the others have their own tests."""
OF_GROUPS = ("grpo", "dr_grpo", "rloo")
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


@given(REWARDS, st.sampled_from(OF_GROUPS))
def test_advantages_of_a_group_sum_to_zero_in_the_order_of_rewards(rewards, name):
    found = batch_rewards([group(rewards)], ADVANTAGES[name]()).advantages()
    values, spread = found.values, found.informative.any()
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
            case "batch_mean":
                return r - statistics.mean(r for rewards in groups for r in rewards)
            case "reinforce_plus_plus_baseline":
                return whitened(r - mean, [reward - of_group for reward, of_group in of_tokens])

    return [advantage(r, rewards, mean) for rewards, mean in zip(groups, means, strict=True) for r in rewards]


@pytest.mark.parametrize("name", COMPARING)
def test_every_advantage_is_its_formula_over_unequal_groups(name):
    rewards = [[1.0, 0.0, 0.25], [0.75, 0.75], [0.0, 2.0], [0.5, 0.0, 0.0, 0.0, 1.0]]
    lengths = [[1, 9, 4], [3, 6], [2, 3], [5, 1, 1, 7, 2]]
    made = [group(r, number=i, tokens=n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    found = batch_rewards(made, ADVANTAGES[name]()).advantages()
    assert found.values.dtype == np.float32
    expected = by_formula(name, rewards, [n for tokens in lengths for n in tokens])
    np.testing.assert_allclose(found.values, expected, rtol=numerics.EPSILON)
    of_group = name in OF_GROUPS  # the second group has no spread, but the batch has
    assert found.informative.tolist() == [len(r) != 2 or r[0] != r[1] or not of_group for r in rewards for _ in r]


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("rewards", [[], [[1.0]], [[0.5, 0.5], [0.5]], [[0.3, 0.3 + 1e-9]]])
def test_advantages_of_rewards_without_spread_are_zero(name, rewards):
    found = batch_rewards([group(r, number=i) for i, r in enumerate(rewards)], ADVANTAGES[name]()).advantages()
    assert len(found.values) == sum(map(len, rewards))
    assert not found.values.any() and not found.informative.any()


REWARDS_OF_GROUPS = [[1.0, 0.0, 0.25], [0.75, 0.75]]
LENGTHS_OF_GROUPS = [[1, 9, 4], [3, 6]]


def rewards_of(name):
    """Rewards of two groups; the tokens of trajectory i are at the places of `trajectory` that are i."""
    pairs = zip(REWARDS_OF_GROUPS, LENGTHS_OF_GROUPS, strict=True)
    made = [group(r, number=i, tokens=n) for i, (r, n) in enumerate(pairs)]
    return batch_rewards(made, ADVANTAGES[name]()), batch_rewards(made, ADVANTAGES[name]()).advantages()


@pytest.mark.parametrize("name", COMPARING)
def test_the_kl_in_the_reward_is_subtracted_before_baseline_and_normalisation(name):
    rewards, _ = rewards_of(name)
    lengths = [n for of in LENGTHS_OF_GROUPS for n in of]
    trajectory = np.repeat(np.arange(5), lengths)
    kl = np.random.default_rng(0).normal(size=len(trajectory))
    found = rewards.with_kl(kl, trajectory=trajectory, coefficient=0.3)
    penalties = [0.3 * sum(kl[trajectory == i]) for i in range(5)]
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


@pytest.mark.parametrize("name", COMPARING)
def test_the_kl_in_the_reward_counts_tokens_that_are_too_old_for_the_loss(name):
    rewards, without = rewards_of(name)
    in_loss = [1, 2, 0, 3, 4]  # of (1, 9, 4, 3, 6) sampled tokens
    trajectory = np.repeat(np.arange(5), in_loss)
    nothing = rewards.with_kl(np.zeros(10), trajectory=trajectory, coefficient=0.3)
    np.testing.assert_allclose(nothing.tokens, without.values[trajectory], rtol=numerics.EPSILON)
    np.testing.assert_allclose(nothing.trajectories, without.values, rtol=numerics.EPSILON)
    masked = rewards.with_kl(np.zeros(0), trajectory=np.zeros(0, np.int64), coefficient=0.3)
    assert len(masked.tokens) == 0
    np.testing.assert_allclose(masked.trajectories, without.values, rtol=numerics.EPSILON)


# ---- baselines without groups


def singles(rewards, *, first=0, prompts=None):
    """Groups of one trajectory each, with ids from `first`, and the keys of their prompts."""
    made = [group([reward], number=first + i) for i, reward in enumerate(rewards)]
    return made, [f"p{prompt}" for prompt in prompts or range(len(rewards))]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_contrastive_advantages_weigh_successes_and_failures_alike(succeeded):
    made, _ = singles([float(each) for each in succeeded])
    found = batch_rewards(made, Contrastive()).advantages()
    positive = np.array(succeeded)
    assert found.informative.all() and (np.sign(found.values) == np.where(positive, 1, -1)).all()
    sums = [abs(found.values[kind].astype(np.float64).sum()) for kind in (positive, ~positive) if kind.any()]
    numerics.assert_within(abs(np.array(sums) - len(made) / len(sums)).max(), len(made) * numerics.EPSILON)


BATCHES = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@given(BATCHES, st.integers(0, 6))
def test_the_expected_reward_of_a_prompt_is_that_of_its_formula_and_survives_a_restart(batches, restart):
    config = SPO(half_life=20.0, least_memory=0.5, most_memory=0.9)
    values, plain, update, first = PromptValues(config, {}), {}, 0, 0
    for number, (steps, pairs) in enumerate(batches):
        update += steps
        if number == restart:
            stored = msgspec.json.encode(RunState(prompt_values=values.state))
            values = PromptValues(config, msgspec.json.decode(stored, type=RunState).prompt_values)
        made, keys = singles([quarter / 4 for _, quarter in pairs], first=first, prompts=[p for p, _ in pairs])
        first += len(made)
        expected = values.expected(made, keys)
        known = [plain[key][0] if key in plain else None for key in keys]
        assert [of.get("policy") for of in expected] == known
        rewards = batch_rewards(made, config, expected=expected)
        mean = statistics.mean(rewards.values.tolist())
        moved = [r - (mean if v is None else v) for r, v in zip(rewards.values.tolist(), known, strict=True)]
        wanted = [0.0] * len(moved)
        if max(moved) - min(moved) >= 1e-6:
            wanted = [(m - statistics.mean(moved)) / (statistics.stdev(moved) + 1e-6) for m in moved]
        np.testing.assert_allclose(rewards.advantages().values, wanted, rtol=numerics.EPSILON, atol=1e-6)
        order = np.random.default_rng(number).permutation(len(made))  # of a batch that is taken after a restart
        values.observe([made[i] for i in order], [keys[i] for i in order], update=update)
        for (_, quarter), key in zip(pairs, keys, strict=True):
            value, count, last = plain.get(key, (mean, 1 / (1 - 0.5), update))
            count = count * min(max(2 ** (-(update - last) / 20.0), 0.5), 0.9) + 1
            plain[key] = (value + (quarter / 4 - value) / count, count, update)
        assert {key: values.state[f"{key}/policy"] for key in plain} == plain


def test_the_prompts_without_a_reward_for_the_longest_time_are_forgotten(monkeypatch):
    monkeypatch.setattr(advantage, "MAX_PROMPTS", 3)
    values = PromptValues(SPO(), {})
    for number, prompts in enumerate([[0, 1, 2], [0, 3], [4, 0]]):
        values.observe(*singles([1.0] * len(prompts), first=3 * number, prompts=prompts), update=number)
    assert list(values.state) == ["p3/policy", "p4/policy", "p0/policy"]


def test_equal_prompts_have_one_key_at_all_places_of_the_source():
    made = [Prompt(index=i, messages=(Message(role="user", content=f"{i % 2}"),), target={"a": 1}) for i in range(4)]
    keys = [prompt.key for prompt in made]
    assert keys[0] == keys[2] and keys[1] == keys[3] and keys[0] != keys[1]
    assert replace(made[0], target={"a": 2}).key != keys[0]


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
    if name in OF_GROUPS:
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


@given(batches_of_agents(), st.sampled_from(COMPARING), st.randoms(use_true_random=False))
def test_advantages_of_each_agent_are_relative_to_the_same_agent_alone(heads, name, chance):
    rewards = batch_rewards(heads, ADVANTAGES[name]())
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
        single = batch_rewards(alone, ADVANTAGES[name]()).with_kl(kl[of_own], trajectory=numbers, coefficient=0.3)
        assert single.tokens.tolist() == with_kl.tokens[of_own].tolist()


def only(agent, head):
    """The rollout with one agent trained; failed if it is not there."""
    if head.rewards is None or agent not in head.rewards:
        return msgspec.structs.replace(head, rewards=None, stop_reason=StopReason.ERROR)
    return msgspec.structs.replace(head, rewards={agent: head.rewards[agent]})


def test_advantages_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="informative"):
        Advantages(values=np.zeros(3, np.float32), informative=np.ones(2, np.bool_))


@bounded("advantage")
class Wrong(Advantage):
    """Returns what `made` makes of the rewards."""

    made: Callable[[BatchRewards], object] = len

    def of(self, rewards):
        return self.made(rewards)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda _: None, "returned None"),
        (lambda rewards: rewards.values, r"returned array"),
        (lambda _: Advantages(values=np.zeros(2, np.float32), informative=np.ones(2, bool)), r"shape \(2,\) for 3"),
        (
            lambda rewards: Advantages(
                values=np.where(rewards.values == 1, np.nan, 0).astype(np.float32), informative=np.ones(3, bool)
            ),
            "returned nan for the trajectory with reward 1",
        ),
    ],
)
def test_a_baseline_that_returns_no_advantage_of_each_trajectory_is_named(made, says):
    with pytest.raises(ValueError, match=f"method of of Wrong.*{says}"):
        batch_rewards([group([0.0, 1.0, 0.5])], Wrong(made=made)).advantages()
