"""Methods added to vLLM's worker: load a published version in one call between two engine steps, and pin routing.

A load also returns checksums of the model's parameters, which prove that the load changed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from async_rl.weights.checksum import PACKED, model_checksums
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import read_update


class LoadsUpdates:
    """Mixin for vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls its methods on every rank.

    `self` is the worker, whose other methods vLLM and `async_rl.compat.vllm` define.
    """

    def load_update(self: Any, path: str) -> tuple[str, dict[str, str]]:
        """Load all tensors of a published version.

        The call runs between two engine steps, so no forward pass uses a partly loaded version.

        Returns:
            Digest of the tensors that were read, and `live_checksums` after the load.
        """
        digest = WeightsDigest()
        self.reload_weights(weights_iterator=_hashed(read_update(Path(path)), digest))
        return digest.hexdigest(), self.live_checksums()

    def live_checksums(self: Any) -> dict[str, str]:
        """Name -> checksum for each parameter and persistent buffer of this worker's model."""
        model = self.get_model()
        packed = [(name, getattr(module, PACKED, None)) for name, module in model.named_modules()]
        return {
            **model_checksums(model),
            **{f"{name}.packed": noted for name, noted in packed if noted is not None},
        }

    def pin_routing(self: Any, rows: dict[str, dict[str, Any]]) -> None:
        """Use the recorded experts of running requests if their K/V has to be computed again.

        Args:
            rows: `async_rl.inference.vllm.segment.encode_rows` of each request, by its id in the engine.
        """
        self.model_runner.pin_routing(rows)


def _hashed(tensors: Iterable[tuple[str, torch.Tensor]], digest: WeightsDigest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors unchanged and add each to `digest`."""
    for name, tensor in tensors:
        digest.update(name, tensor)
        yield name, tensor
