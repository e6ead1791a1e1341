"""Buckets of published versions in the memory of the trainer rank that owns them, for `sync.route=direct`.

The rank trains on while engines receive a version, so each bucket is a copy. The buffers of a version that no replica
needs take the next version:

    publish 7    buffers A          A = 7
    publish 8    buffers B          A = 7, B = 8    a replica that starts late may still need 7
    publish 9    buffers A          A = 9, B = 8

A delivery of a removed version, to a receiver that is gone, may read a buffer that is overwritten; a receiver would
refuse it by its digest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from async_rl.weights.host_copy import HostCopy
from async_rl.weights.transport import UpdateError, version_number


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
