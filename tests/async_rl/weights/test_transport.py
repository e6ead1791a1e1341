"""The digest and the files of a version."""

import pytest
import torch
from safetensors.torch import save_file

from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import MANIFEST, UpdateError, discard_updates, update_files
from tests.helpers.updates import read_update, write_update

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


def test_write_update_that_fails_leaves_no_version(tmp_path):
    def broken():
        yield "a", TENSORS["a"]
        yield "b", TENSORS["b"]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError):
        write_update(tmp_path, version=1, tensors=broken(), bucket_bytes=1)
    with pytest.raises(UpdateError, match=r"weights-1 has no whole manifest"):
        list(read_update(tmp_path / "weights-1"))


def truncated(file):
    file.write_bytes(file.read_bytes()[:-1])


def missing(file):
    file.unlink()


def other_value(file):
    save_file({"b": TENSORS["b"] + 1}, file)


def other_dtype(file):
    save_file({"b": TENSORS["b"].view(torch.float16)}, file)


def other_shape(file):
    save_file({"b": TENSORS["b"].reshape(2, 2)}, file)


def other_name(file):
    save_file({"c": TENSORS["b"]}, file)


def swapped(file):
    file.write_bytes((file.parent / "bucket-00000.safetensors").read_bytes())


FAULTS = (truncated, missing, other_value, other_dtype, other_shape, other_name, swapped)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_damaged_bucket_is_reported_by_its_file(tmp_path, fault):
    update = write_update(tmp_path, version=1, tensors=TENSORS.items(), bucket_bytes=1)
    fault(update.path / "bucket-00001.safetensors")
    with pytest.raises(UpdateError, match="bucket-00001"):
        list(read_update(update.path))


def test_manifest_that_is_cut_is_refused(tmp_path):
    update = write_update(tmp_path, version=1, tensors=TENSORS.items())
    manifest = update.path / MANIFEST
    manifest.write_text(manifest.read_text()[:-3])
    with pytest.raises(UpdateError, match="manifest"):
        update_files(update.path)


def test_discard_updates_removes_older_versions(tmp_path):
    for version in (9, 10, 11):
        write_update(tmp_path, version=version, tensors=TENSORS.items())
    discard_updates(tmp_path, keep_version=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights-10", "weights-11"]
