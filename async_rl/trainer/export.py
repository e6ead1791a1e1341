"""Writes the trainer's current weights for engines or as a checkpoint. Collective over all trainer ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.trainer.distributed import ProcessGroups
from async_rl.trainer.model.gpt import BuiltModel
from async_rl.trainer.model.layout import adapted_modules
from async_rl.trainer.model.model import LoraConfig
from async_rl.trainer.model.source import WeightSource
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.digest import WeightsDigest, digest_of
from async_rl.weights.overwrite import SHARED_MEMORY, MappedFiles
from async_rl.weights.pretrained import save_adapter
from async_rl.weights.remote import upload
from async_rl.weights.snapshots import HostCopy, Snapshots
from async_rl.weights.transport import (
    MANIFEST,
    Backend,
    Bases,
    Direct,
    Source,
    WeightUpdate,
    discard_remote_updates,
    discard_updates,
    finish_update,
    update_of,
    version_folder,
    write_bucket,
)

_Tensors: TypeAlias = "Sequence[tuple[str, Tensor]]"


class VersionWriter:
    """Writes the weights of each version for engines, and keeps what its next version needs.

    Args:
        source: weights of all ranks.
        groups: process groups of this rank.
        delta: write most versions as changes of the version before.
        host: address of this node, if versions stay in its memory and are served from there.
        direct: backend by which engines receive versions from the memory of this rank; None with other routes.

    Attributes:
        source: weights of all ranks.
        server: serves the versions of this node or rank, from the first one on; None if another rank does.
    """

    def __init__(
        self, source: WeightSource, groups: ProcessGroups, *, delta: bool, host: str | None, direct: Backend | None
    ) -> None:
        self.source = source
        self.server: VersionServer | None = None
        self._groups, self._host = groups, host
        self._direct: Backend | None = direct
        self._bases = Bases() if delta else None
        self._servers: list[str] | None = None  # of the node of each rank, or of the rank
        stream = torch.cuda.Stream(groups.device) if groups.device.type == "cuda" else None
        self._ring = None if stream is None else cycle((HostCopy(stream), HostCopy(stream)))
        self._snapshots = Snapshots(stream)
        self._files = MappedFiles()

    def write(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate | None:
        """Write the weights for engines, after removing versions older than `keep_version`.

        Each rank writes its buckets. With `direct` engines receive them from the memory of each rank.

        Args:
            directory: parent of the folders of the versions, or its URL in an object store. Each rank then writes a
                bucket in the memory of its node first, and rank 0 uploads the manifest when all buckets are there.
            version: `param_version`.
            keep_version: oldest version that a replica may need.

        Returns:
            the written version on rank 0, None on other ranks.

        Raises:
            OSError: `directory` has no free space or is not writable.
            UpdateError: an object store has a damaged manifest.
        """
        if isinstance(directory, str):
            with _upload_folder(directory, dist.get_rank()) as parent:
                return self._write_files(parent, version=version, keep_version=keep_version, url=directory)
        if self._host is not None and self._servers is None:
            self._servers = self._serve(self._host, directory)
        if self._direct is None or self._servers is None:
            return self._write_files(directory, version=version, keep_version=keep_version)
        self._snapshots.discard(keep_version=keep_version)
        copy = partial(self._snapshots.start, version)
        parts = _write_buckets(self.source, lambda _, tensors: digest_of(tensors), copy=copy)
        if parts is None:
            return None
        update = update_of(version_folder(directory, version), version=version, buckets=_in_order(parts))
        return replace(update, direct=Direct(_sources(self._servers, parts), self._direct))

    def _write_files(
        self, parent: Path, *, version: int, keep_version: int, url: str | None = None
    ) -> WeightUpdate | None:
        """Write a version into a folder of `parent`, and upload it if there is a URL."""
        rank, servers, folder = dist.get_rank(), self._servers, version_folder(parent, version)
        base = None if self._bases is None else self._bases.base_of_next()
        if url is not None and rank == 0:
            discard_remote_updates(url, keep_version=keep_version)
        if url is None and rank == (0 if servers is None else servers.index(servers[rank])):
            discard_updates(parent, keep_version=keep_version, spare_for=folder if base is None else None)

        def write(number: int, tensors: _Tensors) -> WeightsDigest:
            files = self._files if url is None else None
            digest = write_bucket(folder, number, tensors, bases=self._bases, files=files)
            for file in () if url is None else folder.iterdir():
                upload(file, f"{url}/{folder.name}/{file.name}")
                file.unlink()
            return digest

        parts = _write_buckets(self.source, write, copy=_in_turn(self._ring))
        if self._bases is not None:
            self._bases.published(version)
        if parts is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)  # of a rank without tensors
        update = finish_update(folder, version=version, buckets=_in_order(parts), base=base)
        if url is not None:
            upload(folder / MANIFEST, f"{url}/{folder.name}/{MANIFEST}")
            return replace(update, url=f"{url}/{folder.name}")
        return update if servers is None else replace(update, sources=_sources(servers, parts))

    def _serve(self, host: str, directory: Path) -> list[str]:
        """Start a server of versions on the first rank of each node, or on all; return the one of each rank."""
        places = self._groups.gather(host if self._direct is None else f"{host}, rank {self._groups.rank}")
        if places.index(places[self._groups.rank]) == self._groups.rank:
            self.server = VersionServer(host, directory if self._direct is None else self._snapshots)
        addresses = self._groups.gather(None if self.server is None else self.server.address)
        return [addresses[places.index(place)] for place in places]

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.close()


@contextmanager
def _upload_folder(url: str, rank: int) -> Generator[Path]:
    """Folder in the memory of this node for the files that this rank uploads; removed at the end."""
    directory = SHARED_MEMORY / f"{url.rpartition('/')[2]}-upload-{rank}"
    shutil.rmtree(directory, ignore_errors=True)  # of a killed run
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _in_turn(ring: Iterator[HostCopy] | None) -> Callable[[int, _Tensors], HostCopy] | None:
    """Copies each bucket into the next buffer of a ring."""
    return None if ring is None else lambda _, tensors: next(ring).start(tensors)


def _write_buckets(
    source: WeightSource,
    write: Callable[[int, _Tensors], WeightsDigest],
    *,
    copy: Callable[[int, _Tensors], HostCopy] | None,
) -> list[dict[int, WeightsDigest]] | None:
    """Call `write` for each bucket of this rank; on rank 0, return number -> digest of the buckets of each rank.

    Returns on rank 0 when all buckets are written.

    Args:
        source: weights of all ranks.
        write: takes number and tensors of a bucket, and returns their digest.
        copy: starts to copy a bucket to the host, and returns the copy to write; None writes the tensors.
    """
    mine: dict[int, WeightsDigest] = {}
    with ThreadPoolExecutor(1) as writer:
        writing: tuple[int, Future[WeightsDigest]] | None = None
        for bucket, tensors in source.buckets():  # the next bucket is gathered while this rank, or another, writes one
            if tensors:
                read = partial(list, tensors) if copy is None else copy(bucket.number, tensors).tensors
                if writing is not None:
                    mine[writing[0]] = writing[1].result()
                writing = bucket.number, writer.submit(lambda n, of: write(n, of()), bucket.number, read)
        if writing is not None:
            mine[writing[0]] = writing[1].result()
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts)
    return parts


def _in_order(parts: Sequence[Mapping[int, WeightsDigest]]) -> list[WeightsDigest]:
    """Digest of each bucket, by its number."""
    digests = {number: digest for part in parts for number, digest in part.items()}
    return [digests[number] for number in sorted(digests)]


def _sources(servers: Sequence[str], parts: Sequence[Mapping[int, WeightsDigest]]) -> tuple[Source, ...]:
    """The buckets that each server sends. parts: the buckets that each rank wrote."""
    sent: dict[str, list[int]] = {}
    for server, part in zip(servers, parts, strict=True):
        sent.setdefault(server, []).extend(part)
    return tuple(Source(server, tuple(sorted(numbers))) for server, numbers in sent.items() if numbers)


def export_adapter(model: BuiltModel, folder: Path, *, config: LoraConfig, start: Path) -> None:
    """Write the LoRA adapters as a folder of PEFT, on rank 0.

    Raises:
        OSError: the disk has no free space or `folder` is not writable.
    """
    modules = config.target_modules or adapted_modules(model.shape)
    save = partial(save_adapter, folder, rank=config.rank, alpha=config.alpha, target_modules=modules, start=start)
    save_on_first_rank(WeightSource(model.chunks, shape=model.shape, adapters=True), save)


def save_on_first_rank(source: WeightSource, save: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
    """Save the tensors of all ranks on rank 0; the other ranks send it their buckets."""
    tensors = source.on_first_rank()
    if dist.get_rank() == 0:
        save(tensors)
    for _ in tensors:  # on the other ranks this sends their buckets
        pass


def adapter_folder(folder: Path) -> Path:
    """The folder of the adapters next to a folder of merged weights: `final` -> `final-adapter`."""
    return folder.with_name(f"{folder.name}-adapter")
