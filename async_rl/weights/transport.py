"""Files of a published version, in shared memory or in a folder that all nodes see.

Each trainer rank that owns tensors writes its buckets, then rank 0 writes the manifest:

    weights-7/bucket-00000.safetensors    by rank 0
    weights-7/bucket-00001.safetensors    by rank 1
    weights-7/manifest.json               by rank 0, when all buckets are there

An engine reads bucket by bucket, compares the digest of each with the manifest, and reports the digest of all tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from async_rl.weights.digest import ModuleDigest, WeightsDigest
from async_rl.weights.plan import BUCKET_BYTES
from message_queue.tokens import WeightVersion

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"


class UpdateError(Exception):
    """A published version cannot be read whole."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published version."""

    path: Path
    """Folder of the version; its tensors have Hugging Face names."""
    weights: WeightVersion
    """Version number and digest of the tensors."""
    modules: Mapping[str, ModuleDigest] = field(default_factory=dict[str, ModuleDigest])
    """Module -> digest. If empty, engines skip the check of `async_rl.weights.live`."""


def version_folder(directory: Path, version: int) -> Path:
    """Folder of a version."""
    return directory / f"weights-{version}"


def write_bucket(folder: Path, number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    """Write the file of a bucket and return the digest of its tensors.

    Args:
        folder: of the version; created if it does not exist.
        number: of the bucket.
        tensors: (Hugging Face name, complete tensor on any device).

    Raises:
        OSError: the disk has no free space or is not writable.
    """
    from safetensors.torch import save_file  # imports torch, which a configuration does without

    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
    digest = WeightsDigest()
    for name, tensor in held.items():
        digest.update(name, tensor)
    save_file(held, folder / _bucket_file(number))
    return digest


def finish_update(folder: Path, *, version: int, buckets: Sequence[WeightsDigest]) -> WeightUpdate:
    """Write the manifest of a version when all its buckets are written.

    Args:
        folder: of the version.
        version: `param_version`.
        buckets: digest of each bucket, by its number.
    """
    digests = [bucket.hexdigest() for bucket in buckets]
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"version": version, "buckets": digests}))
    partial.replace(folder / MANIFEST)
    total = WeightsDigest.of(buckets)
    return WeightUpdate(path=folder, weights=WeightVersion(version, total.hexdigest()), modules=total.modules())


def write_update(
    directory: Path, *, version: int, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> WeightUpdate:
    """Write one version of a single owner; at most one bucket is in memory.

    Args:
        directory: parent of the folder of the version.
        version: `param_version`.
        tensors: (Hugging Face name, tensor on any device).
        bucket_bytes: bound on a bucket; a larger tensor has a bucket of its own.

    Raises:
        OSError: `directory` has no free space or is not writable; the message names the path.
    """
    folder = version_folder(directory, version)
    buckets: list[WeightsDigest] = []
    held: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if held and sum(t.nbytes for _, t in held) + tensor.nbytes > bucket_bytes:
            buckets.append(write_bucket(folder, len(buckets), held))
            held = []
        held.append((name, tensor))
    buckets.append(write_bucket(folder, len(buckets), held))
    return finish_update(folder, version=version, buckets=buckets)


def update_files(folder: Path) -> list[Path]:
    """Files of the buckets of a written version.

    Raises:
        UpdateError: the manifest or a bucket is missing.
    """
    files = [folder / _bucket_file(number) for number in range(len(_digests_in(folder)))]
    if absent := [path.name for path in files if not path.is_file()]:
        raise UpdateError(f"{folder} lacks {', '.join(absent[:3])}, which its manifest names")
    return files


def read_update(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, CPU tensor) of a written version; each bucket is verified before its first tensor.

    Raises:
        UpdateError: a file is missing, damaged, or not the one that the manifest names.
    """
    for path, published in zip(update_files(folder), _digests_in(folder), strict=True):
        try:
            held = list(read_tensors(path))
        except (OSError, SafetensorError) as error:
            raise UpdateError(f"{path} cannot be read: {error}") from error
        digest = WeightsDigest()
        for name, tensor in held:
            digest.update(name, tensor)
        if digest.hexdigest() != published:
            raise UpdateError(f"{path} has digest {digest.hexdigest()}, but {published} was published")
        yield from held


def damage(folder: Path) -> str:
    """What is wrong with the files of a version, after ": "; empty if each bucket is the published one."""
    try:
        for _ in read_update(folder):
            pass
    except UpdateError as error:
        return f": {error}"
    return ""


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) of a safetensors file."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


def discard_updates(directory: Path, *, keep_version: int) -> None:
    """Remove every version older than `keep_version`."""
    for folder in directory.glob("weights-*"):
        if int(folder.name.split("-")[1]) < keep_version:
            shutil.rmtree(folder)


def remove_directory(directory: Path) -> None:
    """Remove the directory of all versions."""
    shutil.rmtree(directory, ignore_errors=True)


def _bucket_file(number: int) -> str:
    return f"bucket-{number:05}.safetensors"


def _digests_in(folder: Path) -> list[str]:
    """Digest of each bucket, from the manifest."""
    try:
        return json.loads((folder / MANIFEST).read_text())["buckets"]
    except (OSError, ValueError, KeyError) as error:
        raise UpdateError(f"{folder} has no whole manifest: {error!r}") from error
