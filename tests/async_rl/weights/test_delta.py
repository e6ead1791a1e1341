"""Deltas of a bucket: exact bits, small size, and refusal of a wrong base or of damaged data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.weights.delta import DeltaError, decode, encode
from async_rl.weights.digest import digest_of
from benchmarks.publishes import adam_versions, change_entropy

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (0,), (1,), (2, 0, 3), (5,), (3, 7), (300,), (4, 5, 50)]


def from_bits(bits, dtype, shape):
    """Tensor of uint8 [bytes]."""
    if dtype is torch.bool:
        bits = bits & 1
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(bits))
    return tensor


def same_bits(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def both_ways(tensors, base):
    """Encode and decode; returns the encoded bytes."""
    digest = digest_of(base.items()).hexdigest()
    data = encode(tensors, base=base, base_digest=digest)
    decoded = decode(data, base=base, base_digest=digest)
    assert [name for name, _ in decoded] == [name for name, _ in tensors]
    assert all(same_bits(got, sent) for (_, got), (_, sent) in zip(decoded, tensors, strict=True))
    assert digest_of(base.items()).hexdigest() == digest, "the base is not modified"
    return data


@st.composite
def buckets(draw):
    """(tensors, base) with random bit patterns; a part of each tensor changes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors, base = [], {}
    for number in range(draw(st.integers(0, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        old = random.integers(0, 256, (int(np.prod(shape)), dtype.itemsize), np.uint8)
        changed = random.random(len(old)) < draw(st.sampled_from([0, 0.01, 0.1, 0.3, 0.5, 1]))
        new = np.where(changed[:, None], random.integers(0, 256, old.shape, np.uint8), old)
        base[f"t{number}"] = from_bits(old.reshape(-1), dtype, shape)
        tensors.append((f"t{number}", from_bits(new.reshape(-1), dtype, shape)))
    return draw(st.permutations(tensors)), base


@given(buckets())
def test_delta_keeps_every_bit_of_any_dtype(bucket):
    both_ways(*bucket)


@pytest.mark.parametrize("every", [254, 255, 256, 257, 510, 511, 512, 65_537, 1_000_003])
def test_delta_keeps_gaps_of_any_length(every):
    old = torch.zeros((1 << 21) + 5, dtype=torch.uint8)
    new = old.clone()
    new[::every] = 1
    new[-1] = 200
    both_ways([("a", new)], {"a": old})


def test_delta_of_strided_tensors_is_that_of_their_values():
    old = torch.arange(24.0).reshape(4, 6).t()
    new = old.clone()
    new[1, 2] = -1.0
    assert not new.is_contiguous()
    both_ways([("a", new)], {"a": old})
    one, other = torch.arange(10.0)[::5][:1], torch.arange(1.0, 11.0)[::5][:1]
    assert one.stride() == (5,)
    data = encode([("a", other), ("b", one)], base={"a": one, "b": one}, base_digest="x")
    assert [value.tolist() for _, value in decode(data, base={"a": one, "b": one}, base_digest="x")] == [[1.0], [0.0]]


def test_decoded_tensors_have_memory_of_their_own():
    base = {"a": torch.zeros(4), "b": torch.zeros(4)}
    data = encode([("a", torch.ones(4)), ("b", base["b"])], base=base, base_digest="x")
    for _, tensor in decode(data, base=base, base_digest="x"):
        tensor += 1
    assert [t.sum().item() for _, t in decode(data, base=base, base_digest="x")] == [4, 0]
    assert base["b"].sum() == 0


@pytest.mark.parametrize(("changed", "is_dense"), [(0, False), (1000, False), (1001, True), (3000, True)])
def test_tensor_is_dense_if_more_than_a_third_changed(changed, is_dense):
    old = torch.randn(3000).bfloat16()
    new = old.clone()
    new[:changed] *= -1
    data = both_ways([("a", new), ("b", old)], {"a": old, "b": old})
    assert (new.view(torch.uint8).numpy().tobytes() in data) == is_dense
    assert (len(data) > new.nbytes) == is_dense
    assert changed or len(data) < 200


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_chain_of_50_versions_is_exact_and_close_to_its_entropy(lr):
    """The tensor is cut in two unequal ones, as a bucket has many."""
    cut = 1 << 15
    old, *versions = adam_versions(1 << 17, lr=lr, versions=50)
    held = {"a": old[:cut], "b": old[cut:]}
    for new in versions:
        digest = digest_of(held.items()).hexdigest()
        tensors = [("a", new[:cut]), ("b", new[cut:])]
        data = encode(tensors, base=held, base_digest=digest)
        entropy = sum(change_entropy(held[name], tensor) for name, tensor in tensors)
        assert len(data) <= 1.3 * entropy
        held = dict(decode(data, base=held, base_digest=digest))
    assert same_bits(torch.cat([held["a"], held["b"]]), versions[-1])


@pytest.fixture(scope="module")
def encoded():
    """(data, base) with an unchanged, a sparse and a dense tensor."""
    random = torch.Generator().manual_seed(0)
    base = {name: torch.randn(200, generator=random).bfloat16() for name in ("same", "sparse", "dense")}
    sparse = base["sparse"].clone()
    sparse[::10] *= 1.01
    sparse[5] = -1e30
    tensors = [("same", base["same"]), ("sparse", sparse), ("dense", -base["dense"])]
    return encode(tensors, base=base, base_digest="ab" * 16), base


def test_decode_refuses_another_base(encoded):
    data, base = encoded
    with pytest.raises(DeltaError, match="wrong base"):
        decode(data, base=base, base_digest="ac" * 16)


@pytest.mark.parametrize("other", [torch.zeros(200), torch.zeros(100, dtype=torch.bfloat16), None])
@pytest.mark.parametrize("name", ["same", "sparse", "dense"])
def test_decode_refuses_a_base_without_the_tensor(encoded, name, other):
    data, base = encoded
    less = {key: tensor for key, tensor in base.items() if key != name} | ({} if other is None else {name: other})
    with pytest.raises(DeltaError, match=name):
        decode(data, base=less, base_digest="ab" * 16)


@pytest.mark.parametrize("other", [torch.zeros(6, 2), torch.zeros(12), torch.zeros(3, 4, dtype=torch.int32), None])
def test_encode_refuses_a_tensor_that_the_base_has_in_another_form(other):
    base = {} if other is None else {"a": other}
    with pytest.raises(ValueError, match=r"a is .*float32"):
        encode([("a", torch.zeros(3, 4))], base=base, base_digest="x")


def test_decode_refuses_data_truncated_or_longer(encoded):
    data, base = encoded
    for damaged in (*(data[:length] for length in range(len(data))), data + b"\0"):
        with pytest.raises(DeltaError):
            decode(damaged, base=base, base_digest="ab" * 16)


def test_decode_refuses_a_flip_of_any_byte(encoded):
    data, base = encoded
    for place in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(DeltaError):
                decode(bytes(damaged), base=base, base_digest="ab" * 16)
