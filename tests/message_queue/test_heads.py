"""Heads of groups against their trajectories."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.errors import ContractError
from message_queue.heads import GroupHead, head_of, merged_spans
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from tests.agent_loop.test_decoder import LONG, decoded, scripted
from tests.helpers.dense import loss_mask, param_versions
from tests.helpers.fakes import Interruption
from tests.helpers.groups import segment, trajectory


def group_of(*trajectories):
    return PromptGroup(group=7, prompt=3, admitted_version=2, admitted_update=1, trajectories=list(trajectories))


def spans_of(trajectory):
    """Versions of the sampled tokens, one after the other."""
    return param_versions(trajectory)[loss_mask(trajectory)].tolist()


def expanded(spans):
    return [version for version, tokens in spans for _ in range(tokens)]


@settings(deadline=None)
@given(
    mode=st.sampled_from(["append", "force", "replace", "split"]),
    schedule=st.lists(st.builds(Interruption, after=st.integers(1, 5), goes_on=st.booleans()), max_size=5),
)
def test_head_has_the_lengths_and_versions_of_the_trajectory(mode, schedule):
    loads = [replace(interruption, load=version // 2) for version, interruption in enumerate(schedule, start=1)]
    made, _, _ = asyncio.run(decoded(scripted(LONG, interruptions=loads), budget=12, resume_routing=mode))
    made.close(stop_reason=StopReason.LENGTH, reward=0.5, info={"turns": 2})
    (head,) = head_of(group_of(made)).trajectories
    assert (head.length, head.num_sampled, head.num_segments) == (len(made), made.num_sampled, len(made.segments))
    assert expanded(head.spans) == spans_of(made)
    assert head.num_aborts == sum(s.stop_reason is StopReason.ABORT for s in made.segments)
    assert [s.length for s in head.sequences] == [len(s) for s in made.sequences()]
    for part, sequence in zip(head.sequences, made.sequences(), strict=True):
        assert expanded(part.spans) == param_versions(sequence)[loss_mask(sequence)].tolist()


@pytest.mark.parametrize(
    ("parts", "num_aborts"),
    [
        ([(2, StopReason.LENGTH), (2, StopReason.LENGTH)], 0),
        ([(2, StopReason.LENGTH), (3, StopReason.LENGTH)], 1),
        ([(2, StopReason.ABORT), (3, StopReason.LENGTH)], 1),
        ([(2, StopReason.ABORT), (2, StopReason.LENGTH), (3, StopReason.LENGTH)], 2),
    ],
)
def test_head_counts_aborts_between_the_strides_of_a_turn(parts, num_aborts):
    made = Trajectory(routing=None)
    made.observe(np.arange(2, dtype=np.int32))
    for version, reason in parts:
        made.extend(segment(3, version=version, stop_reason=reason))
    made.observe(np.arange(2, dtype=np.int32))
    made.extend(segment(3, version=9))  # another turn, not interrupted
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    (head,) = head_of(group_of(made)).trajectories
    assert head.num_aborts == num_aborts
    assert expanded(head.spans) == spans_of(made)


def test_head_of_an_untrained_agent_has_tokens_without_gradient():
    made = trajectory_of_agents(planner=2, critic=3)
    made.close(stop_reason=StopReason.STOP, reward=1.5, rewards={"planner": 1.0})
    both = trajectory_of_agents(critic=4, planner=1)
    both.close(stop_reason=StopReason.STOP, reward=0.25)
    head = head_of(group_of(made, both, failed_trajectory()))
    assert [s.agent for s in head.trajectories[0].sequences] == ["planner", "critic"]
    assert [t.trained for t in head.trajectories] == [{"planner": [0]}, {"critic": [0], "planner": [1]}, {}]
    assert (head.num_tokens, head.tokens_per_version()) == (2 + 3 + 4 + 1 + 3, {2: 2 + 4 + 1})
    assert head.rewards_by_agent() == {"planner": [1.0, 0.25], "critic": [0.25]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(head), type=GroupHead) == head


def trajectory_of_agents(**tokens):
    """An open trajectory with a path for each agent and as many sampled tokens."""
    made = path = Trajectory(routing=None)
    for agent, count in tokens.items():
        path = made.fork(turns=0) if made.turns else made
        path.agent = agent
        path.observe(np.arange(2, dtype=np.int32))
        path.extend(segment(count, version=2))
    return made


def failed_trajectory():
    failed = trajectory(segment(3, version=2))
    failed.stop_reason = StopReason.ERROR
    return failed


@pytest.mark.parametrize("rewards", [{"judge": 1.0}, {}, {"planner": float("nan")}])
def test_trajectory_without_a_trained_path_or_with_no_number_is_refused(rewards):
    made = trajectory_of_agents(planner=2)
    with pytest.raises(ContractError, match="rewards"):
        made.close(stop_reason=StopReason.STOP, reward=1.0, rewards=rewards)
    assert not made.closed


def test_head_of_an_open_trajectory_is_refused():
    made = Trajectory(routing=None)
    made.observe(np.arange(2, dtype=np.int32))
    with pytest.raises(ValueError, match="trajectory 0 of group 7"):
        head_of(group_of(made))


def test_spans_of_one_version_that_touch_are_one():
    assert merged_spans([(3, 4), (3, 1), (4, 2), (3, 1)]) == ((3, 5), (4, 2), (3, 1))
