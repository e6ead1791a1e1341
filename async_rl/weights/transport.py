"""Files of a published version, in shared memory, in a folder that all nodes see, or in an object store.

Each trainer rank that owns tensors writes its buckets, then rank 0 writes the manifest:

    weights-7/bucket-00000.safetensors    by rank 0
    weights-7/bucket-00001.safetensors    by rank 1
    weights-7/manifest.json               by rank 0, when all buckets are there

Each rank of an engine loads all buckets and reports the digests of its share (`async_rl.weights.digest.load_share`).
The replica compares them with the published ones. A node that brings a version verifies each bucket first.
With `sync.delta` the files of most versions are bucket-00000.delta, with the changes against the version before.

In shared memory a version overwrites the files of a removed one (`async_rl.weights.overwrite`):

    weights-5/bucket-00000.safetensors    ->    weights-7/bucket-00000.spare    ->    weights-7/bucket-00000.safetensors

A file that any process still has open or mapped is not overwritten; its bucket gets a new file.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from safetensors import SafetensorError

from async_rl.weights import delta, remote
from async_rl.weights.digest import WeightsDigest, digest_of, read_tensors
from async_rl.weights.overwrite import SHARED_MEMORY, MappedFiles
from message_queue.errors import AsyncRLError
from message_queue.tokens import WeightVersion

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
SPARE = ".spare"  # suffix of a bucket of a removed version, in the folder of a version that may overwrite it
MAX_DELTAS = 15
"""Versions of changes between two complete ones; a node without any version goes through at most as many."""


Backend = Literal["gloo", "nccl"]


class UpdateError(AsyncRLError):
    """A published version cannot be read whole."""


class Source(NamedTuple):
    """A server of the route `broadcast` or `direct`, and the buckets of a version that it sends."""

    address: str
    """host:port of the `async_rl.weights.broadcast.VersionServer`."""
    buckets: tuple[int, ...]
    """Numbers of the buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of a node among the receivers of one delivery by `broadcast`."""

    delivery: str
    """Unique name of the delivery."""
    index: int
    """0 for the first receiver."""
    size: int
    """Number of receivers."""
    sources: tuple[Source, ...]
    """Servers that send the buckets."""
    backend: Backend
    """NCCL needs a GPU in each server and receiver."""
    timeout_s: float
    """Bound in seconds on the start of a group and on each bucket."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Where the ranks of engines receive a version with `sync.route=direct`."""

    sources: tuple[Source, ...]
    """Servers of the trainer ranks that own the buckets."""
    backend: Backend
    """NCCL needs a GPU in each trainer rank and in each rank of an engine."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published version."""

    path: Path
    """Folder of the version; its tensors have Hugging Face names. With `url` or `direct` it only has the name."""
    weights: WeightVersion
    """Version number and digest of the tensors."""
    buckets: tuple[str, ...] = ()
    """Digest of each bucket, by its number."""
    sources: tuple[Source, ...] = ()
    """Servers of the route `broadcast`; empty if `path` is on this node or in a folder that all nodes see."""
    url: str | None = None
    """Folder of the version in an object store; None if it is not in one."""
    direct: Direct | None = None
    """Memory of the trainer ranks that engines load the version from; None if they load files."""


def version_folder(directory: Path, version: int) -> Path:
    """Folder of a version."""
    return directory / f"weights-{version}"


def version_number(folder: str) -> int:
    """Version of the name of a folder: 7 of weights-7."""
    return int(folder.rpartition("-")[2])


def readable_by_ranks(update: WeightUpdate, *, timeout_s: float) -> str:
    """Where all ranks of one engine read a version: its folder, or a new delivery as JSON.

    /dev/shm/run/weights-7

    {"version": "weights-7", "delivery": "3f0c", "sources": [["10.0.0.1:4000", [0, 2]]], "backend": "gloo",
     "timeout_s": 60.0}

    Args:
        update: the version.
        timeout_s: bound in seconds on the whole delivery.
    """
    if update.direct is None:
        return str(update.path.absolute())
    return json.dumps(
        {
            "version": update.path.name,
            "delivery": uuid.uuid4().hex,
            "sources": update.direct.sources,
            "backend": update.direct.backend,
            "timeout_s": timeout_s,
        }
    )


