"""Shares of a batch: together they are the batch, and what is of all ranks is the same for each."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.batch.micro_batch import Coordinates, pack_rows, router_index, take_rows
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.model import ParallelConfig
from async_rl.train.planning import Planner, RankPlace
from message_queue.tokens import RoutingSpec
from tests.parallel.support import EXPERTS, LAYERS, TOP_K, TRAINER, add_random_support, make_batch, sets_of

ROUTING = RoutingSpec(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
PARTS = st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])


def planner_of(data, context, tensor, *, loss=None, **changes):
    """A planner for every rank of one stage."""
    places = [
        RankPlace(
            data_rank=d,
            at=Coordinates(tensor=tensor, tensor_rank=t, context=context, context_rank=c),
            layers=LAYERS,
        )
        for d in range(data)
        for c in range(context)
        for t in range(tensor)
    ]
    parallel = ParallelConfig(context=context, tensor=tensor)
    config = replace(TRAINER, ranks=len(places), parallel=parallel, **changes)
    return Planner(config=config, loss=loss or LossConfig(), routing=ROUTING, places=places), places


def numbered(lengths):
    """A batch in which every token is its own number."""
    batch = make_batch(tuple(lengths))
    batch["token_ids"] = torch.arange(batch["token_ids"].numel()).view(batch["token_ids"].shape)
    return batch


@settings(max_examples=30)
@given(LENGTHS, PARTS, st.booleans(), st.integers(1, 3))
def test_the_ranks_of_a_stage_are_sent_every_sequence_once_and_every_row_once(lengths, parts, packing, updates):
    batch = numbered(lengths)
    batch["mini_batch"] = batch["group"] % updates
    planner, places = planner_of(*parts, packing=packing, updates_per_batch=updates)
    shares = planner.policy(batch)
    assert len({len(share.updates) for share in shares}) == 1
    sequences = [
        (place.data_rank, int(group), int(length))
        for place, share in zip(places, shares, strict=True)
        for update in share.updates
        if update is not None
        for group, length in zip(update.per_sequence["trajectory"], update.per_sequence["lengths"], strict=True)
    ]
    assert sorted(rest for _, *rest in set(sequences)) == [[i, length] for i, length in enumerate(lengths)]
    assert len(sequences) == len(lengths) * parts[1] * parts[2]
    rows = torch.cat([rows for share in shares for update in share.updates if update for rows in update.rows])
    real = torch.cat([batch["routed_experts"][i, :n] for i, n in enumerate(lengths)])
    forwarded = real[(real >= 0).all(-1).all(-1)]
    sent = rows[(rows >= 0).all(-1).all(-1)]
    assert sorted(forwarded.flatten(1).tolist()) == sorted(sent.flatten(1).tolist())


@settings(max_examples=30)
@given(LENGTHS, PARTS, st.booleans())
def test_a_rank_is_sent_the_tokens_that_it_reads_and_predicts_and_finds_them(lengths, parts, packing):
    batch = numbered(lengths)
    whole = batch["token_ids"].flatten()
    planner, places = planner_of(*parts, packing=packing, micro_batch_tokens=50)
    predicted = []
    for place, share in zip(places, planner.whole(batch), strict=True):
        sequences, of_places = share.sequences(), share.places.tolist()
        ids, at = sequences["token_ids"], replace(place.at, tensor=1, tensor_rank=0)
        for indices in share.micro_batches:
            rows = pack_rows(sequences["lengths"].tolist(), indices, row_length=ids.shape[1], at=at, packing=packing)
            in_batch = [of_places[i] for i in indices]
            seen = router_index(lengths, in_batch, row_length=max(lengths), at=at, packing=packing)
            expected = torch.where(seen >= 0, whole[seen.clamp(min=0)], -1)
            assert torch.equal(take_rows(ids, rows.index, fill=-1), expected)
            for name in ("loss_mask", "behaviour_logprobs", "lag", "pure_lag0"):
                has_next = rows.next_index >= 0
                taken = sequences[name].flatten()[rows.next_index[has_next]]
                assert torch.equal(taken, batch[name].flatten()[seen[has_next] + 1])
            flat = rows.next_index[rows.next_index >= 0]
            found = share.in_update(flat, rows.positions[rows.next_index >= 0] + 1)
            assert torch.equal(whole[found], ids.flatten()[flat])
            predicted += found.tolist() if place.at.tensor_rank == 0 else []
    held = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    held[:, 0] = False
    assert sorted(predicted) == held.flatten().nonzero().squeeze(1).tolist()


@settings(max_examples=30)
@given(LENGTHS, PARTS, st.booleans(), st.integers(1, 3))
def test_a_rank_is_sent_the_support_of_the_tokens_it_holds(lengths, parts, packing, updates):
    batch = numbered(lengths)
    batch["mini_batch"] = batch["group"] % updates
    add_random_support(batch, vocab=batch["token_ids"].numel())
    sets = [[ids.tolist() for ids in sets_of(support)] for support in batch["support"]]
    planner, _ = planner_of(*parts, packing=packing, updates_per_batch=updates)
    for update in (update for share in planner.policy(batch) for update in share.updates if update is not None):
        assert len(update.support) == len(update.per_token)
        places = [divmod(token, max(lengths)) for token in update.per_token["token_ids"].tolist()]
        assert [ids.tolist() for ids in sets_of(update.support)] == [sets[i][position] for i, position in places]
        sequences = update.sequences()
        of_sequences = sequences["support"] if len(sequences) else []
        assert [len(support) for support in of_sequences] == update.num_held.tolist()


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(64,) * 16, (16,) * 15 + (960,)], ids=["equal", "long-tailed"])
def test_a_context_rank_is_sent_little_more_than_what_it_reads(context, lengths):
    batch = make_batch(lengths)
    planner, _ = planner_of(1, context, 1)
    of_a_token = sum(c.element_size() for c in batch.values() if c.dim() == 2)
    for share in planner.whole(batch):
        sent = sum(c.numel() * c.element_size() for c in share.per_token.values())
        needed = of_a_token * sum(lengths) / context
        # Of the tokens of a sequence that it predicts, at most two are none that it reads.
        assert needed <= sent <= needed + (context > 1) * 2 * of_a_token * len(lengths)
        assert len(pickle.dumps(share.per_token)) <= 1.1 * sent + 6000


@settings(max_examples=30)
@given(LENGTHS, PARTS)
def test_what_is_of_the_whole_update_is_the_same_for_every_rank(lengths, parts):
    batch = numbered(lengths)
    planner, _ = planner_of(*parts)
    weights = token_weights(batch["loss_mask"].sum(1), aggregation="token_mean")
    shares = planner.policy(batch)
    for share in shares:
        (update,) = share.updates
        assert share.trajectories == len(lengths)
        assert (update.num_tokens, update.num_loss_tokens) == (sum(lengths), int(batch["loss_mask"].sum()))
        assert len(update.micro_batches) == len(shares[0].updates[0].micro_batches)
        assert torch.equal(update.token_weights, weights[update.places])


def test_sequences_of_a_trajectory_stay_together_where_the_loss_weighs_it_whole():
    batch = make_batch((9, 9, 9, 9))
    batch["trajectory"] = torch.tensor([0, 1, 0, 1])
    planner, _ = planner_of(2, 1, 1, loss=LossConfig(name="gspo"))
    for share in planner.policy(batch):
        assert len(share.updates[0].per_sequence["trajectory"].unique()) == 1


def test_trajectories_without_an_advantage_are_sent_to_nobody():
    batch = make_batch()
    batch["informative"][:] = False
    assert [list(share.updates) for share in planner_of(2, 1, 1)[0].policy(batch)] == [[None], [None]]
    batch["informative"][3] = True
    held = [len(share.updates[0].per_sequence) for share in planner_of(2, 1, 1)[0].policy(batch)]
    assert sorted(held) == [0, 1]


def test_a_mini_batch_without_an_advantage_stays_an_update_of_its_own():
    batch = make_batch()
    batch["mini_batch"] = batch["group"]
    batch["informative"] = batch["group"] != 1
    (share,) = planner_of(1, 1, 1, updates_per_batch=3)[0].policy(batch)
    assert [None if u is None else u.per_sequence["group"].unique().tolist() for u in share.updates] == [[0], None, [2]]


@pytest.mark.parametrize(("mini_batch", "found"), [(None, "no key `mini_batch`"), ([0, 1, 2, 3, 0, 1], "0 to 3")])
def test_mini_batches_that_the_trainer_does_not_make_are_refused(mini_batch, found):
    batch = make_batch()
    if mini_batch is not None:
        batch["mini_batch"] = torch.tensor(mini_batch)
    with pytest.raises(ValueError, match=found) as refused:
        planner_of(1, 1, 1, updates_per_batch=3)[0].policy(batch)
    assert "trainer.updates_per_batch" in str(refused.value)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean", "fixed_length"])
@pytest.mark.parametrize("terms", [{}, {"entropy_coefficient": 1e-12}, {"kl_coefficient": 1e-12}])
def test_the_divisor_counts_groups_without_reward_spread_whatever_the_terms(aggregation, terms):
    batch = make_batch()
    batch["informative"] = batch["group"] == 1
    length = {"fixed_length": 10} if aggregation == "fixed_length" else {}
    weights = {}
    for count in ("all", "informative"):
        loss = LossConfig(aggregation=aggregation, count=count, **length, **terms)
        (share,) = planner_of(1, 1, 1, loss=loss)[0].policy(batch)
        update = share.updates[0]
        weights[count] = dict(
            zip(update.per_sequence["trajectory"].tolist(), update.token_weights.tolist(), strict=True)
        )
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
    (share,) = planner_of(1, 1, 1, loss=LossConfig(aggregation="sequence_mean"))[0].policy(batch)
    update = share.updates[0]
    tokens = batch["loss_mask"].sum(1)[update.places + 1]
    assert update.token_weights.tolist() == pytest.approx((1 / (5 * tokens)).tolist())
