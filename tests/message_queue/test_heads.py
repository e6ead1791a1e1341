"""Heads of groups against the trajectories that they are of."""

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.heads import GroupHead, head_of, merged_spans
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.dense import loss_mask, param_versions, row_versions
from tests.helpers.fakes import Interruption
from tests.helpers.groups import SPEC, routed, segment
from tests.message_queue.test_resume_routing import MODES, interruptions, rolled_out


def group_of(*trajectories):
    return PromptGroup(group=7, prompt=3, admitted_version=2, admitted_update=1, trajectories=list(trajectories))


def spans_of(trajectory):
    """Versions of the sampled tokens, one after the other."""
    return param_versions(trajectory)[loss_mask(trajectory)].tolist()


def expanded(spans):
    return [version for version, tokens in spans for _ in range(tokens)]


@settings(deadline=None)
@given(mode=st.sampled_from(MODES), drawn=interruptions)
def test_a_head_says_of_a_trajectory_what_its_arrays_say(mode, drawn):
    version, schedule = 0, []
    for after, load, goes_on in drawn:
        version += load
        schedule.append(Interruption(after=after, load=version, goes_on=goes_on))
    made, _, _ = asyncio.run(rolled_out(mode, schedule))
    made.close(stop_reason=StopReason.LENGTH, reward=0.5, info={"turns": 2})
    (head,) = head_of(group_of(made)).trajectories
    assert (head.length, head.num_sampled, head.num_segments) == (len(made), made.num_sampled, len(made.segments))
    assert expanded(head.spans) == spans_of(made)
    assert head.num_aborts == sum(s.stop_reason is StopReason.ABORT for s in made.segments)
    assert [s.length for s in head.sequences] == [len(s) for s in made.sequences()]
    for told, sequence in zip(head.sequences, made.sequences(), strict=True):
        assert expanded(told.spans) == param_versions(sequence)[loss_mask(sequence)].tolist()


def test_a_head_counts_rows_that_no_engine_gave():
    made = Trajectory(routing=SPEC)
    made.observe(np.arange(2, dtype=np.int32))
    part = segment(3, version=2, rows=(0, 4))
    made.extend(part)
    made.observe(np.arange(2, dtype=np.int32))
    after = segment(2, version=2)
    after = type(after)(
        token_ids=after.token_ids,
        logprobs=after.logprobs,
        routed_experts=routed(6, 8, unavailable=2),
        weights=after.weights,
        stop_reason=after.stop_reason,
        replica="r",
    )
    made.extend(after)
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    (head,) = head_of(group_of(made)).trajectories
    assert head.missing_rows == 2
    assert head.row_bytes == part.routed_experts.experts.nbytes + after.routed_experts.experts.nbytes
    (sequence,) = made.sequences()
    assert np.array_equal(sequence.routed_experts, made.sequences()[-1].routed_experts)
    assert np.array_equal(row_versions(sequence), row_versions(made.sequences()[-1]))


@pytest.mark.parametrize(
    ("parts", "num_aborts"),
    [
        ([(2, StopReason.LENGTH), (2, StopReason.LENGTH)], 0),
        ([(2, StopReason.LENGTH), (3, StopReason.LENGTH)], 1),
        ([(2, StopReason.ABORT), (3, StopReason.LENGTH)], 1),
        ([(2, StopReason.ABORT), (2, StopReason.LENGTH), (3, StopReason.LENGTH)], 2),
    ],
)
def test_a_head_counts_aborts_between_the_strides_of_a_turn(parts, num_aborts):
    made = Trajectory(routing=None)
    made.observe(np.arange(2, dtype=np.int32))
    for version, reason in parts:
        made.extend(segment(3, version=version, stop_reason=reason))
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(segment(3, version=9))  # another turn, which nothing interrupted
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    (head,) = head_of(group_of(made)).trajectories
    assert head.num_aborts == num_aborts
    assert expanded(head.spans) == spans_of(made)


def test_a_head_survives_its_way_as_bytes():
    made = Trajectory(routing=None)
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(segment(3, version=2))
    made.close(stop_reason=StopReason.ERROR, reward=0.0, info={"turns": 1.0})
    head = head_of(group_of(made))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(head), type=GroupHead) == head
    assert head.num_tokens == 3
    assert head.tokens_per_version() == {}


def test_a_trajectory_that_is_open_has_no_head():
    made = Trajectory(routing=None)
    made.observe(np.arange(2, dtype=np.int32))
    with pytest.raises(ValueError, match="trajectory 0 of group 7"):
        head_of(group_of(made))


def test_spans_of_one_version_that_touch_are_one():
    assert merged_spans([(3, 4), (3, 1), (4, 2), (3, 1)]) == ((3, 5), (4, 2), (3, 1))
