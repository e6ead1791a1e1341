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
from tests.unit.groups import SPEC, routed, segment, trajectory

WIDE = RoutingSpec(layers=(2,), num_experts=384, top_k=3)
logprobs = st.floats(-(2.0**60), 0.0, width=32, allow_subnormal=False)


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
    )


@st.composite
def trajectories(draw, *, spec=SPEC):
    made = Trajectory(routing=spec)
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
    sent = data.draw(trajectories(spec=spec))
    size = encoded_size(encode_trajectory(sent))
    layers, top_k = spec.row_shape
    available = sent.num_rows - sent.num_unavailable_rows
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
    with pytest.raises(WireError, match="message has format 9, this program reads 1"):
        decode_trajectory(data[:4] + struct.pack("<H", 9) + data[6:], routing=SPEC)
    with pytest.raises(WireError, match="it is no message of the queue"):
        decode_trajectory(b"\x80\x04" + data[2:], routing=SPEC)
    with pytest.raises(WireError, match="is damaged: its checksum is not"):
        decode_trajectory(data[:-1] + b"\xff", routing=SPEC)


def test_rows_of_another_model_are_refused():
    with pytest.raises(WireError, match=r"routing rows of \(moe_layers, top_k\) \(2, 2\); .* RoutingSpec has \(1, 3\)"):
        decode_trajectory(message(), routing=WIDE)
    with pytest.raises(WireError, match="RoutingSpec has None"):
        decode_trajectory(message(), routing=None)
    fewer = RoutingSpec(layers=SPEC.layers, num_experts=4, top_k=2)
    with pytest.raises(ContractError, match="the model has 4"):
        decode_segment(encode_segment(segment(3, rows=(0, 4))), routing=fewer)


def test_rows_of_two_widths_do_not_share_a_message():
    wide = RoutedExperts(first_position=4, experts=routed(4, 7).experts.astype(np.uint16))
    mixed = Trajectory(routing=SPEC)
    mixed.observe(np.arange(2, dtype=np.int32))
    mixed.extend(segment(3, rows=(0, 4)))
    after = segment(3)
    mixed.extend(
        TokenOutput(
            token_ids=after.token_ids,
            logprobs=after.logprobs,
            routed_experts=wide,
            weights=after.weights,
            stop_reason=after.stop_reason,
            replica=after.replica,
        )
    )
    with pytest.raises(WireError, match="need one shape"):
        encode_trajectory(mixed)
