"""The wire carries everything exactly, each row once, and notices damage."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire import (
    EncodedGroup,
    WireError,
    decode_group,
    decode_segment,
    decode_trajectory,
    encode_group,
    encode_segment,
    encode_trajectory,
    encoded_size,
)
from tests.unit.groups import SPEC, routed, segment, sets_of, support_of, trajectory

WIDE = RoutingSpec(layers=(2,), num_experts=384, top_k=3)
logprobs = st.floats(-(2.0**60), 0.0, width=32, allow_subnormal=False)


kept_sets = st.sets(st.integers(0, 2**31 - 1), max_size=4)


@st.composite
def segments(draw, *, held=0, length=1, spec=SPEC, version=None):
    """A segment after `length` tokens of which `held` rows are covered; its rows may overlap or be unavailable."""
    n = draw(st.integers(0, 4))
    rows = None
    if spec is not None and (n or draw(st.booleans())):
        end = length + n - 1
        first = draw(st.integers(0, end)) if n else min(held, end)
        unavailable = max(0, first - held)
        rows = routed(first, end, version=draw(st.integers(0, 5)), spec=spec, unavailable=unavailable)
    return TokenOutput(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        logprobs=np.array(draw(st.lists(logprobs, min_size=n, max_size=n)), np.float32),
        routed_experts=rows,
        weights=WeightVersion(draw(st.integers(0, 3)) if version is None else version, draw(st.text(max_size=3))),
        stop_reason=draw(st.sampled_from(StopReason)),
        replica=draw(st.sampled_from(["replica-0", "replica-1", ""])),
        support=draw(st.none() | st.lists(kept_sets, min_size=n, max_size=n).map(support_of)),
    )


@st.composite
def trajectories(draw, *, spec=SPEC, modes=("append", "force", "replace", "split")):
    made = Trajectory(routing=spec, resume_routing=draw(st.sampled_from(modes)))
    for turn in range(draw(st.integers(1, 3))):
        made.observe(np.arange(draw(st.integers(0 if turn else 1, 3)), dtype=np.int32))
        for _ in range(draw(st.integers(0, 3))):
            made.extend(draw(segments(held=made.num_rows, length=len(made), spec=spec)))
    if draw(st.booleans()):
        info = draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_subnormal=False), max_size=2))
        made.close(
            stop_reason=draw(st.sampled_from(StopReason)),
            reward=draw(st.floats(-9, 9, allow_subnormal=False)),
            info=info,
        )
    return made


def same_segment(a: TokenOutput, b: TokenOutput, *, rows=True):
    assert a.token_ids.tobytes() == b.token_ids.tobytes()
    assert a.token_ids.dtype == b.token_ids.dtype
    assert a.logprobs.tobytes() == b.logprobs.tobytes()
    assert (a.weights, a.stop_reason, a.replica) == (b.weights, b.stop_reason, b.replica)
    assert sets_of(a.support) == sets_of(b.support)
    if rows:
        assert (a.routed_experts is None) == (b.routed_experts is None)
        if a.routed_experts is not None and b.routed_experts is not None:
            assert a.routed_experts.experts.dtype == b.routed_experts.experts.dtype
            assert np.array_equal(a.routed_experts.experts, b.routed_experts.experts)
            assert a.routed_experts.first_position == b.routed_experts.first_position
            assert a.routed_experts.unavailable == b.routed_experts.unavailable


def same_trajectory(a: Trajectory, b: Trajectory):
    assert [t.observation.tolist() for t in a.turns] == [t.observation.tolist() for t in b.turns]
    assert [len(t.segments) for t in a.turns] == [len(t.segments) for t in b.turns]
    for one, other in zip(a.segments, b.segments, strict=True):
        same_segment(one, other, rows=False)
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "param_versions", "row_versions", "routed_experts"):
        one, other = getattr(a, name)(), getattr(b, name)()
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()
    for name in ("reward", "stop_reason", "info", "num_rows", "num_unavailable_rows", "routing", "closed"):
        assert getattr(a, name) == getattr(b, name)
    assert (a.resume_routing, a.sequence_starts) == (b.resume_routing, b.sequence_starts)
    for one, other in zip(a.sequences(), b.sequences(), strict=True):
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert one.row_versions.tolist() == other.row_versions.tolist()
        assert np.array_equal(one.routed_experts, other.routed_experts)
        assert sets_of(one.support) == sets_of(other.support)


@given(st.data(), st.sampled_from([SPEC, WIDE]))
def test_segments_come_back_exactly(data, spec):
    length = data.draw(st.integers(1, 4))
    sent = data.draw(segments(length=length, spec=spec))
    same_segment(sent, decode_segment(encode_segment(sent), routing=spec))


@given(st.data(), st.sampled_from([SPEC, WIDE, None]))
def test_trajectories_come_back_exactly(data, spec):
    sent = data.draw(trajectories(spec=spec))
    same_trajectory(sent, decode_trajectory(encode_trajectory(sent), routing=spec))


@given(st.data(), st.sampled_from([SPEC, WIDE, None]))
def test_groups_come_back_exactly_and_the_queue_reads_them_undecoded(data, spec):
    sent = PromptGroup(
        group=data.draw(st.integers(0, 2**40)),
        prompt=data.draw(st.integers(0, 2**40)),
        admitted_version=3,
        admitted_update=2,
        trajectories=data.draw(st.lists(trajectories(spec=spec), max_size=3)),
    )
    encoded = EncodedGroup(encode_group(sent))
    got = decode_group(encoded.data, routing=spec)
    for name in ("group", "prompt", "admitted_version", "admitted_update", "num_segments", "num_tokens", "closed"):
        assert getattr(sent, name) == getattr(got, name) == getattr(encoded, name)
    assert sent.tokens_per_version() == got.tokens_per_version() == encoded.tokens_per_version()
    for one, other in zip(sent.trajectories, got.trajectories, strict=True):
        same_trajectory(one, other)


@given(st.data(), st.sampled_from([SPEC, WIDE]))
def test_each_row_crosses_once_and_is_never_widened(data, spec):
    sent = data.draw(trajectories(spec=spec, modes=("append", "force", "replace")))
    size = encoded_size(encode_trajectory(sent))
    supports = [s.support for s in sent.segments if s.support is not None]
    assert size.support == sum(4 * len(support) + len(support.packed) for support in supports)
    layers, top_k = spec.row_shape
    available = sent.num_rows - sent.num_unavailable_rows
    assert size.num_rows == available
    assert size.rows == available * layers * top_k * spec.dtype.itemsize
    assert (size.tokens, size.logprobs) == (4 * len(sent), 4 * sent.num_sampled)
    assert size.total == len(encode_trajectory(sent))


def test_the_size_report_is_per_token():
    sent = trajectory(segment(62, rows=(0, 63)), prompt=2, routing=SPEC)
    per_token = encoded_size(encode_trajectory(sent)).per_token()
    assert (per_token["tokens"], per_token["logprobs"], per_token["rows"]) == (4.0, 4 * 62 / 64, 4 * 63 / 64)
    assert per_token["structure"] < 2
    assert all(math.isnan(v) for v in encoded_size(encode_trajectory(Trajectory(routing=None))).per_token().values())


def test_arrays_in_another_layout_are_sent_as_they_read():
    experts = np.asfortranarray(routed(0, 3).experts)
    sent = TokenOutput(
        token_ids=np.arange(6, dtype=np.int32)[::2],
        logprobs=-np.arange(6, dtype=np.float32)[::2],
        routed_experts=RoutedExperts(first_position=0, experts=experts),
        weights=WeightVersion(0, "d"),
        stop_reason=StopReason.STOP,
        replica="r",
    )
    same_segment(sent, decode_segment(encode_segment(sent), routing=SPEC))


def message():
    return encode_trajectory(trajectory(segment(3, rows=(0, 4)), routing=SPEC))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at, change):
    data = bytearray(message())
    data[at % len(data)] ^= change
    with pytest.raises(WireError):
        decode_trajectory(bytes(data), routing=SPEC)


@given(st.integers(0, 10**6))
def test_any_cut_is_noticed(length):
    data = message()
    with pytest.raises(WireError, match="it was cut"):
        decode_trajectory(data[: length % len(data)], routing=SPEC)
    with pytest.raises(WireError, match="it was cut"):
        decode_trajectory(data + b"\0", routing=SPEC)


def test_errors_say_what_is_wrong():
    data = message()
    with pytest.raises(WireError, match="message is a trajectory; a group is read here"):
        decode_group(data, routing=SPEC)
    with pytest.raises(WireError, match="message has format 9, this program reads 3"):
        decode_trajectory(data[:4] + struct.pack("<H", 9) + data[6:], routing=SPEC)
    with pytest.raises(WireError, match="it is no message of the queue"):
        decode_trajectory(b"\x80\x04" + data[2:], routing=SPEC)
    with pytest.raises(WireError, match="is damaged: its checksum is not"):
        decode_trajectory(data[:-1] + b"\xff", routing=SPEC)


def test_rows_of_another_model_are_refused():
    with pytest.raises(
        WireError, match=r"rows of \(moe_layers, top_k, num_experts\) \(2, 2, 8\); .* RoutingSpec has \(1, 3, 384\)"
    ):
        decode_trajectory(message(), routing=WIDE)
    with pytest.raises(WireError, match="RoutingSpec has None"):
        decode_trajectory(message(), routing=None)
    fewer = RoutingSpec(layers=SPEC.layers, num_experts=4, top_k=2)
    with pytest.raises(ContractError, match="the model has 4"):
        decode_segment(encode_segment(segment(3, rows=(0, 4))), routing=fewer)


def test_rows_of_two_models_do_not_share_a_message():
    other = trajectory(TokenOutput(**fields_of(segment(3)), routed_experts=routed(0, 4, spec=WIDE)), routing=WIDE)
    group = PromptGroup(
        group=0,
        prompt=0,
        admitted_version=0,
        admitted_update=0,
        trajectories=[trajectory(segment(3, rows=(0, 4)), routing=SPEC), other],
    )
    with pytest.raises(WireError, match="holds rows of one model"):
        encode_group(group)


def fields_of(made: TokenOutput):
    """All but the rows."""
    return {name: getattr(made, name) for name in ("token_ids", "logprobs", "weights", "stop_reason", "replica")}


# ---- delta rows

LARGE = RoutingSpec(layers=tuple(range(48)), num_experts=128, top_k=8)


def ten_turns_and_five_resumes(mode, *, spec=LARGE):
    """Each turn has 20 tokens given and 30 sampled; every second turn is cut by an update and resumed."""
    rng = np.random.default_rng(0)
    made = Trajectory(routing=spec, resume_routing=mode)
    version = 0
    for turn in range(10):
        made.observe(np.arange(20, dtype=np.int32))
        for part in (13, 17) if turn % 2 else (30,):
            version += part == 17
            first = made.num_rows if mode in ("append", "force") else 0
            count = len(made) + part - 1 - first
            experts = rng.random((count, *spec.row_shape[:1], spec.num_experts)).argsort(-1)[..., : spec.top_k]
            rows = RoutedExperts(first_position=first, experts=experts.astype(spec.dtype))
            made.extend(TokenOutput(**fields_of(segment(part, version=version)), routed_experts=rows))
    made.close(stop_reason=StopReason.STOP, reward=1.0)
    return made


@pytest.mark.parametrize("mode", ["append", "force", "replace"])
def test_ten_turns_and_five_resumes_carry_one_row_less_than_tokens(mode):
    sent = ten_turns_and_five_resumes(mode)
    assert (len(sent.turns), len(sent.segments), len(sent)) == (10, 15, 500)
    size = encoded_size(encode_trajectory(sent))
    assert size.num_rows == len(sent) - 1
    assert size.rows == 499 * 48 * 8


def test_split_sends_the_rows_of_every_training_sequence():
    spec = RoutingSpec(layers=(0, 1), num_experts=128, top_k=8)
    sent = ten_turns_and_five_resumes("split", spec=spec)  # every request brings other rows
    starts = np.cumsum([0, *(len(s) for s in sent.segments)])
    assert sent.sequence_starts == tuple(range(15))
    ends = [len(sequence) for sequence in sent.sequences()]
    assert encoded_size(encode_trajectory(sent)).num_rows == sum(ends) - len(ends)
    assert sum(int(s.loss_mask.sum()) for s in sent.sequences()) == starts[-1] == sent.num_sampled


def test_the_size_report_names_rows_and_floor():
    sent = ten_turns_and_five_resumes("append")
    plain, coded = (encoded_size(encode_trajectory(sent, rank_coded=ranked)) for ranked in (False, True))
    assert plain.rows_floor == coded.rows_floor == pytest.approx(499 * 48 * 40.377 / 8, rel=1e-4)
    assert (plain.rank_coded, coded.rank_coded) == (False, True)
    assert 1 <= coded.rows / coded.rows_floor <= 1.05
    assert "499 rows of 500 tokens, rank-coded: 246." in coded.report()
    assert "499 rows of 500 tokens, as they are: 384.00 bytes a row, floor 242.2" in plain.report()
    assert [line.split()[0] for line in plain.report().splitlines()[1:7]] == [
        "structure",
        "tokens",
        "logprobs",
        "support",
        "rows",
        "total",
    ]
    assert math.isnan(encoded_size(encode_segment(sent.segments[0])).rows_floor)


# ---- rank coding


@given(st.data(), st.sampled_from([SPEC, WIDE, None]))
def test_rank_coded_trajectories_come_back_but_for_the_order_within_the_top_k(data, spec):
    sent = data.draw(trajectories(spec=spec))
    got = decode_trajectory(encode_trajectory(sent, rank_coded=True), routing=spec)
    assert got.sequence_starts == sent.sequence_starts
    for one, other in zip(sent.sequences(), got.sequences(), strict=True):
        assert np.array_equal(one.row_versions, other.row_versions)
        if spec is not None:
            assert np.array_equal(np.sort(one.routed_experts, axis=-1), other.routed_experts)
    assert (got.num_rows, got.num_unavailable_rows) == (sent.num_rows, sent.num_unavailable_rows)
    same_trajectory(got, decode_trajectory(encode_trajectory(got), routing=spec))


def test_a_rank_coded_segment_needs_the_model():
    sent = segment(3, rows=(0, 4))
    with pytest.raises(WireError, match="needs the RoutingSpec; give `routing`"):
        encode_segment(sent, rank_coded=True)
    got = decode_segment(encode_segment(sent, routing=SPEC, rank_coded=True), routing=SPEC)
    assert np.array_equal(got.routed_experts.experts, np.sort(sent.routed_experts.experts, axis=-1))


def test_rows_of_a_model_with_more_experts_are_refused():
    more = RoutingSpec(layers=SPEC.layers, num_experts=16, top_k=2)
    for ranked in (False, True):
        data = encode_trajectory(trajectory(segment(3, rows=(0, 4)), routing=SPEC), rank_coded=ranked)
        with pytest.raises(WireError, match=r"\(2, 2, 8\); the receiver's RoutingSpec has \(2, 2, 16\)"):
            decode_trajectory(data, routing=more)
