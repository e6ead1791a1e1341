"""Writes the trainer's current weights for engines or as a checkpoint. Collective over all trainer ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from async_rl.trainer.model.gpt import BuiltModel
from async_rl.trainer.model.layout import adapted_modules
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.model.source import WeightSource
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.pretrained import save_adapter, save_pretrained
from async_rl.weights.transport import (
    Bases,
    Source,
    WeightUpdate,
    discard_updates,
    finish_update,
    version_folder,
    write_bucket,
)


def export_update(
    source: WeightSource,
    directory: Path,
    *,
    version: int,
    keep_version: int,
    bases: Bases | None = None,
    servers: Sequence[str] | None = None,
    files: MappedFiles | None = None,
) -> WeightUpdate | None:
    """Write the weights for engines, after removing versions older than `keep_version`. Each rank writes its buckets.

    Args:
        source: weights of all ranks.
        directory: parent of the folders of the versions.
        version: `param_version`.
        keep_version: oldest version that a replica may need.
        bases: what this rank has published last, if versions are written as changes; they become this version.
        servers: address of the server of the node of each rank, by rank, if each node has its own `directory`.
        files: that this rank has overwritten.

    Returns:
        the written version on rank 0, None on other ranks.

    Raises:
        OSError: `directory` has no free space or is not writable.
    """
    rank = dist.get_rank()
    folder = version_folder(directory, version)
    base = None if bases is None else bases.base_of_next()
    if rank == (0 if servers is None else servers.index(servers[rank])):
        discard_updates(directory, keep_version=keep_version, spare_for=folder if base is None else None)
    mine: dict[int, WeightsDigest] = {}
    with ThreadPoolExecutor(1) as writer:
        writing: tuple[int, Future[WeightsDigest]] | None = None
        for bucket, tensors in source.buckets():  # the next bucket is gathered while this rank, or another, writes one
            if tensors:
                if writing is not None:
                    mine[writing[0]] = writing[1].result()
                number = bucket.number
                writing = number, writer.submit(write_bucket, folder, number, tensors, bases=bases, files=files)
        if writing is not None:
            mine[writing[0]] = writing[1].result()
    if bases is not None:
        bases.published(version)
    parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, parts)
    if parts is None:
        return None
    digests: dict[int, WeightsDigest] = {number: digest for part in parts for number, digest in part.items()}
    buckets = [digests[number] for number in sorted(digests)]
    update = finish_update(folder, version=version, buckets=buckets, base=base)
    return update if servers is None else replace(update, sources=_sources(servers, parts))


def _sources(servers: Sequence[str], parts: Sequence[Mapping[int, WeightsDigest]]) -> tuple[Source, ...]:
    """The buckets that each server sends. parts: the buckets that each rank wrote."""
    sent: dict[str, list[int]] = {}
    for server, part in zip(servers, parts, strict=True):
        sent.setdefault(server, []).extend(part)
    return tuple(Source(server, tuple(sorted(numbers))) for server, numbers in sent.items() if numbers)


def export_pretrained(source: WeightSource, folder: Path, *, like: Path) -> None:
    """Write a Hugging Face checkpoint on rank 0, to which the other ranks send their buckets; see `save_pretrained`.

    Raises:
        OSError: the disk has no free space or `folder` is not writable.
    """
    tensors = source.on_first_rank()
    if dist.get_rank() == 0:
        save_pretrained(folder, tensors, like=like)
    for _ in tensors:  # on the other ranks this sends their buckets
        pass


def export_adapter(model: BuiltModel, folder: Path, *, config: LoraConfig, start: Path) -> None:
    """Write the LoRA adapters as a folder of PEFT, on rank 0.

    Raises:
        OSError: the disk has no free space or `folder` is not writable.
    """
    tensors = WeightSource(model.chunks, shape=model.shape, adapters=True).on_first_rank()
    if dist.get_rank() == 0:
        save_adapter(
            folder,
            tensors,
            rank=config.rank,
            alpha=config.alpha,
            target_modules=config.target_modules or adapted_modules(model.shape),
            start=start,
        )
    for _ in tensors:  # on the other ranks this sends their buckets
        pass


def adapter_folder(folder: Path) -> Path:
    """The folder of the adapters beside a folder of merged weights: `final` -> `final-adapter`."""
    return folder.with_name(f"{folder.name}-adapter")
