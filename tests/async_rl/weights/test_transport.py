"""The digest and the files of a version."""

import pytest
import torch
from safetensors.torch import save_file

from async_rl.weights.digest import digest_of
from async_rl.weights.transport import UpdateError, update_files
from tests.helpers.updates import read_update, write_update

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def digest(tensors):
    return digest_of(tensors.items()).hexdigest()


def test_weights_digest_does_not_depend_on_the_order():
    assert digest(TENSORS) == digest(dict(reversed(TENSORS.items())))


@pytest.mark.parametrize(
    "other",
    [
        {**TENSORS, "a": TENSORS["a"] + 1e-7},
        {**TENSORS, "a": TENSORS["a"].reshape(3, 2)},
        {"a": TENSORS["a"]},
        {"a": TENSORS["a"], "c": TENSORS["b"]},
        {**TENSORS, "b": TENSORS["b"].to(torch.float16)},
    ],
    ids=["value", "shape", "missing", "name", "dtype"],
)
def test_weights_digest_sees_every_difference(other):
    assert digest(other) != digest(TENSORS)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_weights_digest_is_of_the_values_not_of_their_strides(number):
    strided = torch.arange(8, dtype=torch.bfloat16)[::2][:number]
    assert digest({"a": strided}) == digest({"a": strided.clone()})


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20], ids=["one tensor", "two tensors", "all"])
def test_written_update_reads_back_and_hashes_to_its_digest(tmp_path, bucket_bytes):
    tensors = TENSORS | {"not contiguous": TENSORS["a"].T}
    update = write_update(tmp_path, version=3, tensors=tensors.items(), bucket_bytes=bucket_bytes)
    assert len(update_files(update.path)) == {1: 3, 40: 2, 1 << 20: 1}[bucket_bytes]
    read = dict(read_update(update.path))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert update.weights.version == 3
    assert update.weights.digest == digest(read)


def truncated(file):
    file.write_bytes(file.read_bytes()[:-1])


def missing(file):
    file.unlink()


def holding(name, tensor):
    """The file has another tensor."""
    return lambda file: save_file({name: tensor}, file)


FAULTS = {
    "truncated": truncated,
    "missing": missing,
    "value": holding("b", TENSORS["b"] + 1),
    "dtype": holding("b", TENSORS["b"].view(torch.float16)),
    "shape": holding("b", TENSORS["b"].reshape(2, 2)),
    "name": holding("c", TENSORS["b"]),
    "swapped": lambda file: file.write_bytes((file.parent / "bucket-00000.safetensors").read_bytes()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_damaged_bucket_is_reported_by_its_file(tmp_path, fault):
    update = write_update(tmp_path, version=1, tensors=TENSORS.items(), bucket_bytes=1)
    fault(update.path / "bucket-00001.safetensors")
    with pytest.raises(UpdateError, match="bucket-00001"):
        list(read_update(update.path))
