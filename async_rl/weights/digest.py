"""Content hash of a set of named tensors. It does not depend on the order of the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

WHOLE_MODEL = "the whole model"  # name of the module that contains all tensors
_BLOCK = 256 << 10  # bytes that are hashed after they are copied, while they are in the cache of the core
_MODULE = re.compile(r"(?:.*\.)?layers\.\d+\.[^.]+(?=\.)")


def module_of(name: str) -> str:
    """Module of a tensor: the child of a layer, or the tensor itself if it is outside the layers.

    `model.layers.3.mlp.experts.5.up_proj.weight` -> `model.layers.3.mlp`; `model.norm.weight` -> `model.norm.weight`.
    """
    found = _MODULE.match(name)
    return name if found is None else found[0]


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Bytes [n] of a CPU tensor, in its memory if it is contiguous."""
    import torch  # a configuration does without it

    held = tensor.detach().contiguous()
    flat = held.as_strided((held.numel(),), (1,)).view(torch.uint8)  # reshape keeps any stride of a single value
    return flat.numpy()


class ModuleDigest(NamedTuple):
    """Content of one module."""

    digest: str
    """32 hex digits of names, dtypes, shapes and values."""
    dtypes: tuple[str, ...]
    """Distinct dtypes of the tensors, for example `float32`."""


class WeightsDigest:
    """Feed every tensor once, in any order, then read `hexdigest()`."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._dtypes: dict[str, str] = {}

    @classmethod
    def of(cls, parts: Iterable[WeightsDigest]) -> WeightsDigest:
        """Digest of the tensors of all `parts`."""
        total = cls()
        for part in parts:
            total._entries |= part._entries
            total._dtypes |= part._dtypes
        return total

    def update(self, name: str, tensor: torch.Tensor, *, copy_to: NDArray[np.uint8] | None = None) -> None:
        """Hash name, dtype, shape and bytes of a CPU tensor, and copy the bytes if they have a target [n]."""
        entry = xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        data = bytes_of(tensor)
        if copy_to is None:
            entry.update(data.data)
        else:
            for start in range(0, len(data), _BLOCK):
                copied = copy_to[start : start + _BLOCK]
                copied[:] = data[start : start + _BLOCK]
                entry.update(copied.data)
        self._entries[name] = entry.digest()
        self._dtypes[name] = str(tensor.dtype).removeprefix("torch.")

    def add(self, name: str, *, of: WeightsDigest) -> None:
        """Add a tensor that `of` has hashed."""
        self._entries[name] = of._entries[name]
        self._dtypes[name] = of._dtypes[name]

    def hexdigest(self) -> str:
        """32 hex digits of all tensors."""
        return self._of(sorted(self._entries))

    def modules(self) -> dict[str, ModuleDigest]:
        """Module (see `module_of`) -> digest; `WHOLE_MODEL` is one of the modules."""
        names: dict[str, list[str]] = {WHOLE_MODEL: sorted(self._entries)}
        for name in names[WHOLE_MODEL]:
            names.setdefault(module_of(name), []).append(name)
        return {
            module: ModuleDigest(self._of(of), tuple(sorted({self._dtypes[name] for name in of})))
            for module, of in names.items()
        }

    def _of(self, names: list[str]) -> str:
        total = xxh3_128()
        for name in names:
            total.update(name.encode() + b"\0" + self._entries[name])
        return total.hexdigest()
