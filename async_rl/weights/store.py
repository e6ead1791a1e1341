"""Published versions on one node, brought from the folder that all nodes see; the replicas of the node share them.

    folder of the run                    memory of the node
    weights-16   complete          ->    weights-16
    weights-17   changes of 16     ->    weights-17 from 16 and the changes, then 16 is removed
    weights-18   changes of 17     ->    a node that has none goes through 16, 17 and 18

The first replica that needs a version brings it; the others wait for it. Each bucket is verified when it arrives. The
files of a removed version stay for the next one, which overwrites them; so the node has memory for two versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from async_rl.weights.transport import (
    base_of,
    discard_update,
    is_whole_copy,
    read_bucket,
    save_bucket,
    update_buckets,
    write_manifest,
)


class LocalStore:
    """The versions of a run on this node.

    Args:
        directory: on this node, equal for all replicas of the run; created if it does not exist.

    Attributes:
        waiting_for: the bucket that `fetch` reads at the moment, for the error of a caller that bounds its time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._user = directory / "users" / str(os.getpid())
        self._spare = directory / "spare"
        self.waiting_for = "nothing"
        self._user.parent.mkdir(parents=True, exist_ok=True)
        self._user.touch()

    def local(self, folder: Path) -> Path:
        """Where `fetch` puts the version of `folder`."""
        return self._directory / folder.name

    def fetch(self, folder: Path) -> None:
        """Bring a version to this node; versions that are not needed any more are removed.

        Args:
            folder: of the version, as written by the trainer.

        Raises:
            UpdateError: a bucket is missing or damaged, or its base is not the one that it was written against.
            OSError: the folder cannot be read, or the node has no memory left.
        """
        with self._locked():
            missing: list[Path] = []
            while not is_whole_copy(self.local(folder), folder):
                missing.append(folder)
                if (base := base_of(folder)) is None:
                    break
                folder = base
            for version in reversed(missing):
                self._bring(version)
                self._keep_only(version)

    def release(self) -> None:
        """Leave the store; the last process of the run on this node removes it."""
        with self._locked():
            self._user.unlink(missing_ok=True)
            if not any(_is_alive(int(user.name)) for user in self._user.parent.iterdir()):
                shutil.rmtree(self._directory, ignore_errors=True)

    def _bring(self, folder: Path) -> None:
        local = self.local(folder)
        partial = self._directory / "partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
        self._spare.mkdir(exist_ok=True)
        self._spare.replace(partial)
        base = base_of(folder)
        digests = update_buckets(folder)
        for number, digest in enumerate(digests):
            self.waiting_for = f"bucket {number} of {folder}"
            tensors = read_bucket(folder, number, published=digest, base=None if base is None else self.local(base))
            save_bucket(partial, number, dict(tensors))
        write_manifest(partial, version=int(local.name.split("-")[1]), base=None, buckets=digests)
        shutil.rmtree(local, ignore_errors=True)  # of a killed run, which had other weights
        partial.replace(local)
        self.waiting_for = "nothing"

    def _keep_only(self, folder: Path) -> None:
        for version in self._directory.glob("weights-*"):
            if version.name != folder.name:
                discard_update(version, spare_for=self._spare)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of all processes of the run on this node; it ends with its process."""
        self._user.parent.mkdir(parents=True, exist_ok=True)  # if the last user before has removed it
        self.waiting_for = "a version that another replica of the node brings"
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
