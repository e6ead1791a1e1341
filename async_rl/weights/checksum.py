"""Checksums of the parameters that an engine's model holds.

SGLang's server loads this file by its path, so it imports nothing of async_rl.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64

_Words = NDArray[np.int64] | NDArray[np.uint8]
_LANES = 256  # columns in which the words of a tensor on a device are summed


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of the shape, dtype and bytes of a tensor, which may be on any device.

    A tensor on a device stays there: what is hashed are sums of its 64-bit words [rows, 256], over rows and over
    columns, so that words which trade places change them. The checksums of a tensor on CPU and device differ.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    found = xxh3_64(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    for part in (_all_bytes if flat.is_cpu else _sums)(flat):
        found.update(part.data)
    return found.hexdigest()


def _all_bytes(flat: torch.Tensor) -> list[_Words]:
    return [flat.numpy()]


def _sums(flat: torch.Tensor) -> list[_Words]:
    """Bytes uint8 [2048 R + rest] -> int64 [256] over rows, int64 [R] over columns, uint8 [rest]."""
    whole = len(flat) // (8 * _LANES) * 8 * _LANES
    words = (flat.clone() if flat.storage_offset() % 8 else flat)[:whole].view(torch.int64).view(-1, _LANES)
    return [part.cpu().numpy() for part in (words.sum(0), words.sum(1), flat[whole:])]


def model_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Name -> checksum of each parameter and persistent buffer that has elements."""
    return {name: checksum(tensor) for name, tensor in model.state_dict(keep_vars=True).items() if tensor.numel()}
