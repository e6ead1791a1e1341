import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.weights.store import LocalStore, remove_unused
from async_rl.weights.transport import (
    MAX_DELTAS,
    Bases,
    Seat,
    UpdateError,
    WeightUpdate,
    base_of,
    discard_updates,
    finish_update,
    update_buckets,
    version_folder,
    write_bucket,
)
from message_queue.tokens import WeightVersion
from tests.helpers.updates import read_update

PATTERNS = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-40, -1.0])


class Owner:
    """Publishes versions of two buckets, each with a few values changed; keeps the tensors of all versions."""

    def __init__(self, directory, *, delta=True, seed=0):
        self.directory, self.bases = directory, Bases() if delta else None
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = [{"a": self.values(300, 7), "b": self.values(5)}, {"c": self.values(2000)}]
        self.versions = {}

    def values(self, *shape):
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def publish(self, version, *, changed=0.02):
        for tensors in self.weights:
            for name, tensor in tensors.items():
                where = torch.rand(tensor.shape, generator=self.generator) < changed
                new = PATTERNS[torch.randint(len(PATTERNS), tensor.shape, generator=self.generator)].to(tensor.dtype)
                tensors[name] = torch.where(where, new, tensor)
        folder = version_folder(self.directory, version)
        digests = [write_bucket(folder, i, tensors.items(), bases=self.bases) for i, tensors in enumerate(self.weights)]
        base = None if self.bases is None else self.bases.base_of_next()
        if self.bases is not None:
            self.bases.published(version)
        self.versions[version] = {name: t.clone() for tensors in self.weights for name, t in tensors.items()}
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


def test_store_brings_a_version_on_its_route(store, monkeypatch):
    calls = []
    for route in ("fetch", "download", "receive"):
        monkeypatch.setattr(store, route, lambda *given, route=route: calls.append((route, *given)))
    update, url = WeightUpdate(Path("weights-1"), WeightVersion(1, "a")), "s3://bucket/weights-1"
    seat = Seat(delivery="d", index=0, size=1, sources=(), backend="gloo", timeout_s=1.0)
    store.bring(update, None)
    store.bring(replace(update, url=url), None)
    store.bring(update, seat)
    assert calls == [("fetch", update.path), ("download", url), ("receive", update, seat)]


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


def test_versions_without_deltas_are_copied(tmp_path, store):
    owner = Owner(tmp_path / "shared", delta=False)
    for version in (1, 2):
        folder = owner.publish(version)
        assert files(folder) == ["bucket-00000.safetensors", "bucket-00001.safetensors", "manifest.json"]
        store.fetch(folder)
        check(store.local(folder), owner.versions[version])


def test_a_tensor_that_changed_much_travels_complete(owner, store):
    store.fetch(owner.publish(1))
    folder = owner.publish(2, changed=0.9)
    assert files(folder) == ["bucket-00000.delta", "bucket-00001.delta", "manifest.json"]
    store.fetch(folder)
    check(store.local(folder), owner.versions[2])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_or_missing_bucket_is_named_and_the_version_before_stays(owner, store, damage, version):
    folders = {v: owner.publish(v) for v in (1, 2)}
    if version == 2:
        store.fetch(folders[1])
    (bucket,) = folders[version].glob("bucket-00001.*")
    damage(bucket)
    with pytest.raises(UpdateError, match=bucket.name):
        store.fetch(folders[version])
    assert not store.local(folders[version]).exists()
    if version == 2:
        check(store.local(folders[1]), owner.versions[1])


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
def test_a_version_without_a_whole_manifest_is_refused(owner, store, damage):
    folder = owner.publish(1)
    damage(folder / "manifest.json")
    with pytest.raises(UpdateError, match="no whole manifest"):
        store.fetch(folder)


def test_a_delta_against_another_base_is_refused(tmp_path, owner, store):
    """Another run, or a run that was killed, wrote the same numbers of versions with other weights."""
    other = Owner(tmp_path / "other", seed=1)
    for each in (owner, other):
        each.publish(1)
    second = owner.publish(2)
    (second / "bucket-00000.delta").write_bytes((other.publish(2) / "bucket-00000.delta").read_bytes())
    with pytest.raises(UpdateError, match=r"bucket-00000\.delta.*wrong base"):
        store.fetch(second)


def test_a_version_that_a_killed_run_left_is_replaced(tmp_path, owner, store):
    other = Owner(tmp_path / "other", seed=1)
    store.fetch(other.publish(1))
    owner.publish(1)
    folder = owner.publish(2)
    store.fetch(folder)
    check(store.local(folder), owner.versions[2])


def test_a_trainer_that_restarted_publishes_a_complete_version(owner, store):
    store.fetch(owner.publish(1))
    owner.bases = Bases()
    folder = owner.publish(2)
    assert base_of(folder) is None
    store.fetch(folder)
    check(store.local(folder), owner.versions[2])


def test_replicas_of_a_node_read_a_bucket_once(owner, tmp_path, monkeypatch):
    from async_rl.weights import store as module

    folder, read = owner.publish(1), []
    read_bucket = module.read_bucket

    def counting(source, number, **options):
        read.append(number)
        return read_bucket(source, number, **options)

    monkeypatch.setattr(module, "read_bucket", counting)
    stores = [LocalStore(tmp_path / "node") for _ in range(4)]
    threads = [threading.Thread(target=store.fetch, args=(folder,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read) == [0, 1]
    assert update_buckets(stores[0].local(folder)) == update_buckets(folder)


def fetch_and_die(directory, folder):
    LocalStore(directory).fetch(folder)
    os._exit(1)


def test_the_last_process_removes_the_store_also_after_a_kill(owner, tmp_path):
    folder = owner.publish(1)
    process = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(tmp_path / "node", folder))
    process.start()
    process.join()
    store = LocalStore(tmp_path / "node")
    check(store.local(folder), owner.versions[1])
    store.fetch(folder)
    store.release()
    assert not (tmp_path / "node").exists()


def test_stores_of_killed_processes_are_removed_and_others_stay(owner, tmp_path):
    directories = [tmp_path / f"async_rl-weights-{name}" for name in ("killed", "used", "new")]
    folder = owner.publish(1)
    process = multiprocessing.get_context("fork").Process(target=fetch_and_die, args=(directories[0], folder))
    process.start()
    process.join()
    assert directories[0].is_dir()
    used = LocalStore(directories[1])
    (directories[2] / "users").mkdir(parents=True)
    remove_unused(tmp_path)
    assert [directory.is_dir() for directory in directories] == [False, True, True]
    used.fetch(folder)
    check(used.local(folder), owner.versions[1])