@dataclass(slots=True)
class Bases:
    """What an owner has published last, and how many versions of changes have followed the last complete one."""

    version: int | None = None
    """`param_version`; None before the first."""
    deltas: int = 0
    """Versions of changes in a row."""
    buckets: dict[int, tuple[str, dict[str, torch.Tensor]]] = field(default_factory=dict[int, Any])
    """Number of the bucket -> digest and tensors that it was published with; nothing else uses these tensors."""

    def base_of_next(self) -> int | None:
        """Version that the next one is written against; None if the next one is complete."""
        return None if self.deltas == MAX_DELTAS else self.version

    def published(self, version: int) -> None:
        """Make a written version the base of the next one."""
        self.deltas = 0 if self.base_of_next() is None else self.deltas + 1
        self.version = version


def write_bucket(
    folder: Path,
    number: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bases: Bases | None = None,
    files: MappedFiles | None = None,
) -> WeightsDigest:
    """Write the file of a bucket and return the digest of its tensors.

    Args:
        folder: version folder; created if it does not exist.
        number: bucket number.
        tensors: (Hugging Face name, complete tensor on any device).
        bases: if given, the file has the changes against the base, unless the version is complete. The base of the
            bucket becomes these tensors.
        files: see `save_bucket`.

    Raises:
        OSError: the disk has no free space or is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
    if bases is not None and bases.base_of_next() is not None:
        base_digest, base = bases.buckets[number]
        changes = delta.encode(list(held.items()), base=base, base_digest=base_digest)
        bucket_file(folder, number, changes=True).write_bytes(changes)
        digest = digest_of(held.items())
    else:
        digest = save_bucket(folder, number, held, files=files)
    if bases is not None:
        _, kept = bases.buckets.get(number, ("", {}))
        copies = {name: kept[name].copy_(t) if name in kept else t.clone() for name, t in held.items()}
        bases.buckets[number] = digest.hexdigest(), copies
    return digest


def save_bucket(
    folder: Path, number: int, tensors: dict[str, torch.Tensor], *, files: MappedFiles | None = None
) -> WeightsDigest:
    """Write complete CPU tensors as a bucket and return their digest.

    Args:
        folder: version folder. If it has a spare file of the bucket, that is overwritten if possible.
        number: bucket number.
        tensors: Hugging Face name -> tensor.
        files: mapped files, for a process that writes this bucket of every version.
    """
    from safetensors.torch import save_file  # imports torch; a configuration does without

    path = bucket_file(folder, number)
    with contextlib.suppress(FileNotFoundError):
        path.with_suffix(SPARE).replace(path)
    if (digest := (files or MappedFiles()).overwrite(path, tensors)) is not None:
        return digest
    path.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as thread:
        hashing = thread.submit(digest_of, tensors.items())
        save_file(tensors, path)
        return hashing.result()


def finish_update(
    folder: Path, *, version: int, buckets: Sequence[WeightsDigest], base: int | None = None
) -> WeightUpdate:
    """Write the manifest of a version when all its buckets are written, and remove spare files that it did not need.

    Args:
        folder: version folder.
        version: `param_version`.
        buckets: digest of each bucket, by its number.
        base: version that the changes in the buckets were written against; None if they are complete.
    """
    update = update_of(folder, version=version, buckets=buckets)
    write_manifest(folder, version=version, base=base, buckets=update.buckets)
    return update


def update_of(folder: Path, *, version: int, buckets: Sequence[WeightsDigest]) -> WeightUpdate:
    """A version of buckets with these digests, in order; see `finish_update`."""
    digests = tuple(bucket.hexdigest() for bucket in buckets)
    total = WeightsDigest.of(buckets)
    return WeightUpdate(path=folder, weights=WeightVersion(version, total.hexdigest()), buckets=digests)


def write_manifest(folder: Path, *, version: int, base: int | None, buckets: Sequence[str]) -> None:
    """Write the manifest atomically. For the arguments see `finish_update`; buckets: digests."""
    for spare in folder.glob(f"*{SPARE}"):
        spare.unlink()
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"version": version, "base": base, "buckets": list(buckets)}))
    partial.replace(folder / MANIFEST)


def update_files(folder: Path) -> list[Path]:
    """Files of the buckets of a written version with complete buckets.

    Raises:
        UpdateError: the manifest or a bucket is missing.
    """
    files = [bucket_file(folder, number) for number in range(len(update_buckets(folder)))]
    if absent := [path.name for path in files if not path.is_file()]:
        raise UpdateError(f"{folder} lacks {', '.join(absent[:3])}, which its manifest names")
    return files


def read_bucket(
    folder: Path, number: int, *, published: str, base: Path | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Read and verify a bucket: (Hugging Face name, CPU tensor) of each of its tensors.

    Args:
        folder: version folder.
        number: bucket number.
        published: digest of the tensors.
        base: folder of the complete version that the changes in the bucket were written against; None if it
            is complete.

    Raises:
        UpdateError: the file is missing, damaged, not the one that was published, or its base is another version.
    """
    path = bucket_file(folder, number, changes=base is not None)
    try:
        if base is None:
            held = list(read_tensors(path))
        else:
            tensors = dict(read_tensors(bucket_file(base, number)))
            held = delta.decode(path.read_bytes(), base=tensors, base_digest=update_buckets(base)[number])
    except (OSError, SafetensorError, delta.DeltaError) as error:
        raise UpdateError(f"{path} cannot be read: {error}") from error
    if (found := digest_of(held).hexdigest()) != published:
        raise UpdateError(f"{path} has digest {found}, but {published} was published")
    return held


