"""Plans of a batch: every sequence once, and counts of the whole batch for all ranks."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.loss.losses import GSPO, DecoupledPPO, token_weights
from async_rl.trainer.model.model import ParallelConfig
from async_rl.trainer.planning import Planner
from async_rl.trainer.step import MicroBatchBuilder
from message_queue.tokens import RoutingSpec
from tests.async_rl.trainer.test_training_batch import as_groups, batch_of, forked_trajectory
from tests.helpers.versions import PROMPT, mixed_batch
from tests.parallel.support import EXPERTS, LAYERS, TOP_K, TRAINER, add_random_support, make_batch, training_batch_of

ROUTING = RoutingSpec(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
PARTS = st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])


def planner_of(data, context, tensor, *, loss=None, walks=False, **changes):
    parallel = ParallelConfig(context=context, tensor=tensor)
    config = replace(TRAINER, ranks=data * context * tensor, parallel=parallel, **changes)
    return Planner(config=config, loss=loss or DecoupledPPO(), walks=walks)


def numbered(lengths, support=False):
    """A padded batch where every token is its own number."""
    batch = make_batch(tuple(lengths))
    batch["token_ids"] = torch.arange(batch["token_ids"].numel()).view(batch["token_ids"].shape)
    return add_random_support(batch, vocab=batch["token_ids"].numel()) if support else batch


def made_of(plan):
    """Numbers of the sequences that each update forwards, rank after rank."""
    return [
        [] if update is None else [n for rank in update.micro_batches for numbers in rank for n in numbers]
        for update in plan.updates
    ]


class NoRotary:
    def at(self, positions):
        return positions, positions


def micro_batches_of(plan, *, data, context, tensor, packing):
    """(update, coordinates, micro-batch) of every rank of one stage."""
    for update in plan.updates:
        for context_rank in range(context):
            for tensor_rank in range(tensor):
                at = Coordinates(tensor=tensor, tensor_rank=tensor_rank, context=context, context_rank=context_rank)
                builder = MicroBatchBuilder(
                    plan.batch,
                    update,
                    at=at,
                    device=torch.device("cpu"),
                    packing=packing,
                    shares_prefixes=packing,
                    replay="R3",
                    routing=ROUTING,
                    layers=LAYERS,
                    rotary=NoRotary(),
                )
                for rank in range(data):
                    yield from ((update, at, builder.build(numbers)) for numbers in update.micro_batches[rank])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 3))
def test_loss_tokens_of_the_updates_are_those_of_the_batch(counts, updates):
    batch = training_batch_of(make_batch((9,) * len(counts)))
    mini_batch = np.arange(len(counts)) % updates
    batch = replace(batch, num_loss_tokens=np.array(counts), mini_batch=mini_batch)
    plan = planner_of(2, 1, 1, updates_per_batch=updates).policy(batch)
    of_sequences = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    for number, update in enumerate(plan.updates):
        own = [tokens for of, tokens in zip(mini_batch, of_sequences, strict=True) if of == number]
        found = [] if update is None else update.loss_tokens_in_batch(batch).tolist()
        assert found == [token for tokens in own for token in tokens.tolist()]


@settings(max_examples=30)
@given(LENGTHS, PARTS, st.booleans())
def test_micro_batches_of_all_ranks_are_the_tokens_and_rows_of_the_batch(lengths, parts, packing):
    padded = numbered(lengths, support=True)
    data, context, tensor = parts
    plan = planner_of(*parts, packing=packing, micro_batch_tokens=50).policy(training_batch_of(padded))
    mask, whole = padded["loss_mask"], padded["token_ids"].flatten()
    rows, seen, numbers = [], [], []
    for update, at, mb in micro_batches_of(plan, data=data, context=context, tensor=tensor, packing=packing):
        rows.append(torch.stack(list(mb.context.routing.tables.values()), 1))
        if at.tensor_rank == 0:
            assert torch.equal(mb.token_ids[0, mb.loss_rows] + 1, mb.targets), "a row predicts the next token"
            for name in ("behaviour_logprobs", "advantages"):
                column = padded[name] if padded[name].dim() == 2 else padded[name].unsqueeze(1).expand(mask.shape)
                assert torch.equal(mb.columns[name], column.flatten()[mb.targets])
            seen += mb.targets.tolist()
            numbers += mb.numbers.tolist()
            assert update.num_loss_tokens == int(mask.sum())
            if mb.kept is not None:
                assert mb.kept.num_containing(mb.targets) == len(mb.kept.cut)
    assert sorted(seen) == whole[mask.flatten()].tolist()
    assert sorted(numbers) == list(range(int(mask.sum())))
    real = torch.cat([padded["routed_experts"][i, :n] for i, n in enumerate(lengths)])
    replayed = torch.cat(rows)
    forwarded, sent = (each[(each >= 0).all(-1).all(-1)] for each in (real, replayed))
    assert sorted(forwarded.flatten(1).tolist()) == sorted(sent.flatten(1).tolist())


def test_a_micro_batch_is_built_from_content_in_read_only_memory():
    batch = training_batch_of(make_batch((9, 5, 7, 3), support=True))
    buffers = []
    pickled = pickle.dumps(batch.contents, protocol=5, buffer_callback=buffers.append)
    shared = replace(batch, contents=pickle.loads(pickled, buffers=[buffer.raw().toreadonly() for buffer in buffers]))
    assert not shared.sequence(0).rows.flags.writeable
    found, expected = (
        [mb for _, _, mb in micro_batches_of(planner_of(1, 1, 1).policy(b), data=1, context=1, tensor=1, packing=True)]
        for b in (shared, batch)
    )
    assert [mb.token_ids.tolist() for mb in found] == [mb.token_ids.tolist() for mb in expected]


@settings(max_examples=30)
@given(LENGTHS, PARTS)
def test_an_update_weighs_and_counts_the_sequences_of_all_ranks(lengths, parts):
    batch = training_batch_of(numbered(lengths))
    (update,) = planner_of(*parts).policy(batch).updates
    tokens = torch.from_numpy(batch.num_loss_tokens)
    assert update.token_weights.tolist() == token_weights(tokens, aggregation="token_mean").tolist()
    assert (update.num_tokens, update.num_loss_tokens) == (sum(lengths), int(tokens.sum()))
    assert update.first_loss_token.tolist() == [0, *tokens.cumsum(0).tolist()[:-1]]


def test_a_plan_names_the_groups_that_a_rank_needs():
    batch = training_batch_of(make_batch((9, 9, 5, 5, 7, 7)))
    plan = planner_of(2, 1, 1).policy(batch)
    for rank in range(2):
        numbers = [n for micro_batch in plan.updates[0].micro_batches[rank] for n in micro_batch]
        assert plan.groups_of(rank) == sorted({int(batch.index[n, 0]) for n in numbers})


@pytest.mark.parametrize("tokens", [10, 1000])
def test_the_size_of_a_plan_does_not_depend_on_tokens(tokens):
    batch = replace(training_batch_of(make_batch((tokens,) * 64)), contents=())
    assert len(pickle.dumps(planner_of(4, 1, 1).policy(batch))) < 200 * 64


def test_a_plan_keeps_trajectories_together_if_the_loss_needs_them_whole():
    padded = make_batch((9, 9, 9, 9))
    padded["trajectory"] = torch.tensor([0, 1, 0, 1])
    batch = training_batch_of(padded)
    (update,) = planner_of(2, 1, 1, loss=GSPO()).policy(batch).updates
    for of_rank in update.micro_batches:
        assert len({int(batch.trajectory[n]) for numbers in of_rank for n in numbers}) == 1


@pytest.mark.parametrize("loss", [GSPO(), DecoupledPPO(aggregation="token_mean")])
def test_a_plan_trains_the_paths_of_a_trajectory_once(loss):
    batch = batch_of(as_groups(forked_trajectory(), forked_trajectory()), 1.0, -1.0)
    plan = planner_of(1, 1, 1, loss=loss, micro_batch_tokens=8).policy(batch)
    (update,) = [update for update in plan.updates if update is not None]
    assert sorted(made_of(plan)[0]) == [0, 1, 2, 3]
    assert update.num_loss_tokens == batch.num_loss_tokens.sum() == 12
    if loss.needs_whole_trajectories:
        assert sorted(sorted(numbers) for rank in update.micro_batches for numbers in rank) == [[0, 1], [2, 3]]


def test_a_plan_does_not_forward_trajectories_without_an_advantage():
    batch = training_batch_of(make_batch())
    nothing = replace(batch, informative=np.zeros(6, bool))
    assert list(planner_of(2, 1, 1).policy(nothing).updates) == [None]
    assert made_of(planner_of(2, 1, 1).policy(replace(batch, informative=np.arange(6) == 3))) == [[3]]
    second = replace(batch, mini_batch=np.arange(6) // 2, informative=np.arange(6) // 2 != 1)
    plan = planner_of(1, 1, 1, updates_per_batch=3).policy(second)
    assert [sorted(numbers) for numbers in made_of(plan)] == [[0, 1], [], [4, 5]]
    assert plan.updates[1] is None, "it stays an update of its own"


def test_mini_batches_that_the_trainer_does_not_make_are_refused():
    batch = replace(training_batch_of(make_batch()), mini_batch=np.array([0, 1, 2, 3, 0, 1]))
    with pytest.raises(ValueError, match=r"trainer\.updates_per_batch"):
        planner_of(1, 1, 1, updates_per_batch=3).policy(batch)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean", "fixed_length"])
@pytest.mark.parametrize("terms", [{}, {"entropy_coefficient": 1e-12}, {"kl_coefficient": 1e-12}])
def test_divisors_count_groups_without_reward_spread_for_all_terms(aggregation, terms):
    batch = make_batch()
    batch["informative"] = batch["group"] == 1
    length = {"fixed_length": 10} if aggregation == "fixed_length" else {}
    weights = {}
    for count in ("all", "informative"):
        loss = DecoupledPPO(aggregation=aggregation, count=count, **length, **terms)
        plan = planner_of(1, 1, 1, loss=loss).policy(training_batch_of(batch))
        weights[count] = {n: plan.updates[0].token_weights[n] for n in made_of(plan)[0]}
    tokens = batch["loss_mask"].sum(1)
    every, some = tokens.tolist(), tokens[2:4].tolist()
    expected = {
        "token_mean": [[1 / sum(n)] * 2 for n in (every, some)],
        "sequence_mean": [[1 / (count * n) for n in some] for count in (6, 2)],
        "group_mean": [[1 / (count * sum(some))] * 2 for count in (3, 1)],
        "fixed_length": [[1 / (count * 10)] * 2 for count in (6, 2)],
    }[aggregation]
    assert set(weights["all"]) == (set(range(6)) if terms else {2, 3})
    assert set(weights["informative"]) == {2, 3}
    for found, wanted in zip(weights.values(), expected, strict=True):
        assert [found[2], found[3]] == pytest.approx(wanted)


def test_tokens_that_are_too_old_are_in_no_divisor():
    batch = make_batch()
    batch["loss_mask"][0] = False
    batch["informative"][0] = False
    plan = planner_of(1, 1, 1, loss=DecoupledPPO(aggregation="sequence_mean")).policy(training_batch_of(batch))
    tokens = batch["loss_mask"].sum(1)
    assert sorted(made_of(plan)[0]) == [1, 2, 3, 4, 5]
    assert plan.updates[0].token_weights[1:].tolist() == pytest.approx((1 / (5 * tokens[1:])).tolist())


@pytest.mark.parametrize("updates_per_batch", [1, 2])
def test_a_walk_forwards_each_sequence_once_for_each_version_but_the_fresh_one(updates_per_batch):
    spans = [[(0, 6), (2, 3)], [(2, 4)], [(0, 5)], [(1, 2), (2, 6)], [(1, 3), (2, 2)]]
    mini_batches = {number: number % updates_per_batch for number in range(len(spans))}
    batch = mixed_batch(spans, update=2, mini_batches=mini_batches)
    assert planner_of(2, 1, 1, updates_per_batch=updates_per_batch).policy(batch).walk == {}
    plan = planner_of(2, 1, 1, updates_per_batch=updates_per_batch, walks=True).policy(batch)
    late = [number for number in (0, 1, 3, 4) if mini_batches[number] > 0]
    expected = {2: late, 1: [3, 4], 0: [0, 2]}
    assert {update: each.sequences for update, each in plan.walk.items()} == {u: n for u, n in expected.items() if n}
    assert plan.walk[0].num_loss_tokens == 11 and plan.walk[1].num_loss_tokens == 5
    assert plan.walk[0].num_tokens == 2 * PROMPT + 11, "a sequence ends with its last token of the version"
    for data_rank in range(2):
        needed = {
            n for each in (*plan.updates, *plan.walk.values()) for of in each.micro_batches[data_rank] for n in of
        }
        assert plan.groups_of(data_rank) == sorted(needed)


def test_sequences_without_gradient_are_not_walked():
    batch = mixed_batch([[(0, 6)], [(0, 4)]], update=1)
    batch = replace(batch, informative=np.array([True, False]))
    assert planner_of(1, 1, 1, walks=True).policy(batch).walk[0].sequences == [0]
