"""Overwrites files of a removed version in shared memory with tensors of the next one.

New memory takes longer than the copy into it, because the kernel clears each page. A new mapping of existing memory
takes a third of the copy, so a writer keeps its mappings.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import signal
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from async_rl.weights.digest import WeightsDigest, num_threads

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")


class _File(NamedTuple):
    descriptor: int
    """Closed when the mapping is gone."""
    content: NDArray[np.uint8]
    """Bytes [n], in the mapping."""


class MappedFiles:
    """Files that this process has overwritten, open and mapped until they are deleted.

    The memory of a deleted file is free after the next `overwrite`, or when the object is gone. No other process
    overwrites the files while this object exists.
    """

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}  # by inode

    def overwrite(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> WeightsDigest | None:
        """Copy CPU tensors into a safetensors file with tensors of the same names, dtypes and shapes, and hash them.

        Args:
            path: file to overwrite.
            tensors: Hugging Face name -> tensor.

        Returns:
            Digest of the tensors. None, with the file unchanged, if there is no such file, or if anything else has it
            open or mapped: its readers never see a change.
        """
        self._files = {inode: file for inode, file in self._files.items() if os.fstat(file.descriptor).st_nlink}
        try:
            inode = path.stat().st_ino
            file = self._files.pop(inode, None) or _open(path)
            if not _is_unused(file.descriptor):
                return None
            places = _places(path, file.content, tensors)
        except (OSError, ValueError, SafetensorError):
            return None
        if places is None:
            return None
        self._files[inode] = file

        def copy(name: str, tensor: torch.Tensor) -> WeightsDigest:
            digest = WeightsDigest()
            digest.update(name, tensor, copy_to=file.content[places[name]])
            return digest

        with ThreadPoolExecutor(num_threads()) as pool:
            return WeightsDigest.of(pool.map(copy, tensors.keys(), tensors.values()))


def bytes_to_fill(path: Path, num_bytes: int, *, spare: Path) -> NDArray[np.uint8]:
    """Bytes [num_bytes] of a file to fill: of the spare file, renamed to `path`, or of a new one.

    A spare file of another size, or one that anything else has open or mapped, is left alone.

    Raises:
        OSError: there is no memory for a new file.
    """
    with contextlib.suppress(OSError, ValueError):
        if spare.stat().st_size == num_bytes and _is_unused((file := _open(spare)).descriptor):
            spare.replace(path)
            return file.content
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # if there is no memory, this is an error, and a write a signal
        return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


def _open(path: Path) -> _File:
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        descriptor = os.dup(file.fileno())
    weakref.finalize(mapping, os.close, descriptor)
    return _File(descriptor, np.frombuffer(mapping, np.uint8))


def _is_unused(descriptor: int) -> bool:
    """Whether nothing else has a file open or mapped. Linux checks this before it gives a lease."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # if a process opens the file now; ignored by default
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _places(
    path: Path, content: NDArray[np.uint8], tensors: Mapping[str, torch.Tensor]
) -> dict[str, slice[int, int, None]] | None:
    """Name -> place of the tensor in the file; None if the file has other tensors."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    if {n: (t.dtype, t.shape) for n, t in found.items()} != {n: (t.dtype, t.shape) for n, t in tensors.items()}:
        return None
    body = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:body].tobytes())
    offsets = {name: header[name]["data_offsets"] for name in tensors}
    return {name: slice(body + start, body + end) for name, (start, end) in offsets.items()}
