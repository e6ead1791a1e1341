"""A run directory has one owner, whose lock ends with its process and is seen by every path."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from async_rl.files.owner import LOCK, identity, living_owner, owned


@contextlib.contextmanager
def owner_process(directory):
    """A process that owns `directory`, and the ids of its children: one forked, one executed."""
    command = [sys.executable, "-m", "tests.helpers.owners", "hold", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in process.stdout.readline().split()]
    try:
        yield process, children
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def owned_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    with owner_process(directory) as (process, _):
        yield directory, process.pid


@pytest.mark.parametrize("spelling", ["{0}", "{0}/../{1}", "{0}/link"])
def test_a_second_owner_is_refused_with_host_process_and_way_out(owned_directory, spelling):
    directory, pid = owned_directory
    with contextlib.suppress(FileExistsError):
        (directory / "link").symlink_to(directory)
    before = (directory / LOCK).read_text()
    path = type(directory)(spelling.format(directory, directory.name))
    with pytest.raises(ValueError, match="output_dir") as refused, owned(path):
        pass
    for part in (f"process {pid}", socket.gethostname(), "give another output_dir"):
        assert part in str(refused.value)
    assert (directory / LOCK).read_text() == before
    assert f"{pid}" in living_owner(path)


def test_the_lock_of_a_killed_owner_is_free_though_its_children_live(tmp_path):
    with owner_process(tmp_path) as (process, children):
        process.kill()
        process.wait()
        assert all(os.path.exists(f"/proc/{pid}") for pid in children)  # noqa: PTH110
        assert living_owner(tmp_path) is None
        with owned(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_an_identity_stays_over_starts_and_differs_between_directories(tmp_path):
    seen = []
    for name in ("a", "b", "a"):
        assert living_owner(tmp_path / name) is None, "before, between and after"
        with owned(tmp_path / name):
            assert living_owner(tmp_path / name) is None, "the owner itself is no other one"
            (tmp_path / name / "metrics.jsonl").touch()
            seen.append(identity(tmp_path / name))
    assert seen[0] == seen[2] != seen[1]
    assert identity(tmp_path / "absent") == ""


def test_a_damaged_lock_file_is_no_obstacle(tmp_path):
    for content in (b"", b"3\n", b"\xff{", b'{"pid": 1}\nrest'):
        (tmp_path / LOCK).write_bytes(content)
        with owned(tmp_path):
            assert identity(tmp_path)


def test_a_directory_without_writes_is_removed(tmp_path):
    with owned(tmp_path / "outputs" / "run"):
        assert (tmp_path / "outputs" / "run").is_dir()
    assert not list(tmp_path.iterdir())
    with owned(tmp_path / "outputs" / "run"):
        (tmp_path / "outputs" / "run" / "config.yaml").touch()
    assert (tmp_path / "outputs" / "run" / "config.yaml").exists()
    (tmp_path / "empty").mkdir()
    with owned(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match="output_dir") as refused, owned(tmp_path):
        pass
    assert os.strerror(number) in str(refused.value) and "flock" in str(refused.value)


def own_once(directory, event):
    """Own the directory for a moment."""
    try:
        with owned(directory):
            with (directory / "inside").open("x"):
                event.wait(0.05)  # so that others try meanwhile
            (directory / "inside").unlink()
    except FileExistsError:
        return "two at once"
    except ValueError:
        return "refused"
    return "owned"


def test_of_many_starts_at_once_one_owns_the_directory(tmp_path):
    with ThreadPoolExecutor(4) as pool:  # a lock is of an open file, not of a process
        outcomes = set(pool.map(own_once, [tmp_path / "run"] * 8, [threading.Event()] * 8))
    assert "two at once" not in outcomes and "owned" in outcomes


def test_a_lock_file_that_is_removed_while_it_is_opened_is_made_anew(tmp_path, monkeypatch):
    lock, calls = fcntl.flock, []

    def flock(file, operation):
        calls.append(operation)
        if len(calls) == 1:  # the owner before ends, without having written anything
            shutil.rmtree(tmp_path / "run")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with owned(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
