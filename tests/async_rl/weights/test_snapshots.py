"""Buckets copied into buffers of the host, in turn, and the versions that a trainer rank keeps there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.weights.digest import digest_of
from async_rl.weights.group import tensors_of
from async_rl.weights.snapshots import HostCopy, Snapshots
from async_rl.weights.transport import UpdateError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def bucket(seed, sizes=((3, 5), (7,), (), (0, 4), (1, 1, 9))):
    """Tensors of several dtypes, not all contiguous."""
    chance = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 2, size, generator=chance).to(DTYPES[i % 5]) for i, size in enumerate(sizes)]
    return [(f"w{i}", tensor.mT if tensor.dim() == 2 else tensor) for i, tensor in enumerate(made)]


def assert_equal(found, given):
    assert [name for name, _ in found] == [name for name, _ in given]
    for (_, tensor), (_, other) in zip(found, given, strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other)
    assert digest_of(found).hexdigest() == digest_of(given).hexdigest()


@given(sizes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8))
def test_a_copy_has_the_tensors_and_can_be_read_from_its_bytes(sizes):
    given_tensors = bucket(0, sizes)
    before = bucket(0, sizes)
    copy = HostCopy().start(given_tensors)
    for _, tensor in given_tensors:
        tensor.zero_()
    assert_equal(copy.tensors(), before)
    assert_equal(tensors_of(copy.data.clone(), copy.layout), before)


def test_buffers_in_turn_keep_the_bucket_before_and_are_used_by_the_one_after():
    first, second = (HostCopy().start(bucket(seed)) for seed in (1, 2))
    memory = first.data.data_ptr()
    assert_equal(first.tensors(), bucket(1))
    third = first.start(bucket(3))
    assert third is first and third.data.data_ptr() == memory
    assert_equal(second.tensors(), bucket(2))
    assert_equal(third.tensors(), bucket(3))
    large = third.start(bucket(1, [(1000,), (2,)])).data.data_ptr()
    assert_equal(third.tensors(), bucket(1, [(1000,), (2,)]))
    assert_equal(third.start(bucket(2, [(10,)])).tensors(), bucket(2, [(10,)]))
    assert third.data.data_ptr() == large != memory and len(third.data) < 1000, "it grows for a larger bucket only"


def test_versions_stay_until_they_are_discarded_and_their_buffers_take_the_next_one():
    held = Snapshots()
    memory = [held.start(version, 3, bucket(version)).data.data_ptr() for version in (7, 8)]
    held.discard(keep_version=7)
    assert_equal(held.bucket("weights-7", 3).tensors(), bucket(7))
    held.discard(keep_version=8)
    with pytest.raises(UpdateError, match="no bucket 3 of weights-7"):
        held.bucket("weights-7", 3)
    assert held.start(9, 3, bucket(9)).data.data_ptr() == memory[0] != memory[1]
    assert_equal(held.bucket("weights-8", 3).tensors(), bucket(8))
    assert_equal(held.bucket("weights-9", 3).tensors(), bucket(9))
