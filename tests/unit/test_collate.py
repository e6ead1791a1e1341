"""Trajectories to batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.batch.advantage import Advantages
from async_rl.batch.collate import BatchError, collate, collate_supervised
from async_rl.train.losses import token_weights
from message_queue.support import SamplingSupport
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory
from tests.unit.groups import SPEC


def rows(first, end, unavailable=0):
    experts = (np.arange(first, end)[:, None, None] + np.arange(2) + 2 * np.arange(2)[:, None]) % 8
    return RoutedExperts(first_position=first, experts=experts.astype(np.uint8), unavailable=unavailable)


def sampled(tokens, version, routed):
    return TokenOutput(
        token_ids=np.arange(50, 50 + tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        routed_experts=routed,
        weights=WeightVersion(version, ""),
        stop_reason=StopReason.STOP,
        replica="replica-0",
    )


def resumed_trajectory(first_version=3, second_version=4, *, unavailable=0):
    """Prompt of 3, two tokens, abort, two tokens, a tool reply of 2, two tokens: 11 tokens, rows 0..9."""
    made = Trajectory(routing=SPEC)
    made.observe(np.arange(3, dtype=np.int32))
    made.extend(sampled(2, first_version, rows(unavailable, 4, unavailable)))
    made.extend(sampled(2, second_version, rows(4, 6)))
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(sampled(2, second_version, rows(6, 10)))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def plain_trajectory():
    """Prompt of 3 and two tokens, without routing."""
    made = Trajectory(routing=None)
    made.observe(np.arange(3, dtype=np.int32))
    made.extend(sampled(2, 3, None))
    made.close(stop_reason=StopReason.STOP, reward=0.0)
    return made


def as_groups(*trajectories):
    return [
        PromptGroup(group=10 + i, prompt=i, admitted_version=0, admitted_update=0, trajectories=[t])
        for i, t in enumerate(trajectories)
    ]


def advantages(*values):
    array = np.array(values, np.float32)
    return Advantages(values=array, informative=array != 0)


def collated(*trajectories, update=6, updates=None):
    return collate(
        as_groups(*trajectories),
        advantages=advantages(*(float(i + 1) for i in range(len(trajectories)))),
        current_update=update,
        version_updates=updates or {3: 4, 4: 6},
    )


def test_a_batch_has_the_keys_types_and_shapes_it_documents():
    short = Trajectory(routing=SPEC)
    short.observe(np.arange(2, dtype=np.int32))
    short.extend(sampled(1, 4, rows(0, 2)))
    short.close(stop_reason=StopReason.LENGTH, reward=0.0)
    batch = collated(resumed_trajectory(), short)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    assert shapes == {
        "token_ids": (torch.int64, (2, 11)),
        "loss_mask": (torch.bool, (2, 11)),
        "behaviour_logprobs": (torch.float32, (2, 11)),
        "advantages": (torch.float32, (2,)),
        "informative": (torch.bool, (2,)),
        "lag": (torch.int32, (2, 11)),
        "pure_lag0": (torch.bool, (2, 11)),
        "routed_experts": (torch.int16, (2, 11, 2, 2)),
        "lengths": (torch.int64, (2,)),
        "trajectory": (torch.int64, (2,)),
        "group": (torch.int64, (2,)),
        "mini_batch": (torch.int64, (2,)),
    }
    assert batch["lengths"].tolist() == [11, 3]
    assert batch["group"].tolist() == [10, 11]
    assert not batch["loss_mask"][1, 3:].any()
    assert (batch["routed_experts"][1, 2:] == -1).all()


def test_collate_keeps_the_support_of_each_sequence(monkeypatch):
    support = SamplingSupport.pack(np.array([0, 0, 0, 2, 1], np.int64), np.array([50, 60, 51], np.int64))
    assert "support" not in set(collated(plain_trajectory(), plain_trajectory()).keys())
    given = iter([support, None])
    cut = Trajectory.sequences
    monkeypatch.setattr(Trajectory, "sequences", lambda self: [replace(s, support=next(given)) for s in cut(self)])
    batch = collated(plain_trajectory(), plain_trajectory())
    assert [each.unpack()[0].tolist() for each in batch["support"]] == [[0, 0, 0, 2, 1], [0] * 5]
    assert batch["support"][0].unpack()[1].tolist() == [50, 60, 51]


def test_lag_counts_optimizer_updates_of_sampled_tokens():
    batch = collated(resumed_trajectory())
    assert batch["lag"][0].tolist() == [-1, -1, -1, 2, 2, 0, 0, -1, -1, 0, 0]
    assert torch.equal(batch["lag"][0] >= 0, batch["loss_mask"][0])


def test_a_token_over_older_rows_is_not_pure_at_lag_zero():
    batch = collated(resumed_trajectory())
    assert not batch["pure_lag0"].any()
    fresh = collated(resumed_trajectory(4, 4))
    assert torch.equal(fresh["pure_lag0"], fresh["loss_mask"])


def test_a_token_over_a_row_the_engine_could_not_give_is_not_pure():
    assert not collated(resumed_trajectory(4, 4, unavailable=1))["pure_lag0"].any()


# ---- several sequences of one trajectory, and what is pure in each mode


def routed_by(version, first, end, *, unavailable=0):
    """Rows that tell who made them."""
    experts = (np.arange(first, end)[:, None, None] + 3 * version + np.arange(2) + 2 * np.arange(2)[:, None]) % 8
    return RoutedExperts(first_position=first, experts=experts.astype(np.uint8), unavailable=unavailable)


def updated_trajectory(mode, *, versions=(3, 4), unavailable=0):
    """Prompt of 3, two tokens, an update, two tokens, a tool reply of 2, two tokens: 11 tokens, rows 0..9.

    A request brings the rows that its mode asks for.
    """
    old, new = versions
    keeps_held = mode in ("append", "force")
    made = Trajectory(routing=SPEC, resume_routing=mode)
    made.observe(np.arange(3, dtype=np.int32))
    made.extend(sampled(2, old, routed_by(old, unavailable, 4, unavailable=unavailable)))
    made.extend(sampled(2, new, routed_by(new, 4 if keeps_held else 0, 6)))
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(sampled(2, new, routed_by(new, 6 if keeps_held else 0, 10)))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def test_a_split_trajectory_is_several_sequences_with_what_its_trajectory_has():
    batch = collate(
        as_groups(*(updated_trajectory(mode) for mode in ("split", "append", "split"))),
        advantages=advantages(0.0, 1.0, 2.0),
        current_update=6,
        version_updates={3: 4, 4: 6},
    )
    assert batch.batch_size == torch.Size([5])
    assert batch["trajectory"].tolist() == [0, 0, 1, 2, 2]
    assert batch["group"].tolist() == [10, 10, 11, 12, 12]
    assert batch["lengths"].tolist() == [5, 11, 11, 5, 11]
    assert batch["advantages"].tolist() == [0, 0, 1, 2, 2]
    assert batch["informative"].tolist() == [False, False, True, True, True]
    assert torch.equal(batch["lag"] >= 0, batch["loss_mask"])


def test_every_sampled_token_is_in_one_loss_whatever_the_mode():
    whole = collated(updated_trajectory("append"))
    for mode in ("force", "replace", "split"):
        batch = collated(updated_trajectory(mode))
        assert torch.equal(batch["loss_mask"].sum(0), whole["loss_mask"].sum(0))
        for name in ("behaviour_logprobs", "pure_lag0"):
            assert not batch[name][~batch["loss_mask"]].any()
        assert torch.equal(batch["behaviour_logprobs"].sum(0), whole["behaviour_logprobs"].sum(0))
        assert torch.equal(batch["lag"].max(0).values, whole["lag"].max(0).values)


NEWEST = [*[False] * 5, True, True, False, False, True, True]  # the tokens that version 4 sampled


@pytest.mark.parametrize(
    ("mode", "pure"),
    [
        ("append", [False] * 11),  # over rows of version 3, and K/V of other experts
        ("force", NEWEST),  # K/V is of version 4 over the rows of version 3
        ("replace", NEWEST),  # rows and K/V are of version 4
        ("split", NEWEST),
    ],
)
def test_which_tokens_after_an_update_are_pure_depends_on_the_mode(mode, pure):
    assert collated(updated_trajectory(mode))["pure_lag0"].any(0).tolist() == pure


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_without_an_update_every_token_is_pure_in_every_mode(mode):
    batch = collated(updated_trajectory(mode, versions=(4, 4)))
    assert torch.equal(batch["pure_lag0"], batch["loss_mask"])


@pytest.mark.parametrize("mode", ["append", "force"])
def test_no_token_behind_a_row_that_no_engine_could_give_is_pure(mode):
    assert not collated(updated_trajectory(mode, versions=(4, 4), unavailable=1))["pure_lag0"].any()


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_where_kv_outlives_updates_only_groups_admitted_at_lag_zero_have_pure_tokens(mode):
    groups = as_groups(updated_trajectory(mode, versions=(4, 4)))
    for admitted_update, pure in ((3, False), (4, True)):
        groups[0].admitted_update = admitted_update
        batch = collate(groups, advantages=advantages(1.0), current_update=4, version_updates={4: 4}, kept_kv=True)
        assert torch.equal(batch["pure_lag0"], batch["loss_mask"] & pure)


def test_over_kept_kv_a_forced_token_is_pure_only_over_rows_of_lag_zero():
    groups = as_groups(updated_trajectory("force"))
    groups[0].admitted_update = 4
    batch = collate(groups, advantages=advantages(1.0), current_update=4, version_updates={3: 2, 4: 4}, kept_kv=True)
    assert not batch["pure_lag0"].any()


def test_without_routing_a_token_is_pure_as_long_as_everything_before_was_sampled_at_lag_zero():
    batch = collated(plain_trajectory(), updates={3: 6})
    assert "routed_experts" not in set(batch.keys())
    assert batch["pure_lag0"][0].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collate([], advantages=advantages(), current_update=0, version_updates={}), "no trajectories"),
        (
            lambda: collate(
                as_groups(plain_trajectory()), advantages=advantages(1, 2), current_update=0, version_updates={3: 0}
            ),
            "1 trajectories, but 2 advantages",
        ),
        (lambda: collated(plain_trajectory(), updates={0: 0}), r"param_version 3 sampled tokens, but .*\[0\]"),
        (lambda: collated(plain_trajectory(), update=2), "holds 4 updates, more than current_update=2"),
        (lambda: collated(plain_trajectory(), resumed_trajectory()), "some trajectories carry routing rows"),
        (lambda: collate_supervised([]), "no examples"),
        (lambda: collate_supervised([(np.arange(3, dtype=np.int32), np.ones(2, np.bool_))]), "example 0 has 3 tokens"),
    ],
)
def test_what_is_no_batch_is_refused(call, message):
    with pytest.raises(BatchError, match=message):
        call()


def test_supervised_examples_are_padded_on_the_right():
    batch = collate_supervised(
        [
            (np.array([5, 6, 7], np.int32), np.array([False, True, True])),
            (np.array([8], np.int32), np.array([True])),
        ]
    )
    assert batch["token_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["lengths"].tolist() == [3, 1]


# ---- tokens that are too old


def masked(*trajectories, min_update, mode="append", **of):
    return collate(
        as_groups(*trajectories),
        advantages=advantages(*(float(i + 1) for i in range(len(trajectories)))),
        current_update=6,
        version_updates={3: 4, 4: 6},
        min_update=min_update,
        **of,
    )


def test_a_token_of_weights_with_too_few_updates_is_context_and_nothing_else():
    whole, batch = (masked(resumed_trajectory(), min_update=u) for u in (0, 5))
    assert batch["loss_mask"][0].tolist() == [False] * 5 + [True, True, False, False, True, True]
    assert batch["lag"][0].tolist() == [-1] * 5 + [0, 0, -1, -1, 0, 0]
    assert (batch["behaviour_logprobs"][0][:5] == 0).all()
    for key in ("token_ids", "lengths", "routed_experts", "trajectory", "advantages"):
        assert torch.equal(batch[key], whole[key]), "it is forwarded as it was"
    assert torch.equal(batch["pure_lag0"], whole["pure_lag0"] & batch["loss_mask"])


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_what_is_masked_is_of_the_same_tokens_in_every_mode(mode):
    batch = masked(updated_trajectory(mode), min_update=5)
    assert int(batch["loss_mask"].sum()) == 4
    assert torch.equal(batch["lag"] >= 0, batch["loss_mask"])
    assert int(batch["lag"].max()) == 0


def test_a_sequence_of_which_nothing_is_left_is_not_forwarded():
    batch = masked(updated_trajectory("split"), resumed_trajectory(4, 4), min_update=5)
    assert batch["informative"].tolist() == [False, True, True]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_a_loss_is_normalised_by_the_tokens_with_gradient(aggregation):
    batch = masked(resumed_trajectory(), resumed_trajectory(4, 4), min_update=5)
    counts = batch["loss_mask"].sum(1)
    weights = token_weights(counts, aggregation=aggregation, trajectory=batch["trajectory"], group=batch["group"])
    assert counts.tolist() == [4, 6]
    assert float((weights * counts).sum()) == pytest.approx(1.0)
