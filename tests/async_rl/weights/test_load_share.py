"""Each rank of an engine loads all tensors and hashes its share; a replica finds each difference from the version."""

from itertools import islice

import pytest
import torch

from async_rl.inference.loads import RankLoad, difference, published_by
from async_rl.weights.checksum import value_sums
from async_rl.weights.digest import load_share, mapped
from async_rl.weights.transport import update_files
from tests.async_rl.weights.test_transport import FAULTS, TENSORS, missing, truncated
from tests.helpers.updates import write_update

MANY = {f"model.layers.{i}.w": torch.full((3,), float(i)) for i in range(7)}


def published(folder, tensors=MANY, bucket_bytes=24):
    """Two tensors in a bucket, the last bucket has one."""
    return write_update(folder, version=1, tensors=tensors.items(), bucket_bytes=bucket_bytes)


def loaded(update, *, ranks, take=lambda rank, tensors: list(tensors)):
    """What each rank's loader took, and the reports."""
    took, reports = [], []
    sums = {"sums": lambda tensor: [value_sums(tensor)]}
    for rank in range(ranks):
        tensors = mapped(update_files(update.path))
        report = load_share(tensors, lambda t, r=rank: took.append(take(r, t)), rank=rank, ranks=ranks, **sums)
        reports.append(RankLoad.of(report | {"parameters": {}}))
    return took, reports


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_bucket_is_hashed_by_one_rank_and_each_rank_loads_all(tmp_path, ranks):
    update = published(tmp_path)
    took, reports = loaded(update, ranks=ranks)
    assert all(set(dict(tensors)) == set(MANY) for tensors in took)
    assert all(torch.equal(tensor, MANY[name]) for tensors in took for name, tensor in tensors)
    assert sorted(number for report in reports for number in report.buckets) == [0, 1, 2, 3]
    assert difference(update, reports) is None
    assert published_by(reports) == {name: [value_sums(tensor)] for name, tensor in MANY.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("taken", [0, 3, 6])
def test_a_tensor_that_one_loader_skips_is_found(tmp_path, ranks, taken):
    update = published(tmp_path)
    for bad in range(ranks):
        reports = loaded(update, ranks=ranks, take=lambda r, t, bad=bad: list(islice(t, taken if r == bad else 7)))[1]
        assert difference(update, reports) is not None


def test_loaders_that_took_other_names_are_named(tmp_path):
    update = published(tmp_path, bucket_bytes=36)  # three buckets; rank 0 hashes the last
    _, reports = loaded(update, ranks=2, take=lambda rank, tensors: list(islice(tensors, 7 - rank)))
    assert "the loader of rank 1" in difference(update, reports)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS.values() if fault not in (truncated, missing)])
def test_a_damaged_bucket_is_named_with_its_rank(tmp_path, fault, ranks):
    update = published(tmp_path, TENSORS, bucket_bytes=1)
    fault(update.path / "bucket-00001.safetensors")
    found = difference(update, loaded(update, ranks=ranks)[1])
    assert f"rank {ranks - 1} " in found and "bucket 1 " in found and "bucket-00001" in found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [truncated, missing])
def test_a_file_that_is_cut_or_missing_is_named(tmp_path, fault, rank):
    files = update_files(published(tmp_path, TENSORS, bucket_bytes=1).path)
    fault(files[1])
    with pytest.raises(OSError, match="bucket-00001"):
        load_share(mapped(files), list, sums=value_sums, rank=rank, ranks=2)


def test_a_bucket_that_no_rank_has_hashed_or_that_was_not_published_is_named(tmp_path):
    update = published(tmp_path)
    _, (first, second) = loaded(update, ranks=2)
    assert "no rank" in difference(update, [first]) and "bucket 1 " in difference(update, [first])
    more = RankLoad({**second.buckets, 9: "ab"}, second.names, {}, {})
    assert "bucket 9 " in difference(update, [first, more])
