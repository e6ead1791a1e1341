"""Trainer ranks that keep published versions in their memory, for `sync.route=direct`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from async_rl.weights.broadcast import VersionServer
from async_rl.weights.digest import digest_of
from async_rl.weights.snapshots import Snapshots
from async_rl.weights.transport import Direct, Source, WeightUpdate, update_of

HOST = "127.0.0.1"


class TrainerMemory:
    """Ranks that own the buckets of `parts`, with their servers."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self.parts = parts
        self.ranks = [Snapshots() for _ in parts]
        self.servers = [VersionServer(HOST, held) for held in self.ranks]

    def publish(self, version: int, buckets: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> WeightUpdate:
        """Keep a version and return its update."""
        digests = {
            number: digest_of(held.start(version, number, buckets[number]).tensors())
            for numbers, held in zip(self.parts, self.ranks, strict=True)
            for number in numbers
        }
        update = update_of(Path(f"weights-{version}"), version=version, buckets=[digests[i] for i in sorted(digests)])
        sources = (Source(s.address, tuple(part)) for s, part in zip(self.servers, self.parts, strict=True))
        return replace(update, direct=Direct(tuple(sources), "gloo"))

    def close(self) -> None:
        for server in self.servers:
            server.close()
