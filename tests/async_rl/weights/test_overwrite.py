"""Files of a removed version that the next one overwrites: no reader sees a change, and no version is a mixture."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.weights import overwrite
from async_rl.weights.digest import WeightsDigest, digest_of
from async_rl.weights.overwrite import SHARED_MEMORY, MappedFiles
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import (
    UpdateError,
    discard_updates,
    finish_update,
    read_tensors,
    update_files,
    version_folder,
    write_bucket,
)
from tests.helpers.updates import read_update, write_update


@pytest.fixture
def memory():
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield Path(directory)


def model(version, *, rows=3):
    return {
        "a": torch.full((rows, 5000), float(version), dtype=torch.bfloat16),
        "b": torch.arange(7) + version,
        "c": torch.full((2, 2), version / 3),
        "none": torch.empty(0, 4),
        "one": torch.tensor(float(version)),
    }


def publish(directory, version, tensors, *, keep_version, files=None):
    discard_updates(directory, keep_version=keep_version, spare_for=version_folder(directory, version))
    return write_update(directory, version=version, tensors=tensors.items(), bucket_bytes=100, files=files)


def check(folder, tensors):
    found = dict(read_update(folder))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def inodes(folder):
    return [path.stat().st_ino for path in update_files(folder)]


@pytest.mark.parametrize("files", [None, MappedFiles()], ids=["mapped each time", "kept mapped"])
def test_a_version_overwrites_the_files_of_the_removed_one(memory, files):
    used = {}
    for version in range(6):
        update = publish(memory, version, model(version), keep_version=version - 1, files=files)
        check(update.path, model(version))
        assert update.weights.digest == digest_of(model(version).items()).hexdigest()
        used[version] = inodes(update.path)
        assert used[version] == used.get(version - 2, used[version])
        assert not list(memory.rglob("*.spare"))
    assert used[4] != used[5]


changes = st.tuples(
    st.integers(1, 2),  # rows of a tensor
    st.booleans(),  # a reader keeps the version open
    st.integers(0, 3),  # how far the removal of old versions is behind
)


@settings(max_examples=40, deadline=None)
@given(st.lists(changes, min_size=3, max_size=8), st.booleans())
def test_tensors_of_a_reader_never_change(versions, keeps_mappings):
    files, kept = MappedFiles() if keeps_mappings else None, []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        for version, (rows, reads, behind) in enumerate(versions):
            tensors = model(version, rows=rows)
            folder = publish(Path(directory), version, tensors, keep_version=version - behind, files=files).path
            check(folder, tensors)
            if reads:
                kept.append((tensors, dict(read_update(folder))))
            for published, held in kept:
                assert all(torch.equal(held[name], tensor) for name, tensor in published.items())


def hold(path, pipe):
    held = dict(read_tensors(path))
    pipe.send("ready")
    pipe.recv()
    pipe.send({name: tensor.tolist() for name, tensor in held.items()})


def test_tensors_of_another_process_never_change(memory):
    publish(memory, 0, model(0), keep_version=0)
    first = update_files(version_folder(memory, 0))[0]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(first, there))
    process.start()
    assert here.poll(60) and here.recv() == "ready"
    before = inodes(first.parent)
    update = publish(memory, 1, model(1), keep_version=1)
    here.send("published")
    assert here.recv() == {"a": model(0)["a"].tolist()}
    process.join()
    check(update.path, model(1))
    after = inodes(update.path)
    assert after[0] != before[0] and after[1:] == before[1:]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_writer_that_is_killed_leaves_no_mixture(memory, monkeypatch, at):
    for version in (0, 1):
        publish(memory, version, model(version), keep_version=0)
    pid = os.fork()
    if pid == 0:
        update, copies = WeightsDigest.update, []

        def dying(digest, name, tensor, *, copy_to=None):
            copies.append(name)
            if len(copies) > at:
                copy_to[: len(copy_to) // 2] = 7
                os._exit(9)
            update(digest, name, tensor, copy_to=copy_to)

        monkeypatch.setattr(WeightsDigest, "update", dying)
        try:
            publish(memory, 2, model(2), keep_version=1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with pytest.raises(UpdateError, match="no whole manifest"):
        list(read_update(version_folder(memory, 2)))
    check(version_folder(memory, 1), model(1))
    for version in (2, 3):
        check(publish(memory, version, model(version), keep_version=version - 1).path, model(version))
    assert sorted(path.name for path in memory.iterdir()) == ["weights-2", "weights-3"]


def test_a_reader_of_a_removed_version_gets_that_version_or_an_error(memory):
    folder = publish(memory, 0, model(0), keep_version=0).path
    reading = read_update(folder)
    seen = dict([next(reading)])
    publish(memory, 1, model(1), keep_version=1)
    try:
        seen |= reading
    except UpdateError as error:
        assert "weights-0" in str(error)
    assert all(torch.equal(tensor, model(0)[name]) for name, tensor in seen.items())
    with pytest.raises(UpdateError, match="no whole manifest"):
        list(read_update(folder))


OTHERS = {
    "dtype": lambda tensors: tensors | {"b": tensors["b"].to(torch.float64)},
    "shape": lambda tensors: tensors | {"c": tensors["c"].reshape(4)},
    "name": lambda tensors: {"x" if name == "b" else name: tensor for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("change", [*OTHERS.values(), None], ids=[*OTHERS, "no leases"])
def test_a_bucket_with_other_tensors_or_without_leases_gets_a_new_file(memory, monkeypatch, change):
    def refuse(*args):
        raise OSError(22, "Invalid argument")

    before, tensors = inodes(publish(memory, 0, model(0), keep_version=0).path), model(1)
    if change is None:
        monkeypatch.setattr(overwrite.fcntl, "fcntl", refuse)
    else:
        tensors = change(tensors)
    update = publish(memory, 1, tensors, keep_version=1)
    check(update.path, tensors)
    new = [now != then for now, then in zip(inodes(update.path), before, strict=True)]
    assert new.count(True) == (len(before) if change is None else 1)


@pytest.mark.parametrize("size", [0, 3, 60])
def test_a_damaged_file_of_a_removed_version_is_not_overwritten(memory, size):
    files = MappedFiles()
    for version in range(3):
        folder = publish(memory, version, model(version), keep_version=version - 1, files=files).path
    for path in update_files(folder):
        os.truncate(path, size)
    check(publish(memory, 3, model(3), keep_version=3, files=files).path, model(3))


def test_spare_files_that_a_version_does_not_need_are_removed(memory):
    write_update(memory, version=0, tensors=model(0).items(), bucket_bytes=1)
    discard_updates(memory, keep_version=1, spare_for=version_folder(memory, 1))
    folder = version_folder(memory, 1)
    finish_update(folder, version=1, buckets=[write_bucket(folder, 0, model(1).items())])
    assert sorted(path.name for path in folder.iterdir()) == ["bucket-00000.safetensors", "manifest.json"]


def test_memory_of_a_deleted_file_is_free_after_the_next_write(memory):
    files = MappedFiles()
    for version in range(4):
        publish(memory, version, model(version), keep_version=version - 1, files=files)
    discard_updates(memory, keep_version=4)
    publish(memory, 4, {"other": torch.ones(3)}, keep_version=4, files=files)
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(memory) in line]


def test_files_on_a_disk_are_not_overwritten(tmp_path):
    if tmp_path.stat().st_dev == SHARED_MEMORY.stat().st_dev:
        pytest.skip("the temporary directory is in shared memory")
    publish(tmp_path, 0, model(0), keep_version=0)
    discard_updates(tmp_path, keep_version=1, spare_for=version_folder(tmp_path, 1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held_version", [None, 1, 2])
def test_a_node_overwrites_the_files_of_removed_versions(memory, tmp_path, held_version):
    store, used, held = LocalStore(memory / "node"), {}, {}
    for version in range(5):
        folder = publish(tmp_path, version, model(version), keep_version=version).path
        store.fetch(folder)
        check(store.local(folder), model(version))
        used[version] = inodes(store.local(folder))
        if version == held_version:
            held = dict(read_update(store.local(folder)))
        assert all(torch.equal(tensor, model(held_version)[name]) for name, tensor in held.items())
    shared = {version for version in range(2, 5) if used[version] == used[version - 2]}
    assert shared == {2, 3, 4} - ({held_version + 2} if held_version else set())
    store.release()
    assert not (memory / "node").exists()
