"""Groups to training batches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from async_rl.trainer.batch.advantage import Advantages
from async_rl.trainer.batch.forest import prefixes_of
from async_rl.trainer.batch.training_batch import BatchError, first_tokens, supervised_batch, training_batch
from message_queue.heads import head_of
from message_queue.tokens import StopReason
from message_queue.training_sequence import RowRun, SampledRun, TrainingSequence, content_of
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.dense import loss_mask
from tests.helpers.groups import SPEC, routed, segment, trajectory

MODES = ["append", "force", "replace", "split"]
NEWEST = [5, 6, 9, 10]
"""Positions that version 4 sampled in `updated_trajectory`."""


def updated_trajectory(mode="append", *, versions=(3, 4), unavailable=0):
    """Prompt of 3, two tokens, an update, two tokens, a tool reply of 2, two tokens: 11 tokens, rows 0..9.

    A request brings the rows that its mode asks for.
    """
    old, new = versions
    keeps_held = mode in ("append", "force")
    first = routed(unavailable, 4, version=old, unavailable=unavailable)
    made = Trajectory(routing=SPEC, resume_routing=mode)
    made.observe(np.arange(3, dtype=np.int32))
    made.extend(replace(segment(2, version=old), routed_experts=first))
    made.extend(segment(2, version=new, rows=(4 if keeps_held else 0, 6)))
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(segment(2, version=new, rows=(6 if keeps_held else 0, 10)))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def plain_trajectory():
    """Prompt of 3 and two tokens, without routing."""
    return trajectory(segment(2, version=3), prompt=3)


def as_groups(*trajectories):
    return [
        PromptGroup(group=10 + i, prompt=i, admitted_version=0, admitted_update=0, trajectories=[t])
        for i, t in enumerate(trajectories)
    ]


def batch_of(groups, *values, update=6, updates=None, **settings):
    """A batch at `update`, with one of the advantages `values` for each trajectory."""
    values = np.array(values, np.float32)
    return training_batch(
        [head_of(g) for g in groups],
        [content_of(g) for g in groups],
        advantages=Advantages(values=values, informative=values != 0),
        current_update=update,
        version_updates={3: 4, 4: 6} if updates is None else updates,
        **settings,
    )


def made_of(*trajectories, **settings):
    return batch_of(as_groups(*trajectories), *range(1, len(trajectories) + 1), **settings)


def joined(batch, name):
    """A column of the tokens in the loss, over all sequences."""
    return np.concatenate([getattr(batch.loss_tokens(number), name) for number in range(len(batch))]).tolist()


def pure_positions(batch):
    """Positions of pure tokens, over all sequences."""
    return [at for at, pure in zip(joined(batch, "positions"), joined(batch, "pure"), strict=True) if pure]


def test_a_training_batch_has_the_types_and_shapes_it_documents():
    short = trajectory(segment(1, version=4, rows=(0, 2)), routing=SPEC)
    batch = made_of(updated_trajectory(), short)
    for name in ("lengths", "num_loss_tokens", "trajectory", "mini_batch"):
        assert (str(getattr(batch, name).dtype), getattr(batch, name).shape) == ("int64", (2,))
    assert [str(column.dtype) for column in (batch.advantages, batch.informative)] == ["float32", "bool"]
    assert [str(part.dtype) for part in batch.loss_tokens(0)[:4]] == ["int64", "float32", "int64", "bool"]
    assert batch.loss_tokens(0).teacher is None
    assert batch.lengths.tolist() == [11, 3]
    assert batch.num_loss_tokens.tolist() == [6, 1]
    assert batch.index.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_a_training_batch_leaves_out_rollouts_that_failed():
    failed, other = plain_trajectory(), plain_trajectory()
    failed.stop_reason = StopReason.ERROR
    (group,) = as_groups(failed)
    group.trajectories.append(other)
    batch = batch_of([group], 1.0)
    assert batch.index.tolist() == [[0, 1, 0]]
    assert batch.trajectory.tolist() == [0] and batch.num_trajectories == 1
    assert content_of(group)[0] == ()
    assert batch.sequence(0).token_ids.tolist() == other.token_ids().tolist()


def test_a_training_batch_whose_content_is_of_another_group_is_refused():
    batch = made_of(plain_trajectory(), updated_trajectory())
    swapped = replace(batch, contents=batch.contents[::-1])
    with pytest.raises(BatchError, match="head"):
        swapped.loss_tokens(0)


def test_the_content_of_a_group_is_pickled_without_a_copy_of_its_arrays():
    (group,) = as_groups(updated_trajectory())
    buffers = []
    pickled = pickle.dumps(content_of(group), protocol=5, buffer_callback=buffers.append)
    sequence = content_of(group)[0][0]
    outside = sum(len(buffer.raw()) for buffer in buffers)
    assert outside == sequence.token_ids.nbytes + sequence.logprobs.nbytes + sequence.rows.nbytes
    ((found,),) = pickle.loads(pickled, buffers=buffers)
    assert (found.runs, found.row_runs) == (sequence.runs, sequence.row_runs)


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


def test_a_split_trajectory_is_several_sequences_of_one_advantage():
    groups = as_groups(*(updated_trajectory(mode) for mode in ("split", "append", "split")))
    batch = batch_of(groups, 0.0, 1.0, 2.0)
    assert batch.trajectory.tolist() == [0, 0, 1, 2, 2]
    assert batch.index.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [2, 0, 1]]
    assert batch.lengths.tolist() == [5, 11, 11, 5, 11]
    assert batch.num_loss_tokens.tolist() == [2, 4, 6, 2, 4]
    assert batch.advantages.tolist() == [0, 0, 1, 2, 2]
    assert batch.informative.tolist() == [False, False, True, True, True]


def forked_trajectory(*, routing=SPEC):
    """Prompt of 3 and two tokens of version 3, then two paths, each with 1 observed token and two of version 4."""
    made = Trajectory(routing=routing)
    made.observe(np.arange(3, dtype=np.int32))
    made.extend(segment(2, version=3, rows=(0, 4) if routing else None))
    for path in (made, made.fork(turns=1)):
        path.observe(np.arange(1, dtype=np.int32))
        path.extend(segment(2, version=4, rows=(4, 7) if routing else None))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


def test_the_paths_of_a_trajectory_are_sequences_of_one_advantage():
    groups = as_groups(forked_trajectory(), updated_trajectory(), forked_trajectory())
    batch = batch_of(groups, 0.5, 1.0, -2.0)
    assert batch.index.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [2, 0, 1]]
    assert batch.trajectory.tolist() == [0, 0, 1, 2, 2]
    assert batch.advantages.tolist() == [0.5, 0.5, 1.0, -2.0, -2.0]
    assert batch.lengths.tolist() == [8, 8, 11, 8, 8]
    assert batch.num_loss_tokens.tolist() == [4, 2, 6, 4, 2]
    assert batch.num_loss_tokens.sum() == sum(t.num_sampled for group in groups for t in group.trajectories)
    assert [batch.loss_tokens(n).positions.tolist() for n in (0, 1)] == [[3, 4, 6, 7], [6, 7]]


def test_prefixes_of_heads_have_the_numbers_of_the_batch():
    groups = as_groups(forked_trajectory(), updated_trajectory(), forked_trajectory())
    heads = [head_of(group) for group in groups]
    for number, group in enumerate(groups):
        content = content_of(group)
        found = prefixes_of([content[trajectory][at] for trajectory, at in heads[number].trained])
        heads[number] = replace(heads[number], prefixes=tuple(found))
    made = training_batch(
        heads,
        [content_of(group) for group in groups],
        advantages=Advantages(values=np.ones(3, np.float32), informative=np.ones(3, np.bool_)),
        current_update=6,
        version_updates={3: 4, 4: 6},
    )
    assert heads[2].prefixes == ((-1, 0), (0, 8)), "the paths have equal tokens and rows"
    assert made.prefixes == [(-1, 0), (0, 8), (-1, 0), (-1, 0), (3, 8)]
    assert batch_of(groups, 1.0, 1.0, 1.0).prefixes == [(-1, 0)] * 5, "the content was not compared"


@pytest.mark.parametrize(("routing", "pure"), [(SPEC, []), (None, [6, 7, 6, 7])])
def test_a_token_after_shared_tokens_of_older_weights_is_pure_only_without_rows(routing, pure):
    assert joined(made_of(forked_trajectory(routing=routing)), "lag") == [2, 2, 0, 0, 0, 0]
    assert pure_positions(made_of(forked_trajectory(routing=routing))) == pure
    assert pure_positions(made_of(forked_trajectory(routing=routing), updates={3: 6, 4: 6})) == [3, 4, 6, 7, 6, 7]


@pytest.mark.parametrize("mode", MODES)
def test_every_sampled_token_is_in_one_loss_in_every_mode(mode):
    (whole,) = updated_trajectory("append").sequences()
    batch = made_of(updated_trajectory(mode))
    assert joined(batch, "positions") == np.flatnonzero(loss_mask(whole)).tolist()
    assert joined(batch, "logprobs") == whole.logprobs.tolist()
    assert joined(batch, "lag") == [2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("append", []),  # over rows of version 3, and K/V of other experts
        ("force", NEWEST),  # K/V is of version 4 over the rows of version 3
        ("replace", NEWEST),  # rows and K/V are of version 4
        ("split", NEWEST),
    ],
)
def test_the_mode_decides_the_pure_tokens_after_an_update(mode, expected):
    assert pure_positions(made_of(updated_trajectory(mode))) == expected


@pytest.mark.parametrize("mode", MODES)
def test_without_an_update_every_token_is_pure_in_every_mode(mode):
    assert pure_positions(made_of(updated_trajectory(mode, versions=(4, 4)))) == [3, 4, *NEWEST]


@pytest.mark.parametrize("mode", ["append", "force"])
def test_no_token_behind_a_row_that_no_engine_could_give_is_pure(mode):
    assert pure_positions(made_of(updated_trajectory(mode, versions=(4, 4), unavailable=1))) == []


@pytest.mark.parametrize("mode", MODES)
def test_over_retained_kv_only_groups_admitted_at_lag_zero_are_pure(mode):
    groups = as_groups(updated_trajectory(mode, versions=(4, 4)))
    for admitted_update, expected in ((3, []), (4, [3, 4, *NEWEST])):
        admitted = [replace(groups[0], admitted_update=admitted_update)]
        batch = batch_of(admitted, 1.0, update=4, updates={4: 4}, retained_kv=True)
        assert pure_positions(batch) == expected


def test_over_retained_kv_a_forced_token_is_pure_only_over_rows_of_lag_zero():
    groups = [replace(each, admitted_update=4) for each in as_groups(updated_trajectory("force"))]
    assert pure_positions(batch_of(groups, 1.0, update=4, updates={3: 2, 4: 4}, retained_kv=True)) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: batch_of([]), "trajectories"),
        (lambda: batch_of(as_groups(plain_trajectory()), 1, 2), "advantages"),
        (lambda: made_of(plain_trajectory(), updates={0: 0}), "param_version"),
        (lambda: made_of(plain_trajectory(), update=2), "current_update"),
        (lambda: supervised_batch([]), "examples"),
        (lambda: supervised_batch([(np.arange(3, dtype=np.int32), np.ones(2, np.bool_))]), "example"),
    ],
)
def test_a_training_batch_that_is_inconsistent_is_refused(call, named):
    with pytest.raises(BatchError, match=named):
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


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_weights_with_too_few_updates_are_context(mode):
    whole, batch = (made_of(updated_trajectory(mode), min_update=u) for u in (0, 5))
    assert joined(batch, "positions") == NEWEST
    assert joined(batch, "lag") == [0] * 4
    assert joined(batch, "logprobs") == joined(whole, "logprobs")[2:]
    assert int(batch.num_loss_tokens.sum()) == 4
    assert pure_positions(batch) == pure_positions(whole)
    for number in range(len(batch)):
        assert batch.sequence(number).token_ids.tolist() == whole.sequence(number).token_ids.tolist()


def test_a_sequence_whose_tokens_are_all_too_old_is_not_forwarded():
    batch = made_of(updated_trajectory("split"), updated_trajectory(versions=(4, 4)), min_update=5)
    assert batch.informative.tolist() == [False, True, True]


def test_the_tokens_of_one_version_end_with_the_last_of_them():
    batch = made_of(updated_trajectory("force"), updated_trajectory("force", versions=(4, 3)), plain_trajectory())
    assert batch.sampled_at == [6, 4]
    for update, lengths, positions in (
        (4, [5, 11, 5], [3, 4, 5, 6, 9, 10, 3, 4]),
        (6, [11, 5, 5], [5, 6, 9, 10, 3, 4]),
    ):
        part = batch.of_update(update)
        assert part.lengths.tolist() == lengths
        assert [len(part.sequence(number)) for number in range(3)] == lengths
        assert joined(part, "positions") == positions
        assert part.num_loss_tokens.tolist() == [len(part.loss_tokens(number).positions) for number in range(3)]
        whole = [batch.loss_tokens(number) for number in range(3)]
        for number, tokens in enumerate(whole):
            own = tokens.lag == 6 - update
            for name in ("positions", "logprobs", "lag", "exact"):
                expected = getattr(tokens, name)[own].tolist()
                assert getattr(part.loss_tokens(number), name).tolist() == expected, name


def test_tokens_of_a_version_that_is_too_old_for_the_loss_are_none_of_its_tokens():
    batch = made_of(updated_trajectory("force"), plain_trajectory(), min_update=5)
    assert batch.sampled_at == [6]
    assert batch.of_update(4).num_loss_tokens.tolist() == [0, 0]


def test_the_first_tokens_of_a_sequence_have_their_rows_support_and_logprobs():
    batch = made_of(updated_trajectory("append"))
    whole = batch.sequence(0)
    first = first_tokens(whole, 5)
    assert len(first) == 5 and first.token_ids.tolist() == whole.token_ids[:5].tolist()
    assert first.logprobs.tolist() == whole.logprobs[:2].tolist()
    assert sum(run.rows for run in first.row_runs) == len(first.rows) == 5
    assert first.rows.tolist() == whole.rows[:5].tolist()
    assert first.row_runs == (RowRun(4, 3), RowRun(1, 4))
    assert first_tokens(whole, 11).row_runs == whole.row_runs


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("append", [3, 4]),  # the newer tokens are over rows of version 3, and K/V of other experts
        ("force", [3, 4, *NEWEST]),
        ("replace", NEWEST),  # the older tokens are over rows of version 4
        ("split", [3, 4, *NEWEST]),
    ],
)
def test_the_mode_decides_the_exact_tokens_at_any_staleness(mode, expected):
    batch = made_of(updated_trajectory(mode), update=9, updates={3: 4, 4: 6})
    assert [
        p for p, is_exact in zip(joined(batch, "positions"), joined(batch, "exact"), strict=True) if is_exact
    ] == expected
    assert not any(joined(batch, "pure"))
