"""Checksums of the parameters in an engine's model.

SGLang's server loads this file by its path, so the file must not import from async_rl.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64

PACKED = "_async_rl_packed"  # attribute of a layer: checksum of a weight that its CPU kernel holds in packed form
_Words = NDArray[np.int64] | NDArray[np.uint8]
_LANES = 256  # 64-bit words per row, see `_sums`


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of the shape, dtype and bytes of a tensor on any device.

    A tensor on the CPU is hashed completely. A tensor on another device is viewed as 64-bit words [rows, 256], summed
    there over rows and over columns, and the sums are hashed: swapped words change them. Therefore the checksums of a
    tensor on the CPU and of its copy on a device differ.
    """
    held = tensor.detach().contiguous()
    flat = held.as_strided((held.numel(),), (1,)).view(torch.uint8)  # reshape keeps any stride of a single value
    found = xxh3_64(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    for part in (_all_bytes if flat.is_cpu else _sums)(flat):
        found.update(part.data)
    return found.hexdigest()


def _all_bytes(flat: torch.Tensor) -> list[_Words]:
    return [flat.numpy()]


def _sums(flat: torch.Tensor) -> list[_Words]:
    """Bytes uint8 [2048 R + rest] -> sums int64 [256] over rows, sums int64 [R] over columns, uint8 [rest].

    5,000 bytes have R = 2 rows of 2,048 bytes and a rest of 904 bytes.
    """
    whole = len(flat) // (8 * _LANES) * 8 * _LANES
    words = (flat.clone() if flat.storage_offset() % 8 else flat)[:whole].view(torch.int64).view(-1, _LANES)
    return [part.cpu().numpy() for part in (words.sum(0), words.sum(1), flat[whole:])]


def model_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Name -> checksum of each parameter and persistent buffer that has elements."""
    return {name: checksum(tensor) for name, tensor in model.state_dict(keep_vars=True).items() if tensor.numel()}
