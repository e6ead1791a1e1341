"""Checks that an engine's parameters changed when the published tensors changed.

The digests of the buckets prove that the engine read the tensors, not that its model has them. Therefore each rank also
reports a checksum of every parameter after each load. Engines fuse and split tensors under their own names, so both
sides are compared by module, whose names all engines share:

    published   model.layers.3.self_attn.{q,k,v,o}_proj.weight          digest of names, shapes and values
    live        model.layers.3.self_attn.{qkv,o}_proj.weight            checksum of every rank's part

If the digest of a module differs from one of the two loads before, its live checksum must differ too (a staged version
replaces the weights of the load before the previous one). A module with unchanged
tensors (frozen layers, learning rate 0) is not checked, nor is one that was published in other dtypes than before, such
as the first version of a float32 trainer that started from bfloat16. Swapped tensors change the checksum as well, so
this check does not find them; the comparison with other replicas and `async_rl.controller.probe` do.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence

from async_rl.weights.digest import WHOLE_MODEL, ModuleDigest, module_of


class LiveWeights:
    """Digests of the published tensors and checksums of the engine's parameters, by module.

    Args:
        dtype: dtype of the engine's weights. A module that was published in wider dtypes only is not compared, because
            rounding may hide a change.
        published: module -> digest of the weights that the engine loaded.
        ranks: for each tensor-parallel rank, parameter name -> checksum.
    """

    def __init__(
        self, *, dtype: str, published: Mapping[str, ModuleDigest], ranks: Sequence[Mapping[str, str]]
    ) -> None:
        self._dtype = dtype
        # A staged version replaces the weights of the load before the previous one.
        self._loads = deque([(published, _by_module(ranks))], maxlen=2)

    @property
    def checksum(self) -> str:
        """Checksum of all parameters on all ranks, equal for replicas with the same configuration and version."""
        return self._loads[-1][1][WHOLE_MODEL]

    def replace(self, published: Mapping[str, ModuleDigest], ranks: Sequence[Mapping[str, str]]) -> list[str]:
        """Compare a load with the two recorded loads before it, then record it.

        Returns:
            the modules whose parameters should have changed but did not. If there are any, the load is not recorded.
        """
        live = _by_module(ranks)
        unchanged = [
            module
            for module, given in published.items()
            for before, was in self._loads
            if module in before and _differs(given, before[module])
            if module in live and live[module] == was.get(module) and self._keeps_all_bits(given)
        ]
        if not unchanged:
            self._loads.append((published, live))
        return sorted(set(unchanged))

    def _keeps_all_bits(self, given: ModuleDigest) -> bool:
        return self._dtype == "float32" or self._dtype in given.dtypes


def _differs(given: ModuleDigest, before: ModuleDigest) -> bool:
    """Whether a module has other values than before; equal values in another dtype have another digest."""
    return given.digest != before.digest and given.dtypes == before.dtypes


def _by_module(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Module -> checksum of its parameters on all ranks; `WHOLE_MODEL` is one of the modules."""
    parts: dict[str, hashlib.blake2b] = {}
    for rank, checksums in enumerate(ranks):
        for name in sorted(checksums):
            entry = f"{rank}|{name}|{checksums[name]}|".encode()
            for module in (module_of(name), WHOLE_MODEL):
                parts.setdefault(module, hashlib.blake2b(digest_size=8)).update(entry)
    return {module: part.hexdigest() for module, part in parts.items()}
