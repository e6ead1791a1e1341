"""The merge rule: rows are append-only, every row has one owner, and all arrays stay aligned."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.heads import head_of
from message_queue.routing_rows import NOT_ROUTED, NOT_SAMPLED
from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions, row_versions
from tests.helpers.groups import SPEC, routed, segment, sets_of, support_of, trajectory

FIRST_OWNER = RoutingSpec(layers=(0,), num_experts=60_000, top_k=1)  # an expert id that is unique per segment


def prompt(count=2):
    return np.arange(count, dtype=np.int32)


def opened(count=2, *, routing=SPEC, mode="append"):
    made = Trajectory(routing=routing, resume_routing=mode)
    made.observe(prompt(count))
    return made


def rows_of(owner, first, end, *, unavailable=0):
    experts = np.full((end - first, 1, 1), owner, np.uint16)
    return RoutedExperts(first_position=first, experts=experts, unavailable=unavailable)


def owned_segment(owner, tokens, rows):
    made = segment(tokens, version=owner)
    return type(made)(
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        routed_experts=rows,
        weights=made.weights,
        stop_reason=made.stop_reason,
        replica=made.replica,
    )


@given(st.data())
def test_rows_belong_to_the_first_forward_that_covered_them(data):
    """Random prefills, decodes, aborts without tokens, turns and re-prefills against a slow, obvious model."""
    made = Trajectory(routing=FIRST_OWNER)
    owners: dict[int, int] = {}  # position -> the segment that owns its row, or NOT_ROUTED
    sampled: dict[int, int] = {}  # position -> the segment that sampled it
    owner = 0
    for turn in range(data.draw(st.integers(1, 3))):
        made.observe(prompt(data.draw(st.integers(0 if turn else 1, 3))))
        for _ in range(data.draw(st.integers(0, 4))):
            tokens = data.draw(st.integers(0, 3))
            rows = None
            if tokens:
                end = len(made) + tokens - 1
                first = data.draw(st.integers(0, end))
                rows = rows_of(owner, first, end, unavailable=max(0, first - len(owners)))
                for position in range(end):
                    owners.setdefault(position, owner if position >= first else NOT_ROUTED)
                sampled |= dict.fromkeys(range(len(made), len(made) + tokens), owner)
            made.extend(owned_segment(owner, tokens, rows))
            owner += 1
    length = len(made)
    experts = made.sequences()[-1].routed_experts
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [owners.get(p, NOT_ROUTED) for p in range(length)]
    assert param_versions(made).tolist() == [sampled.get(p, NOT_SAMPLED) for p in range(length)]
    assert loss_mask(made).tolist() == [p in sampled for p in range(length)]
    assert (made.num_rows, made.num_sampled) == (len(owners), len(sampled))
    assert made.num_unavailable_rows == sum(o == NOT_ROUTED for o in owners.values())
    for array in (made.token_ids(), behaviour_logprobs(made), row_versions(made.sequences()[-1])):
        assert len(array) == length
    assert np.all(behaviour_logprobs(made)[~loss_mask(made)] == 0)


def test_a_resume_after_an_update_keeps_the_old_rows():
    made = opened(2)
    made.extend(segment(2, version=0, rows=(0, 3), stop_reason=StopReason.ABORT))
    made.extend(segment(0, version=0, stop_reason=StopReason.ABORT))
    made.extend(segment(3, version=1, rows=(0, 6)))  # prefilled again, under new weights
    experts = made.sequences()[-1].routed_experts
    assert experts is not None
    assert np.array_equal(experts[:3], routed(0, 3, version=0).experts)
    assert np.array_equal(experts[3:6], routed(3, 6, version=1).experts)
    assert np.all(experts[6] == NOT_ROUTED)
    assert param_versions(made).tolist() == [-1, -1, 0, 0, 1, 1, 1]
    assert row_versions(made.sequences()[-1]).tolist() == [0, 0, 0, 1, 1, 1, -1]


def test_tool_tokens_take_the_rows_of_the_next_turn():
    made = opened(2)
    made.extend(segment(2, rows=(0, 3), stop_reason=StopReason.TOOL_CALL))
    made.observe(np.array([7, 8, 9], np.int32))
    made.extend(segment(1, version=1, rows=(3, 7)))
    experts = made.sequences()[-1].routed_experts
    assert experts is not None
    assert np.array_equal(experts[3:7], routed(3, 7, version=1).experts)
    assert loss_mask(made).tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True]
    assert made.token_ids().tolist() == [0, 1, 0, 1, 7, 8, 9, 0]


def test_each_kept_set_is_at_the_position_of_its_sampled_token():
    made = opened(2, routing=None)
    made.extend(replace(segment(2), support=support_of([[5, 9], [7]])))
    made.extend(segment(0))
    made.observe(prompt(1))
    made.extend(segment(1))
    made.extend(replace(segment(1), support=support_of([[5, 6, 7]])))
    assert sets_of(made.sequences()[-1].support) == [[], [], [5, 9], [7], [], [], [5, 6, 7]]


def test_a_trajectory_of_the_whole_vocabulary_has_no_support():
    made = trajectory(segment(2), segment(1))
    assert made.sequences()[0].support is None


def test_each_training_sequence_has_the_kept_sets_of_its_own_tokens():
    made = opened(2, mode="split")
    made.extend(replace(segment(2, rows=(0, 3)), support=support_of([[0, 4], [1]])))
    made.extend(replace(segment(2, version=1, rows=(0, 5)), support=support_of([[0], [1, 6]])))
    assert [sets_of(each.support) for each in made.sequences()] == [
        [[], [], [0, 4], [1]],
        [[], [], [], [], [0], [1, 6]],
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, r"segment of 2 tokens from replica replica-0 carries no routing rows; expected rows 3\.\.4"),
        (routed(4, 5), r"rows from position 4; rows 3\.\.3 are missing"),
        (routed(3, 6), "rows up to position 5; its 2 tokens after position 3 need rows up to 4"),
        (routed(3, 4), "rows up to position 3; its 2 tokens"),
        (routed(0, 4), "rows up to position 3; its 2 tokens"),
        (routed(3, 5, spec=RoutingSpec(layers=(1,), num_experts=8, top_k=2)), "the model routes"),
        (routed(3, 5, spec=RoutingSpec(layers=(1, 3), num_experts=8, top_k=3)), r"shape \[2, 3\]; the model routes"),
        (routed(3, 5, spec=RoutingSpec(layers=(1, 3), num_experts=400, top_k=2)), "experts is uint16"),
        (routed(3, 5, spec=RoutingSpec(layers=(1, 3), num_experts=200, top_k=2), version=3), "expert id 15"),
    ],
)
@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_a_segment_with_wrong_rows_is_refused_and_changes_nothing(rows, message, mode):
    made = opened(2, mode=mode)
    made.extend(segment(2, rows=(0, 3)))
    with pytest.raises(ContractError, match=message):
        made.extend(owned_segment(1, 2, rows))
    assert (len(made), made.num_rows, len(made.segments), len(made.sequences())) == (4, 3, 1, 1)
    assert np.array_equal(made.sequences()[-1].routed_experts[:3], routed(0, 3).experts)
    made.extend(segment(2, version=1, rows=(3, 5)))
    assert made.num_rows == 5


def test_rows_of_tokens_that_were_never_forwarded_are_refused():
    made = opened(2)
    with pytest.raises(ContractError, match="row at position 1, but only positions up to 0 were forwarded"):
        made.extend(owned_segment(0, 0, routed(0, 2)))


def test_what_an_engine_cannot_give_is_counted():
    made = opened(3)
    made.extend(owned_segment(0, 2, routed(2, 4, unavailable=2)))
    experts = made.sequences()[-1].routed_experts
    assert experts is not None
    assert np.all(experts[:2] == NOT_ROUTED)
    assert (made.num_rows, made.num_unavailable_rows) == (4, 2)
    assert row_versions(made.sequences()[-1]).tolist() == [-1, -1, 0, 0, -1]


def test_rows_of_a_segment_without_tokens_are_of_its_version():
    made = opened(3)
    made.extend(owned_segment(1, 0, routed(0, 2)))
    made.extend(segment(2, version=2, rows=(2, 4)))
    assert row_versions(made.sequences()[-1]).tolist() == [1, 1, 2, 2, -1]


# ---- the other modes of resume_routing


def resumed(mode, *, first=0, overlap=1):
    """Prompt of 2, two tokens under version 0, an update, three tokens under `overlap`, a tool reply, one token.

    The resumed segment brings rows from `first` on.
    """
    made = opened(2, mode=mode)
    made.extend(segment(2, version=0, rows=(0, 3), stop_reason=StopReason.ABORT))
    made.extend(owned_segment(1, 3, routed(first, 6, version=overlap)))
    made.observe(prompt(2))
    made.extend(owned_segment(1, 1, routed(6, 9, version=overlap)))
    return made


def test_forced_rows_are_kept_like_appended_ones():
    (appended,), (forced,) = (resumed(mode).sequences() for mode in ("append", "force"))
    assert np.array_equal(appended.routed_experts, forced.routed_experts)
    assert row_versions(appended).tolist() == row_versions(forced).tolist() == [0, 0, 0, *[1] * 6, -1]


def test_replaced_rows_are_those_of_the_last_forward():
    made = resumed("replace")
    assert np.array_equal(made.sequences()[-1].routed_experts[:9], routed(0, 9, version=1).experts)
    assert row_versions(made.sequences()[-1]).tolist() == [*[1] * 9, -1]
    assert len(made.sequences()) == 1
    assert loss_mask(made).tolist() == loss_mask(resumed("append")).tolist()


def test_replacing_begins_at_the_first_row_given():
    made = resumed("replace", first=2)
    assert np.array_equal(made.sequences()[-1].routed_experts[:2], routed(0, 2, version=0).experts)
    assert row_versions(made.sequences()[-1]).tolist() == [0, 0, *[1] * 7, -1]


def test_split_begins_a_sequence_where_the_overlap_differs():
    made = resumed("split")
    before, after = made.sequences()
    assert (len(before), len(after)) == (4, len(made))
    assert loss_mask(before).tolist() == [False, False, True, True]
    assert loss_mask(after).tolist() == [*[False] * 4, *[True] * 3, False, False, True]
    assert np.array_equal(before.routed_experts[:3], routed(0, 3, version=0).experts)
    assert np.array_equal(after.routed_experts[:9], routed(0, 9, version=1).experts)
    assert row_versions(before).tolist() == [0, 0, 0, -1]
    assert row_versions(after).tolist() == [*[1] * 9, -1]
    assert behaviour_logprobs(after)[:4].tolist() == [0] * 4
    assert param_versions(after).tolist() == [*[-1] * 4, *[1] * 3, -1, -1, 1]
    assert np.array_equal(made.sequences()[-1].routed_experts, after.routed_experts)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_split_goes_on_where_the_overlap_is_equal(first):
    made = opened(2, mode="split")
    made.extend(segment(2, version=0, rows=(0, 3)))
    again = routed(first, 6)
    reordered = RoutedExperts(first_position=first, experts=again.experts[..., ::-1].copy())
    made.extend(owned_segment(5, 3, reordered))
    (only,) = made.sequences()
    assert row_versions(only).tolist() == [0, 0, 0, 5, 5, 5, -1]
    assert loss_mask(only).tolist() == loss_mask(made).tolist()


def test_split_keeps_what_is_before_the_rows_given():
    before, after = resumed("split", first=2).sequences()
    assert np.array_equal(after.routed_experts[:2], before.routed_experts[:2])
    assert row_versions(after).tolist() == [0, 0, *[1] * 7, -1]


def test_split_routes_live_what_the_engine_cannot_give_of_other_rows():
    made = opened(3, mode="split")
    made.extend(segment(1, version=0, rows=(0, 3)))
    made.extend(owned_segment(1, 1, routed(2, 4, version=1, unavailable=1)))
    after = made.sequences()[1]
    assert row_versions(after).tolist() == [0, -1, 1, 1, -1]
    assert np.all(after.routed_experts[1] == NOT_ROUTED)
    assert made.num_unavailable_rows == 1


@pytest.mark.parametrize("mode", ["replace", "split"])
def test_nothing_was_sampled_over_the_rows_of_a_segment_without_tokens(mode):
    made = opened(3, mode=mode)
    made.extend(segment(1, version=0, rows=(0, 3)))
    made.extend(owned_segment(1, 0, routed(0, 3, version=1)))
    assert row_versions(made.sequences()[-1]).tolist() == [0, 0, 0, -1]
    assert len(made.sequences()) == 1


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_without_routing_every_mode_gives_one_sequence(mode):
    made = opened(2, routing=None, mode=mode)
    made.extend(segment(2))
    made.extend(segment(2, version=1))
    (only,) = made.sequences()
    assert only.routed_experts is None
    assert param_versions(only).tolist() == param_versions(made).tolist()
    assert row_versions(only).tolist() == [-1] * 6


def test_rows_to_force_end_before_the_first_that_is_unavailable():
    made = opened(2)
    assert made.leading_rows() is None
    made.extend(segment(2, rows=(0, 3)))
    made.extend(segment(1, version=1, rows=(3, 4)))
    leading = made.leading_rows()
    assert (leading.first_position, leading.experts.dtype) == (0, np.uint8)
    assert np.array_equal(leading.experts, made.sequences()[-1].routed_experts[:4])
    made.extend(owned_segment(2, 3, routed(5, 7, version=2, unavailable=1)))
    assert made.leading_rows().end_position == 4
    assert opened(2, routing=None).leading_rows() is None


def test_what_no_mode_allows_is_refused():
    with pytest.raises(ContractError, match="resume_routing is 'newest'; choose one of append, force, replace, split"):
        Trajectory(routing=SPEC, resume_routing="newest")
    with pytest.raises(ContractError, match="routed_experts with 3 rows, but the trajectory captures no routing"):
        opened(2, routing=None).extend(segment(2, rows=(0, 3)))


def test_without_routing_there_are_no_rows():
    made = trajectory(segment(3))
    assert made.sequences()[-1].routed_experts is None
    assert row_versions(made.sequences()[-1]).tolist() == [-1] * 5


def test_the_order_of_calls_is_enforced():
    made = Trajectory(routing=None)
    with pytest.raises(ContractError, match="the prompt is empty"):
        made.observe(np.zeros(0, np.int32))
    with pytest.raises(ContractError, match="a segment came before the prompt"):
        made.extend(segment())
    with pytest.raises(ContractError, match=r"observation is int64\[2\]; need int32"):
        made.observe(np.arange(2))
    made.observe(prompt())
    with pytest.raises(ContractError, match="reward is nan"):
        made.close(stop_reason=StopReason.STOP, reward=float("nan"))
    made.close(stop_reason=StopReason.STOP, reward=1)
    for call in (lambda: made.observe(prompt()), lambda: made.extend(segment())):
        with pytest.raises(ContractError, match="the trajectory is closed"):
            call()


def test_a_group_sums_over_its_trajectories():
    group = PromptGroup(
        group=0,
        prompt=0,
        admitted_version=1,
        admitted_update=1,
        trajectories=[trajectory(segment(2, version=1), segment(0, version=2)), trajectory(segment(3, version=2))],
    )
    assert (group.num_tokens, group.closed) == (5, True)
    head = head_of(group)
    assert (head.num_segments, head.num_tokens, head.tokens_per_version()) == (3, 5, {1: 2, 2: 3})
    group.trajectories.append(opened(routing=None))
    assert not group.closed
