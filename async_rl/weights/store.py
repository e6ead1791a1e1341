"""Published versions on one node, from a folder that all nodes see, an object store or by broadcast.

The replicas of the node share them.

    folder of the run                    memory of the node
    weights-16   complete          ->    weights-16
    weights-17   changes of 16     ->    weights-17 from 16 and the changes, then 16 is removed
    weights-18   changes of 17     ->    a node that has none goes through 16, 17 and 18

The first replica that needs a version brings it; the others wait for it. Each bucket is verified when it arrives. The
files of a removed version stay for the next one to overwrite; so the node has memory for two versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.files.masking import mask_text
from async_rl.weights.remote import download
from async_rl.weights.transport import (
    MANIFEST,
    Seat,
    Source,
    UpdateError,
    WeightUpdate,
    base_of,
    bucket_file,
    discard_update,
    holds,
    read_bucket,
    save_bucket,
    update_buckets,
    version_number,
    write_manifest,
)

if TYPE_CHECKING:
    from async_rl.weights.broadcast import VersionServer


class LocalStore:
    """The versions of a run on this node.

    Args:
        directory: on this node, equal for all replicas of the run; created if it does not exist.
        host: address of this node for other nodes.

    Attributes:
        waiting_for: the bucket that is awaited at the moment, for the error of a caller that bounds its time.
    """

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        self._directory = directory
        self._host = host
        self._server: VersionServer | None = None
        self._spare = directory / "spare"
        self.waiting_for = "nothing"
        users = directory / "users"
        users.mkdir(parents=True, exist_ok=True)
        self._lock, user = tempfile.mkstemp(dir=users)
        self._user = Path(user)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # held until this process ends

    def local(self, folder: Path) -> Path:
        """Where `fetch` puts the version of `folder`."""
        return self._directory / folder.name

    def bring(self, update: WeightUpdate, seat: Seat | None) -> None:
        """Bring a version to this node on the route that it takes.

        Args:
            seat: place of this node in a delivery by broadcast; None if the version is in a folder or a store.

        Raises:
            UpdateError: a bucket did not come, or is damaged.
            OSError: the version cannot be read, or the node has no memory left.
        """
        if seat is not None:
            self.receive(update, seat)
        elif update.url is not None:
            self.download(update.url)
        else:
            self.fetch(update.path)

    def fetch(self, folder: Path) -> None:
        """Bring a version to this node; versions that are not needed any more are removed.

        Args:
            folder: version folder, as written by the trainer.

        Raises:
            UpdateError: a bucket is missing or damaged, or its base is not the one that it was written against.
            OSError: the folder cannot be read, or the node has no memory left.
        """
        with self._locked():
            self._fetch(folder)

    def download(self, url: str) -> None:
        """As `fetch`, from the folder of a version in an object store, one bucket after another.

        Raises:
            UpdateError: an object is damaged, or its base is not the one that it was written against.
            OSError: an object is missing, the store does not answer, or the node has no memory left.
        """
        parent, _, name = url.rpartition("/")
        with self._locked():
            downloads = self._directory / "downloads"
            try:
                self._fetch(downloads / name, parent=parent)
            except UpdateError as error:
                raise UpdateError(f"of {mask_text(url)}: {error}") from error
            finally:
                shutil.rmtree(downloads, ignore_errors=True)

    def _fetch(self, folder: Path, parent: str | None = None) -> None:
        """Bring a version. parent: URL that the files of `folder` are downloaded from first."""
        missing: list[Path] = []
        while True:
            if parent is not None:
                self._download(parent, folder / MANIFEST)
            if holds(self.local(folder), update_buckets(folder)):
                break
            missing.append(folder)
            if (base := base_of(folder)) is None:
                break
            folder = base
        for version in reversed(missing):
            self._bring(version, parent)

    def receive(self, update: WeightUpdate, seat: Seat) -> None:
        """Take part in a delivery by broadcast, and verify each bucket when it arrives. Other versions are removed.

        Raises:
            UpdateError: a bucket did not come, or is damaged.
            OSError: the node has no memory left.
        """
        from async_rl.weights.broadcast import receive  # imports torch; a configuration does without

        local = self.local(update.path)
        with self._locked():
            if seat.size == 1 and holds(local, update.buckets):
                return
            with self._new_version(local, update.buckets) as partial:
                self.waiting_for = f"a bucket of {local.name}"
                for number in receive(local.name, seat, into=partial):
                    read_bucket(partial, number, published=update.buckets[number])

    def offer(self, update: WeightUpdate) -> Source:
        """Serve the version of this node to processes of other nodes that lack it.

        Raises:
            UpdateError: this node does not have it.
        """
        from async_rl.weights.broadcast import VersionServer  # imports torch; a configuration does without

        if not holds(self.local(update.path), update.buckets):
            raise UpdateError(f"{self.local(update.path)} is not the published version")
        self._server = self._server or VersionServer(self._host, self._directory)
        return Source(self._server.address, tuple(range(len(update.buckets))))

    def release(self) -> None:
        """Leave the store; the last process of the run on this node removes it."""
        if self._server is not None:
            self._server.close()
        with self._locked():
            self._user.unlink()
            os.close(self._lock)
            if not _is_used(self._directory):
                shutil.rmtree(self._directory, ignore_errors=True)

    def _bring(self, folder: Path, parent: str | None) -> None:
        base = base_of(folder)
        digests = update_buckets(folder)
        with self._new_version(self.local(folder), digests) as partial:
            for number, digest in enumerate(digests):
                self.waiting_for = f"bucket {number} of {folder}"
                file = bucket_file(folder, number, changes=base is not None)
                if parent is not None:
                    self._download(parent, file)
                tensors = read_bucket(folder, number, published=digest, base=None if base is None else self.local(base))
                save_bucket(partial, number, dict(tensors))
                if parent is not None:
                    file.unlink()

    def _download(self, parent: str, file: Path) -> None:
        url = f"{parent}/{file.parent.name}/{file.name}"
        self.waiting_for = mask_text(url)
        download(url, file)

    @contextmanager
    def _new_version(self, local: Path, digests: Sequence[str]) -> Generator[Path]:
        """Yield a folder to fill with verified buckets. It then becomes the only version of this node."""
        # Not the folder of an attempt that failed: threads of that one may go on for a while.
        partial = Path(tempfile.mkdtemp(prefix=f"{local.name}.", dir=self._directory))
        with contextlib.suppress(FileNotFoundError):
            self._spare.replace(partial)
        yield partial
        write_manifest(partial, version=version_number(local.name), base=None, buckets=digests)
        shutil.rmtree(local, ignore_errors=True)  # of a killed run with other weights
        partial.replace(local)
        self._keep_only(local)
        self.waiting_for = "nothing"

    def _keep_only(self, folder: Path) -> None:
        for version in self._directory.glob("weights-*"):
            if version.name != folder.name:
                discard_update(version, spare_for=self._spare)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Hold the lock of all processes of the run on this node; it ends with its process."""
        self._directory.mkdir(parents=True, exist_ok=True)  # if the last user before has removed it
        self.waiting_for = "a version that another replica of the node brings"
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def remove_unused(directory: Path) -> None:
    """Remove the stores of any run in `directory` whose processes were all killed."""
    for users in directory.glob("async_rl-weights-*/users"):
        if any(users.iterdir()) and not _is_used(users.parent):  # without a user it is a new store
            shutil.rmtree(users.parent, ignore_errors=True)


def _is_used(store: Path) -> bool:
    """Whether a process that uses a store lives."""
    for user in (store / "users").glob("*"):
        with contextlib.suppress(FileNotFoundError), user.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
