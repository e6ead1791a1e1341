"""Checksums of the parameters that an engine's model holds.

SGLang's server loads this file by its path, so it imports nothing of async_rl.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

_Words = NDArray[np.int64]
_LANES = 256  # columns in which the words of a tensor are summed


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of the shape, dtype and bytes of a tensor, which may be on any device.

    The bytes are taken as 64-bit words [rows, 256], and each word enters with a weight of its row and one of its
    column, so that words which trade places change the sum. It costs two reads of the tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // (8 * _LANES) * 8 * _LANES
    found = hashlib.blake2b(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode(), digest_size=8)
    if whole:
        columns, rows = (_sums_on_cpu if flat.is_cpu else _sums_on_device)(flat[:whole])
        found.update(columns.tobytes())
        found.update((rows * np.arange(3, 2 * len(rows) + 3, 2)).sum().tobytes())  # wraps around
    found.update(flat[whole:].cpu().numpy().tobytes())
    return found.hexdigest()


def _sums_on_cpu(flat: torch.Tensor) -> tuple[_Words, _Words]:
    """Sums of bytes uint8 [2048 R]: int64 [256] of columns, int64 [R] of rows. numpy has less overhead per call."""
    words: _Words = flat.numpy().view(np.int64).reshape(-1, _LANES)
    return words.sum(0), words.sum(1)


def _sums_on_device(flat: torch.Tensor) -> tuple[_Words, _Words]:
    """As `_sums_on_cpu`, on the device of `flat`."""
    words = (flat.clone() if flat.storage_offset() % 8 else flat).view(torch.int64).view(-1, _LANES)
    return words.sum(0).cpu().numpy(), words.sum(1).cpu().numpy()


def model_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Name -> checksum of each parameter and persistent buffer that has elements."""
    return {name: checksum(tensor) for name, tensor in model.state_dict(keep_vars=True).items() if tensor.numel()}
