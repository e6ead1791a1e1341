import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from async_rl.weights import store as module
from async_rl.weights.store import LocalStore, remove_unused
from async_rl.weights.transport import (
    MAX_DELTAS,
    Bases,
    UpdateError,
    base_of,
    discard_updates,
    finish_update,
    update_buckets,
    version_folder,
    write_bucket,
)
from tests.helpers.updates import read_update

PATTERNS = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-40, -1.0])


class Weights:
    """Tensors of two buckets, of which a few values change with each version; keeps those of all versions."""

    def __init__(self, directory, *, delta=True, seed=0):
        self.directory, self.bases = directory, Bases() if delta else None
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = [{"a": self.values(300, 7), "b": self.values(5)}, {"c": self.values(2000)}]
        self.versions = {}

    def values(self, *shape):
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def change(self, version, *, changed=0.02):
        for tensors in self.weights:
            for name, tensor in tensors.items():
                where = torch.rand(tensor.shape, generator=self.generator) < changed
                new = PATTERNS[torch.randint(len(PATTERNS), tensor.shape, generator=self.generator)].to(tensor.dtype)
                tensors[name] = torch.where(where, new, tensor)
        self.versions[version] = {name: t.clone() for tensors in self.weights for name, t in tensors.items()}


class Owner(Weights):
    """Publishes versions into a folder."""

    def publish(self, version, *, changed=0.02):
        self.change(version, changed=changed)
        folder = version_folder(self.directory, version)
        digests = [write_bucket(folder, i, tensors.items(), bases=self.bases) for i, tensors in enumerate(self.weights)]
        base = None if self.bases is None else self.bases.base_of_next()
        if self.bases is not None:
            self.bases.published(version)
        finish_update(folder, version=version, buckets=digests, base=base)
        return folder


def check(folder, tensors):
    found = dict(read_update(folder))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.fixture
def owner(tmp_path):
    return Owner(tmp_path / "shared")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "node")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_fifty_versions_arrive_bit_by_bit_and_one_is_kept(owner, store):
    sizes = {}
    for version in range(1, 51):
        folder = owner.publish(version)
        sizes[version] = sum(path.stat().st_size for path in folder.glob("bucket-*"))
        store.fetch(folder)
        check(store.local(folder), owner.versions[version])
        discard_updates(owner.directory, keep_version=version)
        assert [path.name for path in store.local(folder).parent.glob("weights-*")] == [folder.name]
    complete = [version for version in sizes if (version - 1) % (MAX_DELTAS + 1) == 0]
    for version, size in sizes.items():
        assert (size == sizes[1]) if version in complete else (size < sizes[1] / 3)


def test_a_node_that_comes_late_goes_through_the_versions_that_are_kept_for_it(owner, store):
    for version in range(1, 2 * MAX_DELTAS):
        folder = owner.publish(version)
        discard_updates(owner.directory, keep_version=version)
    kept = {path.name for path in owner.directory.iterdir()}
    assert kept == {f"weights-{v}" for v in range(MAX_DELTAS + 2, 2 * MAX_DELTAS)}
    store.fetch(folder)
    check(store.local(folder), owner.versions[2 * MAX_DELTAS - 1])


@pytest.mark.parametrize(("delta", "changed", "suffix"), [(False, 0.02, "safetensors"), (True, 0.9, "delta")])
def test_versions_without_deltas_and_tensors_that_changed_much_travel_complete(tmp_path, store, delta, changed, suffix):
    owner = Owner(tmp_path / "shared", delta=delta)
    for version in (1, 2):
        folder = owner.publish(version, changed=changed)
        store.fetch(folder)
        check(store.local(folder), owner.versions[version])
    assert files(folder) == [f"bucket-00000.{suffix}", f"bucket-00001.{suffix}", "manifest.json"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        *(("bucket-00001.*", damage, "bucket-00001") for damage in (truncate, flip, Path.unlink)),
        *(("manifest.json", damage, "no whole manifest") for damage in (truncate, Path.unlink)),
    ],
)
def test_a_damaged_or_missing_file_is_named_and_the_version_before_stays(owner, store, name, damage, said, version):
    folders = {v: owner.publish(v) for v in (1, 2)}
    if version == 2:
        store.fetch(folders[1])
    (file,) = folders[version].glob(name)
    damage(file)
    with pytest.raises(UpdateError, match=said):
        store.fetch(folders[version])
    assert not store.local(folders[version]).exists()
    if version == 2:
        check(store.local(folders[1]), owner.versions[1])


def test_a_delta_against_another_base_is_refused(tmp_path, owner, store):
    """Another run, or a run that was killed, wrote the same numbers of versions with other weights."""
    other = Owner(tmp_path / "other", seed=1)
    for each in (owner, other):
        each.publish(1)
    second = owner.publish(2)
    (second / "bucket-00000.delta").write_bytes((other.publish(2) / "bucket-00000.delta").read_bytes())
    with pytest.raises(UpdateError, match=r"bucket-00000\.delta.*wrong base"):
        store.fetch(second)


@pytest.mark.parametrize("before", ["of a killed run", "of a trainer that restarted"])
def test_a_version_that_was_there_before_a_restart_is_no_base(tmp_path, owner, store, before):
    if before == "of a killed run":
        store.fetch(Owner(tmp_path / "other", seed=1).publish(1))
        owner.publish(1)
    else:
        store.fetch(owner.publish(1))
        owner.bases = Bases()
    folder = owner.publish(2)
    assert (base_of(folder) is None) == (before == "of a trainer that restarted")
    store.fetch(folder)
    check(store.local(folder), owner.versions[2])


def test_replicas_of_a_node_read_a_bucket_once(owner, tmp_path, monkeypatch):
    folder, read = owner.publish(1), []
    read_bucket = module.read_bucket

    def counting(source, number, **options):
        read.append(number)
        return read_bucket(source, number, **options)

    monkeypatch.setattr(module, "read_bucket", counting)
    stores = [LocalStore(tmp_path / "node") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda store: store.fetch(folder), stores))
    assert sorted(read) == [0, 1]
    assert update_buckets(stores[0].local(folder)) == update_buckets(folder)


def fetch_and_die(directory, folder):
    """In another process."""

    def work():
        LocalStore(directory).fetch(folder)
        os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()


def test_the_last_process_removes_the_store_also_after_a_kill(owner, tmp_path):
    folder = owner.publish(1)
    fetch_and_die(tmp_path / "node", folder)
    store = LocalStore(tmp_path / "node")
    check(store.local(folder), owner.versions[1])
    store.fetch(folder)
    store.release()
    assert not (tmp_path / "node").exists()


def test_stores_of_killed_processes_are_removed_and_others_stay(owner, tmp_path):
    directories = [tmp_path / f"async_rl-weights-{name}" for name in ("killed", "used", "new")]
    folder = owner.publish(1)
    fetch_and_die(directories[0], folder)
    assert directories[0].is_dir()
    used = LocalStore(directories[1])
    (directories[2] / "users").mkdir(parents=True)
    remove_unused(tmp_path)
    assert [directory.is_dir() for directory in directories] == [False, True, True]
    used.fetch(folder)
    check(used.local(folder), owner.versions[1])
