"""Checksums of the parameters that an engine's model holds.

SGLang's server loads this file by its path, so it imports nothing of async_rl.
"""

from __future__ import annotations

import hashlib

import torch

_LANES = 256  # columns in which the words of a tensor are summed


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of the shape, dtype and bytes of a tensor, which may be on any device.

    The bytes are taken as 64-bit words [rows, 256], and each word enters with a weight of its row and one of its
    column, so that words which trade places change the sum. It costs two reads of the tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // (8 * _LANES) * 8 * _LANES
    found = hashlib.blake2b(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode(), digest_size=8)
    if whole:
        words = flat[:whole].view(torch.int64).view(-1, _LANES)
        found.update(words.sum(0).cpu().numpy().tobytes())
        rows = words.sum(1)
        place = torch.arange(1, len(rows) + 1, device=rows.device, dtype=torch.int64)
        found.update((rows * (2 * place + 1)).sum().cpu().numpy().tobytes())
    found.update(flat[whole:].cpu().numpy().tobytes())
    return found.hexdigest()


def model_checksums(model: torch.nn.Module) -> dict[str, str]:
    """Name -> checksum of each parameter and persistent buffer that has elements."""
    persistent = model.state_dict().keys()
    held = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0] in persistent)]
    return {name: checksum(tensor) for name, tensor in held if tensor.numel()}