def discard_updates(directory: Path, *, keep_version: int, spare_for: Path | None = None) -> None:
    """Remove every version older than `keep_version` that it is not written against, at any distance.

    Args:
        directory: parent of the folders of the versions.
        keep_version: oldest version that a reader may need.
        spare_for: folder of the next complete version; writing it overwrites the files in shared memory.
    """
    needed, folder = set[Path](), version_folder(directory, keep_version)
    while folder not in needed and (folder / MANIFEST).is_file():
        needed.add(folder)
        folder = base_of(folder) or folder
    for folder in directory.glob("weights-*"):
        if version_number(folder.name) < keep_version and folder not in needed:
            discard_update(folder, spare_for=spare_for)


def discard_update(folder: Path, *, spare_for: Path | None = None) -> None:
    """Remove a version, or give the files of its complete buckets to the next one; see `discard_updates`."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if spare_for is not None and folder.stat().st_dev == SHARED_MEMORY.stat().st_dev:
        spare_for.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.safetensors"):
            file.replace(spare_for / file.with_suffix(SPARE).name)
    shutil.rmtree(folder)


def discard_remote_updates(url: str, *, keep_version: int) -> None:
    """As `discard_updates`, in an object store.

    Raises:
        OSError: the store does not answer, or does not remove a version.
        UpdateError: a manifest is damaged.
    """
    numbers = {version_number(name) for name in remote.list_names(url) if name.startswith("weights-")}
    needed, version = set[int](), keep_version
    with tempfile.TemporaryDirectory() as scratch:
        while version in numbers - needed:
            folder = version_folder(Path(scratch), version)
            try:
                remote.download(f"{url}/{folder.name}/{MANIFEST}", folder / MANIFEST)
            except remote.RemoteError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                break  # a rank failed before all buckets were there
            needed.add(version)
            version = _manifest(folder)["base"]
    for number in sorted(numbers - needed):
        if number < keep_version:
            remote.remove(f"{url}/weights-{number}")


def remove_directory(directory: Path | str) -> None:
    """Remove the directory of all versions, or the URL of one.

    Raises:
        OSError: an object store does not remove it.
    """
    if isinstance(directory, str):
        remote.remove(directory)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def bucket_file(folder: Path, number: int, *, changes: bool = False) -> Path:
    """File of a bucket of a version. changes: whether it has the changes against another version."""
    return folder / f"bucket-{number:05}.{'delta' if changes else 'safetensors'}"


def update_buckets(folder: Path) -> list[str]:
    """Digest of each bucket of a written version.

    Raises:
        UpdateError: the manifest is missing or damaged.
    """
    return _manifest(folder)["buckets"]


def base_of(folder: Path) -> Path | None:
    """Folder of the version that a version was written against; None if it is complete.

    Raises:
        UpdateError: the manifest is missing or damaged.
    """
    base = _manifest(folder)["base"]
    return None if base is None else version_folder(folder.parent, base)


def holds(folder: Path, digests: Sequence[str]) -> bool:
    """Whether a folder has these buckets, complete; a killed run may have left another version there."""
    try:
        return update_buckets(folder) == list(digests) and base_of(folder) is None
    except UpdateError:
        return False


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return {"base": manifest["base"], "buckets": manifest["buckets"]}
    except (OSError, ValueError, KeyError) as error:
        raise UpdateError(f"{folder} has no whole manifest: {error!r}") from error
