"""The digest and the file transport."""

import pytest
import torch

from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import discard_updates, read_update, write_update

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def digest(tensors):
    total = WeightsDigest()
    for name, tensor in tensors.items():
        total.update(name, tensor)
    return total.hexdigest()


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


def test_written_update_reads_back_and_hashes_to_its_digest(tmp_path):
    tensors = TENSORS | {"not contiguous": TENSORS["a"].T}
    update = write_update(tmp_path, version=3, tensors=tensors.items())
    read = dict(read_update(update.path))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert update.weights.version == 3
    assert update.weights.digest == digest(read)


def test_write_update_that_fails_leaves_no_version(tmp_path):
    def broken():
        yield "a", TENSORS["a"]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError):
        write_update(tmp_path, version=1, tensors=broken())
    assert not list(tmp_path.glob("weights-*.safetensors"))


def test_discard_updates_removes_older_versions(tmp_path):
    for version in (9, 10, 11):
        write_update(tmp_path, version=version, tensors=TENSORS.items())
    discard_updates(tmp_path, keep_version=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights-10.safetensors", "weights-11.safetensors"]
