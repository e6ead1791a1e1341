"""Content hash of a set of named tensors, equal for trainer and engine whatever order they see them in."""

from __future__ import annotations

import hashlib

import torch


class WeightsDigest:
    """Feed every tensor once, in any order, then read `hexdigest()`."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Hash name, dtype, shape and bytes of a CPU tensor."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        entry = hashlib.blake2b(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), digest_size=16)
        entry.update(flat.numpy().data)
        self._entries[name] = entry.digest()

    def hexdigest(self) -> str:
        """32 hex digits."""
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self._entries):
            total.update(name.encode() + b"\0" + self._entries[name])
        return total.hexdigest()
