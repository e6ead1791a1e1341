"""Shares of a batch: together they are the batch, and what is of all ranks is the same for each."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.batch.micro_batch import Coordinates
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.model import ParallelConfig
from async_rl.train.planning import Planner, RankPlace
from message_queue.tokens import RoutingSpec
from tests.parallel.support import EXPERTS, LAYERS, TOP_K, TRAINER, make_batch

ROUTING = RoutingSpec(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
LENGTHS = st.lists(st.integers(6, 40), min_size=1, max_size=9)
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
    planner, places = planner_of(*parts, packing=packing, updates_per_batch=updates)
    shares = planner.policy(batch)
    assert len({len(share.updates) for share in shares}) == 1
    sequences = [
        (place.data_rank, int(token))
        for place, share in zip(places, shares, strict=True)
        for update in share.updates
        for token in update.sequences["token_ids"][:, 0]
    ]
    firsts = batch["token_ids"][:, 0].tolist()
    assert sorted(token for _, token in set(sequences)) == sorted(firsts)
    assert len(sequences) == len(firsts) * parts[1] * parts[2]
    rows = torch.cat([rows for share in shares for update in share.updates for rows in update.rows])
    real = torch.cat([batch["routed_experts"][i, :n] for i, n in enumerate(lengths)])
    forwarded = real[(real >= 0).all(-1).all(-1)]
    sent = rows[(rows >= 0).all(-1).all(-1)]
    assert sorted(forwarded.flatten(1).tolist()) == sorted(sent.flatten(1).tolist())


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


@settings(max_examples=30)
@given(LENGTHS, PARTS)
def test_a_token_of_a_share_is_found_in_the_update(lengths, parts):
    batch = numbered(lengths)
    for update in planner_of(*parts)[0].whole(batch):
        ids = update.sequences["token_ids"].flatten()
        whole = update.in_update(torch.arange(len(ids)))
        assert torch.equal(batch["token_ids"].flatten()[whole], ids)
        assert update.shape == tuple(batch["token_ids"].shape)


def test_sequences_of_a_trajectory_stay_together_where_the_loss_weighs_it_whole():
    batch = make_batch((9, 9, 9, 9))
    batch["trajectory"] = torch.tensor([0, 1, 0, 1])
    planner, _ = planner_of(2, 1, 1, loss=LossConfig(name="gspo"))
    for share in planner.policy(batch):
        assert len(share.updates[0].sequences["trajectory"].unique()) == 1


def test_trajectories_without_an_advantage_are_sent_to_nobody():
    batch = make_batch()
    batch["informative"][:] = False
    assert [list(share.updates) for share in planner_of(2, 1, 1)[0].policy(batch)] == [[], []]
    batch["informative"][3] = True
    held = [len(share.updates[0].sequences) for share in planner_of(2, 1, 1)[0].policy(batch)]
    assert sorted(held) == [0, 1]
