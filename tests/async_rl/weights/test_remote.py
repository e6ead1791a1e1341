"""Versions in an object store. Its stand-in is a driver of fsspec for local files. Tests make it fail or hang."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from async_rl.inference.replica import EngineReplica
from async_rl.trainer.export import VersionWriter
from async_rl.weights.overwrite import SHARED_MEMORY
from async_rl.weights.remote import RemoteError, driver_problem, list_names
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import MAX_DELTAS, Bases, UpdateError, base_of, remove_directory
from message_queue.errors import ReplicaLostError
from tests.async_rl.weights.test_store import Weights, check, files, flip, truncate


class PlantedStore(LocalFileSystem):
    protocol = "planted"
    calls: list[tuple[str, str]] = []  # noqa: RUF012 - (call, name of the object) of all instances
    failing = ("", "")
    hanging: threading.Event | None = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("planted://"))

    def plant(self, call, path):
        self.calls.append((call, Path(path).name))
        if self.failing[0] == call and self.failing[1] in path:
            if self.hanging is not None:
                self.hanging.wait()
            raise RuntimeError("the store is full")  # no OSError: drivers raise what their libraries do

    def put_file(self, file, path, **options):
        self.plant("put", path)
        super().put_file(file, path, **options)

    def get_file(self, path, file, **options):
        self.plant("get", path)
        super().get_file(path, file, **options)

    def rm(self, path, **options):
        self.plant("rm", path)
        super().rm(path, **options)


fsspec.register_implementation("planted", PlantedStore, clobber=True)


class Trainer(Weights):
    """A trainer of one rank that publishes two buckets."""

    def buckets(self):
        for number, tensors in enumerate(self.weights):
            yield SimpleNamespace(number=number), list(tensors.items())

    def publish(self, version, *, keep_version=0):
        self.change(version)
        groups = SimpleNamespace(device=torch.device("cpu"))
        writer = VersionWriter(self, groups, delta=False, host=None, direct=None)
        writer._bases = self.bases
        return writer.write(self.directory, version=version, keep_version=keep_version)


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def bucket(tmp_path):
    """Folder of the store on this machine."""
    return tmp_path / "store" / f"async_rl-weights-{tmp_path.name}"


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "node")


@pytest.fixture
def planted(bucket, monkeypatch):
    monkeypatch.setattr(PlantedStore, "calls", [])
    return Trainer(f"planted://{bucket}")


def fail(monkeypatch, call, name, *, hanging=None):
    monkeypatch.setattr(PlantedStore, "failing", (call, name))
    monkeypatch.setattr(PlantedStore, "hanging", hanging)


def of_upload(bucket):
    return list(SHARED_MEMORY.glob(f"{bucket.name}*"))


def test_twenty_versions_arrive_bit_by_bit_and_old_ones_are_removed(bucket, store, tmp_path):
    trainer = Trainer(f"file://{bucket}")
    for version in range(1, 21):
        update = trainer.publish(version, keep_version=version - 1)
        store.download(update.url)
        check(store.local(update.path), trainer.versions[version])
        assert not (tmp_path / "node" / "downloads").exists() and not of_upload(bucket)
    first = MAX_DELTAS + 2  # the complete version before 19
    assert sorted(list_names(trainer.directory)) == [f"weights-{v}" for v in range(first, 21)]
    late = LocalStore(tmp_path / "late")
    late.download(update.url)
    check(late.local(update.path), trainer.versions[20])
    remove_directory(trainer.directory)
    assert not bucket.exists()
    remove_directory(trainer.directory)


def test_the_manifest_is_uploaded_last_and_a_version_goes_also_if_it_is_missing(planted, bucket):
    planted.bases = None
    for version in (1, 2, 3):
        planted.publish(version)
    puts = [name for call, name in PlantedStore.calls if call == "put"]
    assert puts == ["bucket-00000.safetensors", "bucket-00001.safetensors", "manifest.json"] * 3
    for version in (1, 3):
        (bucket / f"weights-{version}" / "manifest.json").unlink()
    planted.publish(4, keep_version=3)
    assert files(bucket) == ["weights-3", "weights-4"]


@pytest.mark.parametrize(
    ("call", "name", "delta"),
    [
        ("put", "bucket-00001.delta", True),
        ("put", "manifest.json", True),
        ("get", "weights-2/manifest.json", True),
        ("rm", "weights-1", False),
    ],
)
def test_a_call_that_the_store_refuses_fails_the_publish(call, name, delta, planted, bucket, monkeypatch):
    planted.bases = Bases() if delta else None
    for version in (1, 2):
        planted.publish(version)
    fail(monkeypatch, call, name)
    with pytest.raises(RemoteError, match=rf"planted://.*{name}.*the store is full"):
        planted.publish(3, keep_version=2)
    assert not of_upload(bucket)
    assert not (bucket / "weights-3" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("bucket-00001.safetensors", damage) for damage in (truncate, flip, Path.unlink)),
        *(("manifest.json", damage) for damage in (truncate, Path.unlink)),
    ],
)
def test_a_damaged_or_missing_object_is_named(planted, bucket, store, name, damage):
    update = planted.publish(1)
    damage(bucket / "weights-1" / name)
    with pytest.raises((UpdateError, RemoteError), match=rf"planted://.*weights-1.*{name.split('.')[0]}"):
        store.download(update.url)
    assert not store.local(update.path).exists()
    assert not (store.local(update.path).parent / "downloads").exists()


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        (False, r"version 1 did not come.*planted://.*bucket-00001.*the store is full"),
        (True, r"planted://.*bucket-00001.*load_timeout_s=0.2"),
    ],
)
async def test_a_replica_whose_download_fails_or_hangs_is_lost(hangs, said, planted, store, monkeypatch):
    update, gate = planted.publish(1), threading.Event()
    fail(monkeypatch, "get", "bucket-00001", hanging=gate if hangs else None)
    replica = object.__new__(EngineReplica)
    replica.name, replica.store, replica.followers = "replica-0", store, ()
    replica._config = SimpleNamespace(load_timeout_s=0.2 if hangs else 30.0)
    try:
        with pytest.raises(ReplicaLostError, match=said):
            await replica.fetch(update)
    finally:
        gate.set()
        await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize(("url", "names"), [("absent://bucket/prefix", "s3fs"), ("nothing://bucket", "nothing://")])
def test_a_url_without_a_driver_has_a_problem(url, names, monkeypatch):
    driver = {"class": "absent_s3fs.S3FileSystem", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(known_implementations, "absent", driver)
    assert names in driver_problem(url)
    assert driver_problem("file:///tmp") == ""


def test_a_late_node_names_the_object_of_a_base_that_is_missing(planted, bucket, store):
    planted.publish(1)
    update = planted.publish(2)
    assert base_of(bucket / "weights-2") == bucket / "weights-1"
    (bucket / "weights-1" / "bucket-00000.safetensors").unlink()
    with pytest.raises(RemoteError, match=r"weights-1/bucket-00000\.safetensors"):
        store.download(update.url)
