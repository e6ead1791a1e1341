"""Content hash of a set of named tensors, and a load that the ranks of an engine hash in parts.

A hash does not depend on the order of the tensors. SGLang's server loads this file by its path, so the file must not
import from async_rl.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    _Bucket: TypeAlias = Sequence[tuple[str, torch.Tensor]]
    _Taken: TypeAlias = tuple[int, _Bucket]

STORE_VARIABLE = "ASYNC_RL_STORE"  # directory of the store of this node; set for engines over several nodes
MAX_THREADS = 4
"""Threads that copy or hash the tensors of a bucket."""
_BLOCK = 256 << 10  # bytes that are hashed after they are copied, while they are in the cache of the core
_MODULE = re.compile(r"(?:.*\.)?layers\.\d+\.[^.]+(?=\.)")


def module_of(name: str) -> str:
    """Module of a tensor: the child of a layer, or the tensor itself if it is outside the layers.

    `model.layers.3.mlp.experts.5.up_proj.weight` -> `model.layers.3.mlp`; `model.norm.weight` -> `model.norm.weight`.
    """
    found = _MODULE.match(name)
    return name if found is None else found[0]


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Bytes [n] of a CPU tensor, in its memory if it is contiguous."""
    import torch  # a configuration does without it

    held = tensor.detach().contiguous()
    flat = held.as_strided((held.numel(),), (1,)).view(torch.uint8)  # reshape keeps any stride of a single value
    return flat.numpy()


class WeightsDigest:
    """Feed every tensor once, in any order, then read `hexdigest()`."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    @classmethod
    def of(cls, parts: Iterable[WeightsDigest]) -> WeightsDigest:
        """Digest of the tensors of all `parts`."""
        total = cls()
        for part in parts:
            total._entries |= part._entries
        return total

    @classmethod
    def of_hashes(cls, hashes: Mapping[str, str]) -> WeightsDigest:
        """Digest of tensors whose `hashes` another process has computed."""
        found = cls()
        found._entries = {name: bytes.fromhex(entry) for name, entry in hashes.items()}
        return found

    @property
    def hashes(self) -> dict[str, str]:
        """Name of each tensor -> 32 hex digits."""
        return {name: entry.hex() for name, entry in self._entries.items()}

    def update(self, name: str, tensor: torch.Tensor, *, copy_to: NDArray[np.uint8] | None = None) -> None:
        """Hash name, dtype, shape and bytes of a CPU tensor, and copy the bytes if they have a target [n]."""
        entry = xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        data = bytes_of(tensor)
        if copy_to is None:
            entry.update(data.data)
        else:
            for start in range(0, len(data), _BLOCK):
                copied = copy_to[start : start + _BLOCK]
                copied[:] = data[start : start + _BLOCK]
                entry.update(copied.data)
        self._entries[name] = entry.digest()

    def hexdigest(self, names: Iterable[str] | None = None) -> str:
        """32 hex digits of all tensors, or of the named ones."""
        total = xxh3_128()
        for name in sorted(self._entries if names is None else names):
            total.update(name.encode() + b"\0" + self._entries[name])
        return total.hexdigest()


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsDigest:
    """Digest of CPU tensors."""

    def hash_one(named: tuple[str, torch.Tensor]) -> WeightsDigest:
        digest = WeightsDigest()
        digest.update(*named)
        return digest

    with ThreadPoolExecutor(num_threads()) as pool:
        return WeightsDigest.of(pool.map(hash_one, tensors))


def num_threads() -> int:
    """Threads for the tensors of a bucket: at most one for each core that this process may use."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) of a safetensors file. The file is mapped: only the parts that are used are read.

    Raises:
        OSError: the file is missing.
        SafetensorError: the file is cut or no safetensors file.
    """
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, file.get_tensor(name)


def load_share(
    buckets: Iterable[Sequence[tuple[str, torch.Tensor]]],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    *,
    sums: Callable[[torch.Tensor], list[list[int]]],
    rank: int,
    ranks: int,
    ahead: int = 1,
) -> dict[str, Any]:
    """Load all tensors of a version on one rank of an engine, and hash the buckets of this rank.

        rank 0 of 2   hashes buckets 0, 2, 4, and only loads 1, 3
        rank 1 of 2   hashes buckets 1, 3, and only loads 0, 2, 4

    A thread takes and hashes the next bucket while `load` uses the tensors before it.

    Args:
        buckets: (Hugging Face name, tensor on any device) of each bucket, by number; see `mapped`.
        load: called once with (name, tensor) of every tensor.
        sums: see `async_rl.weights.checksum.sums_for`; called for each tensor that this rank hashes.
        rank: index of this process among the ranks of the engine.
        ranks: number of ranks of the engine.
        ahead: most buckets in memory that `load` has not begun.

    Returns:
        the fields of `async_rl.inference.loads.RankLoad` without parameters, as JSON. They are of the tensors that
        `load` took.

    Raises:
        OSError: a file is missing or cut; names it.
        RuntimeError: a bucket was not received; names it.
    """
    taken: dict[int, list[str]] = {}
    hashed: dict[int, WeightsDigest] = {}
    published: dict[str, list[list[int]]] = {}
    numbered = enumerate(buckets)

    def take() -> _Taken | None:
        """The next bucket, hashed if it is in this rank's share; None after the last."""
        for number, held in numbered:
            if number % ranks == rank:
                with ThreadPoolExecutor(num_threads()) as pool:
                    published.update(zip(dict(held), pool.map(sums, dict(held).values()), strict=True))
                hashed[number] = digest_of((name, tensor.cpu()) for name, tensor in held)
            return number, held
        return None

    def noted(number: int, held: _Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in held:
            taken.setdefault(number, []).append(name)
            yield name, tensor

    with contextlib.closing(_taken_ahead(take, ahead=ahead)) as all_taken:
        # The chain keeps no bucket: its memory is free before the next bucket but one is taken.
        load(itertools.chain.from_iterable(itertools.starmap(noted, all_taken)))
    return {
        "buckets": [[number, hashed[number].hexdigest(names)] for number, names in taken.items() if number in hashed],
        "names": xxh3_128("\0".join(sorted(name for names in taken.values() for name in names)).encode()).hexdigest(),
        "published": published,
    }


def _taken_ahead(take: Callable[[], _Taken | None], *, ahead: int) -> Generator[_Taken]:
    """Results of `take` until None; a thread computes `ahead` results before they are asked for."""
    with ThreadPoolExecutor(1) as thread:
        taking = deque(thread.submit(take) for _ in range(ahead))
        try:
            while (taken := taking.popleft().result()) is not None:
                taking.append(thread.submit(take))
                yield taken
                del taken
        finally:
            thread.shutdown(cancel_futures=True)


def on_this_node(folder: Path) -> Path:
    """Where an engine process reads a version whose folder the replica names, maybe on another node.

    With the store /dev/shm/run-b on this node, /dev/shm/run-a/weights-7 of the replica's node is here
    /dev/shm/run-b/weights-7.
    """
    store = os.environ.get(STORE_VARIABLE)
    return folder if store is None else Path(store) / folder.name


def mapped(files: Iterable[Path]) -> Iterator[_Bucket]:
    """(name, mapped CPU tensor) of the tensors of each safetensors file.

    Raises:
        OSError: a file is missing or cut; names it.
    """
    for file in files:
        try:
            yield list(read_tensors(file))
        except (OSError, SafetensorError) as error:
            raise OSError(f"{file} cannot be read: {error}") from error
