"""Mini-batches of a batch: which groups each optimizer step trains, and how old their tokens are there."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.controller.prepare import mini_batches_of, prepare
from message_queue.heads import head_of
from message_queue.queue import Batch
from message_queue.tokens import StopReason
from message_queue.training_sequence import content_of
from message_queue.trajectory import Admission
from tests.helpers.groups import group_for
from tests.helpers.losses import ADVANTAGES, batch_config


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True),
    st.integers(1, 5),
    st.integers(-3, 3),
    st.randoms(use_true_random=False),
)
def test_mini_batches_are_of_equal_size_in_any_order_of_groups(groups, count, seed, draw):
    found = mini_batches_of(groups, count=count, seed=seed, update=7)
    sizes = Counter(found.values())
    assert set(found) == set(groups)
    assert max(sizes.values()) - min(sizes[n] for n in range(min(count, len(groups)))) <= 1
    draw.shuffle(groups)
    assert mini_batches_of(groups, count=count, seed=seed, update=7) == found


def test_mini_batches_are_shuffled_by_seed_and_train_step():
    found = [mini_batches_of(range(32), count=4, seed=seed, update=update) for seed in (0, 1) for update in (0, 4)]
    splits = {tuple(split[group] for group in range(32)) for split in found}
    assert len(splits) == 4
    assert tuple(np.repeat(range(4), 8)) not in splits


def admission(group, update):
    return Admission(group=group, prompt=group, admitted_version=update, admitted_update=update)


def prepared(*, min_update=0):
    """Four groups of the versions 2 and 3, with 4 and 6 updates, in two mini-batches from update 6 on."""
    groups = [group_for(admission(n, n % 2 + 2)) for n in range(4)]
    batch = Batch(groups=[head_of(g) for g in groups], update=6, version_updates={2: 4, 3: 6}, min_update=min_update)
    return prepare(
        batch,
        [content_of(group) for group in groups],
        batch_config(advantage=ADVANTAGES["reinforce_plus_plus"](), updates=2, seed=1),
        version_updates={2: 4, 3: 6},
    )


def loss_of(found):
    """(mini-batch, group, tokens in the loss) of each sequence."""
    batch = found.batch
    return [(int(batch.mini_batch[n]), int(batch.index[n, 0]), batch.loss_tokens(n)) for n in range(len(batch))]


def test_staleness_is_counted_at_the_mini_batch_that_trains_the_token():
    found = prepared()
    ages = [mini_batch + 2 * (group % 2 == 0) for mini_batch, group, _ in loss_of(found)]
    assert sorted(found.batch.mini_batch.tolist()) == [0, 0, 1, 1]
    for age, (_, _, loss) in zip(ages, loss_of(found), strict=True):
        assert set(loss.lag.tolist()) == {age}
    assert found.staleness_tokens == Counter({a: 3 * n for a, n in Counter(ages).items()})
    assert found.metrics["staleness/max"] == max(ages)


def test_only_the_first_mini_batch_has_tokens_of_the_current_weights():
    assert all(mini_batch == 0 for mini_batch, _, loss in loss_of(prepared()) if loss.pure.any())


def test_rewards_of_a_batch_are_those_of_the_rollouts_that_did_not_fail():
    groups = [group_for(admission(n, 2)) for n in range(2)]
    heads = [head_of(group) for group in groups]
    (first, *others), failed = heads[0].trajectories, StopReason.ERROR
    heads[0] = replace(heads[0], trajectories=(*others, msgspec.structs.replace(first, stop_reason=failed)))
    rewards = prepare(
        Batch(groups=heads, update=4, version_updates={2: 4}, min_update=0),
        [content_of(group) for group in groups],
        batch_config(advantage=ADVANTAGES["rloo"]()),
        version_updates={2: 4},
    ).batch.rewards
    sound = [(n, t) for n, of in enumerate((others, heads[1].trajectories)) for t in of]
    assert rewards.config.name == "rloo"
    assert rewards.values.tolist() == [t.reward for _, t in sound]
    assert rewards.groups.tolist() == [number for number, _ in sound]
    assert rewards.sampled.tolist() == [t.num_sampled for _, t in sound]


def test_the_last_mini_batch_decides_the_tokens_that_are_too_old():
    found = prepared(min_update=5)
    assert [len(loss.positions) > 0 for *_, loss in loss_of(found)] == [
        group % 2 == 1 for _, group, _ in loss_of(found)
    ]
    assert found.gradient_tokens == found.lengths == [0, 3, 0, 3]
