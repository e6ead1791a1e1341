"""Groups to training batches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_rl.trainer.batch.advantage import Advantages
from async_rl.trainer.batch.training_batch import BatchError, supervised_batch, training_batch
from async_rl.trainer.loss.losses import token_weights
from message_queue.heads import head_of
from message_queue.routing_rows import RowRun
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import SampledRun, TrainingSequence, content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.dense import loss_mask
from tests.helpers.groups import SPEC


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


def batch_of(groups, **settings):
    return training_batch([head_of(g) for g in groups], [content_of(g) for g in groups], **settings)


def made_of(*trajectories, update=6, updates=None, **settings):
    return batch_of(
        as_groups(*trajectories),
        advantages=advantages(*(float(i + 1) for i in range(len(trajectories)))),
        current_update=update,
        version_updates=updates or {3: 4, 4: 6},
        **settings,
    )


def column(batch, name, number=0, *, otherwise):
    """A column of the tokens in the loss, spread over all tokens of a sequence."""
    loss = batch.loss_tokens(number)
    out = np.full(batch.lengths[number], otherwise)
    out[loss.positions] = getattr(loss, name)
    return out


def in_loss(batch, number=0):
    """bool [t]."""
    out = np.zeros(batch.lengths[number], bool)
    out[batch.loss_tokens(number).positions] = True
    return out


def pure(batch, number=0):
    """bool [t]."""
    return column(batch, "pure", number, otherwise=False)


def is_pure(batch):
    """Whether each token in a loss is pure."""
    return [bool(each) for number in range(len(batch)) for each in batch.loss_tokens(number).pure]


def test_a_training_batch_has_the_types_and_shapes_it_documents():
    short = Trajectory(routing=SPEC)
    short.observe(np.arange(2, dtype=np.int32))
    short.extend(sampled(1, 4, rows(0, 2)))
    short.close(stop_reason=StopReason.LENGTH, reward=0.0)
    batch = made_of(resumed_trajectory(), short)
    columns = ("index", "lengths", "num_loss_tokens", "trajectory", "mini_batch", "advantages", "informative")
    assert {name: (str(getattr(batch, name).dtype), getattr(batch, name).shape) for name in columns} == {
        "index": ("int64", (2, 3)),
        "lengths": ("int64", (2,)),
        "num_loss_tokens": ("int64", (2,)),
        "trajectory": ("int64", (2,)),
        "mini_batch": ("int64", (2,)),
        "advantages": ("float32", (2,)),
        "informative": ("bool", (2,)),
    }
    assert [str(part.dtype) for part in batch.loss_tokens(0)] == ["int64", "float32", "int64", "bool"]
    assert batch.lengths.tolist() == [11, 3]
    assert batch.num_loss_tokens.tolist() == [6, 1]
    assert batch.index.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert [len(batch.loss_tokens(number).positions) for number in range(2)] == [6, 1]


def test_a_training_batch_leaves_out_rollouts_that_failed():
    failed, other = plain_trajectory(), plain_trajectory()
    failed.stop_reason = StopReason.ERROR
    (group,) = as_groups(failed)
    group.trajectories.append(other)
    batch = batch_of([group], advantages=advantages(1.0), current_update=6, version_updates={3: 4})
    assert batch.index.tolist() == [[0, 1, 0]]
    assert batch.trajectory.tolist() == [0] and batch.num_trajectories == 1
    assert content_of(group)[0] == ()
    assert batch.sequence(0).token_ids.tolist() == other.token_ids().tolist()


def test_a_training_batch_whose_content_is_of_another_group_is_refused():
    batch = made_of(plain_trajectory(), resumed_trajectory())
    swapped = replace(batch, contents=batch.contents[::-1])
    with pytest.raises(BatchError, match="has 11 tokens, but its head says 5"):
        swapped.loss_tokens(0)


def test_the_content_of_a_group_is_pickled_without_a_copy_of_its_arrays():
    (group,) = as_groups(resumed_trajectory())
    buffers = []
    pickled = pickle.dumps(content_of(group), protocol=5, buffer_callback=buffers.append)
    sequence = content_of(group)[0][0]
    outside = sum(len(buffer.raw()) for buffer in buffers)
    assert outside == sequence.token_ids.nbytes + sequence.logprobs.nbytes + sequence.rows.nbytes
    ((found,),) = pickle.loads(pickled, buffers=buffers)
    assert (found.runs, found.row_runs) == (sequence.runs, sequence.row_runs)


def test_lag_counts_optimizer_updates_of_sampled_tokens():
    batch = made_of(resumed_trajectory())
    assert column(batch, "lag", otherwise=-1).tolist() == [-1, -1, -1, 2, 2, 0, 0, -1, -1, 0, 0]


def test_the_worked_example_of_a_pure_token():
    sequence = TrainingSequence(
        token_ids=np.zeros(7, np.int32),
        runs=(SampledRun(3, 2, 4), SampledRun(6, 1, 5)),
        logprobs=np.zeros(3, np.float32),
        rows=np.zeros((6, 2, 2), np.uint8),
        row_runs=(RowRun(4, 4), RowRun(2, 5)),
    )
    batch = made_of(plain_trajectory(), update=5, updates={3: 3, 4: 4, 5: 5})
    batch = replace(batch, contents=[((sequence,),)], lengths=np.array([7]))
    assert batch.loss_tokens(0).positions.tolist() == [3, 4, 6]
    assert batch.loss_tokens(0).lag.tolist() == [1, 1, 0]
    assert not batch.loss_tokens(0).pure.any()
    fresh = replace(sequence, row_runs=(RowRun(6, 5),))
    assert replace(batch, contents=[((fresh,),)]).loss_tokens(0).pure.tolist() == [False, False, True]


def test_a_token_over_older_rows_is_not_pure_at_lag_zero():
    assert not any(is_pure(made_of(resumed_trajectory())))
    assert all(is_pure(made_of(resumed_trajectory(4, 4))))


def test_a_token_over_a_row_the_engine_could_not_give_is_not_pure():
    assert not any(is_pure(made_of(resumed_trajectory(4, 4, unavailable=1))))


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
    batch = batch_of(
        as_groups(*(updated_trajectory(mode) for mode in ("split", "append", "split"))),
        advantages=advantages(0.0, 1.0, 2.0),
        current_update=6,
        version_updates={3: 4, 4: 6},
    )
    assert batch.trajectory.tolist() == [0, 0, 1, 2, 2]
    assert batch.index.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [2, 0, 1]]
    assert batch.lengths.tolist() == [5, 11, 11, 5, 11]
    assert batch.num_loss_tokens.tolist() == [2, 4, 6, 2, 4]
    assert batch.advantages.tolist() == [0, 0, 1, 2, 2]
    assert batch.informative.tolist() == [False, False, True, True, True]


def test_every_sampled_token_is_in_one_loss_whatever_the_mode():
    (whole,) = updated_trajectory("append").sequences()
    for mode in ("force", "replace", "split"):
        batch = made_of(updated_trajectory(mode))
        found = [batch.loss_tokens(number) for number in range(len(batch))]
        assert np.concatenate([f.positions for f in found]).tolist() == np.flatnonzero(loss_mask(whole)).tolist()
        assert np.concatenate([f.logprobs for f in found]).tolist() == whole.logprobs.tolist()
        assert np.concatenate([f.lag for f in found]).tolist() == [2, 2, 0, 0, 0, 0]


NEWEST = [*[False] * 5, True, True, False, False, True, True]  # the tokens that version 4 sampled


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("append", [False] * 11),  # over rows of version 3, and K/V of other experts
        ("force", NEWEST),  # K/V is of version 4 over the rows of version 3
        ("replace", NEWEST),  # rows and K/V are of version 4
        ("split", NEWEST),
    ],
)
def test_which_tokens_after_an_update_are_pure_depends_on_the_mode(mode, expected):
    batch = made_of(updated_trajectory(mode))
    found = np.zeros(11, bool)
    for number, length in enumerate(batch.lengths.tolist()):
        found[:length] |= pure(batch, number)
    assert found.tolist() == expected


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_without_an_update_every_token_is_pure_in_every_mode(mode):
    assert all(is_pure(made_of(updated_trajectory(mode, versions=(4, 4)))))


@pytest.mark.parametrize("mode", ["append", "force"])
def test_no_token_behind_a_row_that_no_engine_could_give_is_pure(mode):
    assert not any(is_pure(made_of(updated_trajectory(mode, versions=(4, 4), unavailable=1))))


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_where_kv_outlives_updates_only_groups_admitted_at_lag_zero_have_pure_tokens(mode):
    groups = as_groups(updated_trajectory(mode, versions=(4, 4)))
    for admitted_update, expected in ((3, False), (4, True)):
        groups[0].admitted_update = admitted_update
        batch = batch_of(groups, advantages=advantages(1.0), current_update=4, version_updates={4: 4}, retained_kv=True)
        assert set(is_pure(batch)) == {expected}


def test_over_kept_kv_a_forced_token_is_pure_only_over_rows_of_lag_zero():
    groups = as_groups(updated_trajectory("force"))
    groups[0].admitted_update = 4
    batch = batch_of(
        groups, advantages=advantages(1.0), current_update=4, version_updates={3: 2, 4: 4}, retained_kv=True
    )
    assert not any(is_pure(batch))


def test_without_routing_a_token_is_pure_as_long_as_everything_before_was_sampled_at_lag_zero():
    batch = made_of(plain_trajectory(), updates={3: 6})
    assert batch.sequence(0).rows is None
    assert pure(batch).tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batch_of([], advantages=advantages(), current_update=0, version_updates={}), "no trajectories"),
        (
            lambda: batch_of(
                as_groups(plain_trajectory()), advantages=advantages(1, 2), current_update=0, version_updates={3: 0}
            ),
            "1 trajectories, but 2 advantages",
        ),
        (lambda: made_of(plain_trajectory(), updates={0: 0}), r"param_version 3 sampled tokens, but .*\[0\]"),
        (lambda: made_of(plain_trajectory(), update=2), "4 optimizer updates, more than current_update=2"),
        (lambda: supervised_batch([]), "no examples"),
        (lambda: supervised_batch([(np.arange(3, dtype=np.int32), np.ones(2, np.bool_))]), "example 0 has 3 tokens"),
    ],
)
def test_what_is_no_batch_is_refused(call, message):
    with pytest.raises(BatchError, match=message):
        call()


def test_supervised_examples_are_sequences_of_one_content():
    batch = supervised_batch(
        [
            (np.array([5, 6, 7], np.int32), np.array([False, True, True])),
            (np.array([8], np.int32), np.array([True])),
        ]
    )
    assert len(batch.contents) == 1
    assert [batch.sequence(number).token_ids.tolist() for number in range(2)] == [[5, 6, 7], [8]]
    assert [batch.loss_tokens(number).positions.tolist() for number in range(2)] == [[1, 2], [0]]
    assert batch.lengths.tolist() == [3, 1] and batch.num_loss_tokens.tolist() == [2, 1]


# ---- tokens that are too old


def test_a_token_of_weights_with_too_few_updates_is_context_and_nothing_else():
    whole, batch = (made_of(resumed_trajectory(), min_update=u) for u in (0, 5))
    assert in_loss(batch).tolist() == [False] * 5 + [True, True, False, False, True, True]
    assert column(batch, "lag", otherwise=-1).tolist() == [-1] * 5 + [0, 0, -1, -1, 0, 0]
    assert batch.sequence(0).token_ids.tolist() == whole.sequence(0).token_ids.tolist(), "it is forwarded unchanged"
    assert batch.loss_tokens(0).logprobs.tolist() == whole.loss_tokens(0).logprobs[2:].tolist()
    assert np.array_equal(pure(batch), pure(whole) & in_loss(batch))


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_what_is_masked_is_of_the_same_tokens_in_every_mode(mode):
    batch = made_of(updated_trajectory(mode), min_update=5)
    assert int(batch.num_loss_tokens.sum()) == 4
    for number, tokens in enumerate(batch.num_loss_tokens.tolist()):
        assert batch.loss_tokens(number).lag.tolist() == [0] * tokens


def test_a_sequence_of_which_nothing_is_left_is_not_forwarded():
    batch = made_of(updated_trajectory("split"), resumed_trajectory(4, 4), min_update=5)
    assert batch.informative.tolist() == [False, True, True]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_a_loss_is_normalised_by_the_tokens_with_gradient(aggregation):
    batch = made_of(resumed_trajectory(), resumed_trajectory(4, 4), min_update=5)
    counts, trajectory = torch.from_numpy(batch.num_loss_tokens), torch.from_numpy(batch.trajectory)
    weights = token_weights(counts, aggregation=aggregation, trajectory=trajectory, group=trajectory)
    assert counts.tolist() == [4, 6]
    assert float((weights * counts).sum()) == pytest.approx(1.0)
