"""Proof that an engine's parameters changed when the published tensors did.

The digest of an update proves that the engine read it, not that its model holds it. So the engine also reports a
checksum of every parameter after each load. Engines fuse and split tensors under names of their own, so both sides are
compared by module, whose names all engines share:

    published   model.layers.3.self_attn.{q,k,v,o}_proj.weight          digest of their names, shapes and values
    live        model.layers.3.self_attn.{qkv,o}_proj.weight            checksum of every rank's part

If the digest of a module differs from that of the load before, its live checksum must differ too. A module whose
tensors did not change (frozen layers, a learning rate of 0) proves nothing and is not refused. Swapped tensors change
the checksum as well; they are found by the comparison with other replicas and by `async_rl.weights.probe`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from async_rl.weights.digest import WHOLE_MODEL, ModuleDigest, module_of


class LiveWeights:
    """Digests of the published tensors, and checksums of the parameters in the model, by module.

    Args:
        dtype: of the engine's weights. A module that was published in a wider one alone is not compared: rounding may
            hide that it changed.
        published: of the weights that the engine holds.
        ranks: of every tensor-parallel rank, parameter name -> checksum.
    """

    def __init__(
        self, *, dtype: str, published: Mapping[str, ModuleDigest], ranks: Sequence[Mapping[str, str]]
    ) -> None:
        self._dtype = dtype
        self._published = published
        self._live = _by_module(ranks)

    @property
    def checksum(self) -> str:
        """Of all parameters of all ranks; replicas of one configuration and version have the same."""
        return self._live[WHOLE_MODEL]

    def replace(self, published: Mapping[str, ModuleDigest], ranks: Sequence[Mapping[str, str]]) -> list[str]:
        """Note a load; return the modules that were published with other tensors and whose parameters are the same.

        With any, the load is not noted: what was noted before stays the content that digests and checksums agree on.
        """
        live = _by_module(ranks)
        unchanged = [
            module
            for module, given in published.items()
            if module in self._published and given.digest != self._published[module].digest
            if module in live and live[module] == self._live.get(module) and self._keeps_all_bits(given)
        ]
        if not unchanged:
            self._published, self._live = published, live
        return unchanged

    def _keeps_all_bits(self, given: ModuleDigest) -> bool:
        return self._dtype == "float32" or self._dtype in given.dtypes


def _by_module(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Module -> checksum of its parameters on all ranks; the whole model is a module too."""
    parts: dict[str, hashlib.blake2b] = {}
    for rank, checksums in enumerate(ranks):
        for name in sorted(checksums):
            entry = f"{rank}|{name}|{checksums[name]}|".encode()
            for module in (module_of(name), WHOLE_MODEL):
                parts.setdefault(module, hashlib.blake2b(digest_size=8)).update(entry)
    return {module: part.hexdigest() for module, part in parts.items()}
