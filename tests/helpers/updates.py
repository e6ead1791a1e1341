"""A published version as one process writes and reads it whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from async_rl.inference.checkpoint_weights import weight_files
from async_rl.weights.digest import WeightsDigest, digest_of, read_tensors
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.plan import BUCKET_BYTES
from async_rl.weights.transport import (
    WeightUpdate,
    finish_update,
    read_bucket,
    update_buckets,
    version_folder,
    write_bucket,
)


def write_update(
    directory: Path,
    *,
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
    files: MappedFiles | None = None,
) -> WeightUpdate:
    """Write one version of a single owner; at most one bucket is in memory.

    Args:
        directory: parent of the folder of the version.
        version: `param_version`.
        tensors: (Hugging Face name, tensor on any device).
        bucket_bytes: bound on a bucket; a larger tensor has a separate bucket.
        files: see `save_bucket`.

    Raises:
        OSError: `directory` has no free space or is not writable; the message names the path.
    """
    folder = version_folder(directory, version)
    buckets: list[WeightsDigest] = []
    held: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if held and sum(t.nbytes for _, t in held) + tensor.nbytes > bucket_bytes:
            buckets.append(write_bucket(folder, len(buckets), held, files=files))
            held = []
        held.append((name, tensor))
    buckets.append(write_bucket(folder, len(buckets), held, files=files))
    return finish_update(folder, version=version, buckets=buckets)


def checkpoint_digest(folder: Path) -> str:
    """Digest of all tensors of a checkpoint folder."""
    return digest_of(named for path in weight_files(folder) for named in read_tensors(path)).hexdigest()


def read_update(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, CPU tensor) of a written version; each bucket is verified before its first tensor.

    Raises:
        UpdateError: a file is missing, damaged, or not the one that the manifest names.
    """
    for number, published in enumerate(update_buckets(folder)):
        yield from read_bucket(folder, number, published=published)
