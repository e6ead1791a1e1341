"""Copies of buckets in the memory of the trainer rank that owns them.

A copy has the tensors of a bucket in one buffer of the host:

    buffer   | embedding: bytes 0 to 4,000 | 32 free | query: bytes 4,032 to 5,056 |

From a GPU the copies run while the process goes on. An owner that writes one bucket while it copies the next has two
buffers in turn.

With `sync.route=direct` the rank trains on while engines receive a version, so it keeps a copy of each bucket. The
buffers of a version that no replica needs take the next version:

    publish 7    buffers A          A = 7
    publish 8    buffers B          A = 7, B = 8    a replica that starts late may still need 7
    publish 9    buffers A          A = 9, B = 8

A delivery of a removed version, to a receiver that is gone, may read a buffer that is overwritten; a receiver would
refuse it by its digest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from async_rl.weights.group import Layout, tensors_of
from async_rl.weights.transport import UpdateError, version_number

_ALIGNMENT = 64  # bytes


class HostCopy:
    """A buffer and the tensors in it. The next bucket may overwrite it.

    Args:
        stream: for copies from a GPU, into pinned memory; None if the tensors are on the CPU.

    Attributes:
        layout: place of each tensor in `data`.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = 0
        self._copied: Any = None  # event after the copies
        self.layout: Layout = []

    @property
    def data(self) -> torch.Tensor:
        """Bytes uint8 [n] of all tensors, in the buffer."""
        return self._buffer[: self._num_bytes]

    @torch.no_grad()
    def start(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> HostCopy:
        """Overwrite the buffer with (name, tensor on any device); a larger bucket gets a larger buffer.

        Copies from a GPU have not ended on return. They follow the work that the current stream has so far.
        """
        given, end = list(tensors), 0
        self.layout = []
        for name, tensor in given:
            self.layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        if end > len(self._buffer):
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._num_bytes = end
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for (_, tensor), (_, copy) in zip(given, tensors_of(self.data, self.layout), strict=True):
                copy.copy_(tensor, non_blocking=True)
                if self._stream is not None:
                    tensor.record_stream(self._stream)  # its memory is used until then
        self._copied = None if self._stream is None else self._stream.record_event()
        return self

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor in the buffer), as soon as the copies have ended."""
        if self._copied is not None:
            self._copied.synchronize()
        return tensors_of(self.data, self.layout)


class Snapshots:
    """The buckets that this rank owns.

    Args:
        stream: see `HostCopy`.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._versions: dict[int, dict[int, HostCopy]] = {}
        self._free: dict[int, list[HostCopy]] = defaultdict(list)  # by number of the bucket

    def start(self, version: int, number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> HostCopy:
        """Start to copy a bucket; see `HostCopy.start`."""
        free = self._free[number]
        copy = (free.pop() if free else HostCopy(self._stream)).start(tensors)
        self._versions.setdefault(version, {})[number] = copy
        return copy

    def bucket(self, version: str, number: int) -> HostCopy:
        """A bucket of a version, by the name of its folder.

        Raises:
            UpdateError: this rank does not have it.
        """
        try:
            return self._versions[version_number(version)][number]
        except KeyError:
            raise UpdateError(f"the trainer rank has no bucket {number} of {version}") from None

    def discard(self, *, keep_version: int) -> None:
        """Free the buffers of every version older than `keep_version`."""
        for version in [version for version in self._versions if version < keep_version]:
            for number, copy in self._versions.pop(version).items():
                self._free[number].append(copy)
