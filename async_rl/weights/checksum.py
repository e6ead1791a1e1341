"""Checksums and sums of the values of the parameters in an engine's model.

SGLang's server loads this file by its path, so the file must not import from async_rl.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64

PACKED = "_async_rl_packed"  # attribute of a layer: content of a weight that its CPU kernel holds in packed form
Content = tuple[str, list[int]]
"""Checksum and `value_sums` of a live tensor; a buffer has no sums, because it may be computed by the engine."""
_Words = NDArray[np.int64] | NDArray[np.uint8]
_LANES = 256  # 64-bit words per row, see `_sums`
_FACTOR, _SHIFT = -1640531527, 15  # of the hash of a value
_BLOCK, _BLOCK_OF_DEVICE = 1 << 16, 1 << 24  # values that are hashed at once; on the CPU they stay in its cache


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


def value_sums(tensor: torch.Tensor) -> list[int]:
    """Sum of the hashes of the values, for each leading index of a tensor with three dimensions or more, else one.

    Dimensions of size 1 do not count. Neither the order of the values nor their dtype changes a sum, and zeros add
    nothing. So if an engine fuses, splits over ranks, transposes, pads or packs weights, the sums stay additive: a
    qkv_proj with the sums a and b on two ranks has a + b = q + k + v.
    """
    sizes = [size for size in tensor.shape if size > 1]
    count = sizes[0] if len(sizes) > 2 else 1
    rows = tensor.detach().reshape(count, tensor.numel() // count)
    block = _BLOCK if tensor.is_cpu else _BLOCK_OF_DEVICE
    sums: list[int] = []
    for some in rows.split(max(1, block // max(1, rows.shape[1]))):
        first, *more = (_hash_sums(part) for part in some.split(block, dim=1))
        sums += sum(more, first).tolist()
    return sums


def _hash_sums(values: torch.Tensor) -> NDArray[np.int64]:
    """Values [r, n] -> sums int64 [r] of the 32-bit hashes of their float32 bits; the hash of 0 is 0."""
    bits = values.to(torch.float32).contiguous().view(torch.int32)
    if values.is_cpu:
        words = bits.numpy() * np.int32(_FACTOR)
        words ^= words >> _SHIFT
        return words.sum(1, dtype=np.int64)
    hashes = bits * _FACTOR
    hashes ^= hashes >> _SHIFT
    return hashes.sum(1, dtype=torch.int64).cpu().numpy()


def sums_for(model: torch.nn.Module) -> Callable[[torch.Tensor], list[list[int]]]:
    """A function: published CPU tensor -> its `value_sums`, and those after rounding to the half precision of a model.

    Args:
        model: model of an engine, completely loaded. Tensors are hashed on its device.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    half = next((p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)), None)

    def sums(tensor: torch.Tensor) -> list[list[int]]:
        here = tensor.to(device)
        rounded = () if half in (None, tensor.dtype) else (here.to(half),)
        return [value_sums(each) for each in (here, *rounded)]

    return sums


def content(parameter: torch.Tensor) -> Content:
    """Checksum and sums of a parameter."""
    return checksum(parameter), value_sums(parameter)


def model_contents(model: torch.nn.Module) -> dict[str, Content]:
    """Name -> content of each parameter and persistent buffer that has elements."""
    return {
        name: content(tensor) if isinstance(tensor, torch.nn.Parameter) else (checksum(tensor), [])
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.numel()
    }
