"""What a vLLM worker learns: to load a published version in one call, between two engine steps, and to pin routing.

It also reports checksums of the parameters that its model holds, which a load must have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from async_rl.weights.checksum import model_checksums
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import read_update

PACKED = "_async_rl_packed"  # on a layer: checksum of the weight that its CPU kernel keeps in a form of its own


class ForcesRouting(Protocol):
    """The part of a model runner that the mixin stands on; see `async_rl.engines.vllm_cpu`."""

    def pin_routing(self, rows: Mapping[str, Mapping[str, Any]]) -> None: ...


class ReloadsWeights(Protocol):
    """The part of vLLM's worker that the mixin stands on."""

    model_runner: ForcesRouting

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def get_model(self) -> torch.nn.Module: ...
    def live_checksums(self) -> dict[str, str]: ...


class LoadsUpdates:
    """Mixed into vLLM's worker class through `worker_extension_cls`; its methods are called by `collective_rpc`."""

    def load_update(self: ReloadsWeights, path: str) -> tuple[str, dict[str, str]]:
        """Load every tensor of a written version; return the digest of what was read, and `live_checksums` after it.

        Runs whole between two engine steps, so no forward pass sees half of a version.
        """
        digest = WeightsDigest()
        self.reload_weights(weights_iterator=_hashed(read_update(Path(path)), digest))
        return digest.hexdigest(), self.live_checksums()

    def live_checksums(self: ReloadsWeights) -> dict[str, str]:
        """Checksum of each parameter and persistent buffer of this worker's model."""
        model = self.get_model()
        packed = [(name, getattr(module, PACKED, None)) for name, module in model.named_modules()]
        return {
            **model_checksums(model),
            **{f"{name}.packed": noted for name, noted in packed if noted is not None},
        }

    def pin_routing(self: ReloadsWeights, rows: dict[str, dict[str, Any]]) -> None:
        """Route the positions of running requests as recorded, should their K/V have to be computed again."""
        self.model_runner.pin_routing(rows)


def _hashed(tensors: Iterable[tuple[str, torch.Tensor]], digest: WeightsDigest) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on and hash what passes."""
    for name, tensor in tensors:
        digest.update(name, tensor)
        yield name, tensor
