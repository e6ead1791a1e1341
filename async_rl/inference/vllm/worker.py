"""Methods added to vLLM's worker: load a published version between two engine steps, or beside them, and pin routing.

A load also returns checksums of the model's parameters, which prove that the load changed them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from async_rl.weights.checksum import PACKED, model_checksums
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.store import on_this_node
from async_rl.weights.transport import read_update
from async_rl.weights.twin import Staging, Twin

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Loaded: TypeAlias = tuple[str, dict[str, str]]
"""Digest of the tensors that were read, and `LoadsUpdates.live_checksums` after the load."""


class LoadsUpdates:
    """Mixin for vLLM's worker class (`worker_extension_cls`); `collective_rpc` calls its methods on every rank.

    `self` is the worker, whose other methods vLLM and `async_rl.compat.vllm` define.
    """

    def load_update(self: Any, path: str) -> Loaded:
        """Load all tensors of a published version.

        The call runs between two engine steps, so no forward pass uses a partly loaded version.
        """
        from async_rl.compat.vllm_reload import pack_tied_head  # imports vLLM

        digest = WeightsDigest()
        self.reload_weights(weights_iterator=read_update(on_this_node(Path(path)), seen=digest))
        pack_tied_head(self.get_model(), self.vllm_config)
        return digest.hexdigest(), self.live_checksums()

    def start_staging(self: Any, path: str) -> None:
        """Start to load a published version into a twin of the model, in a thread."""
        if not hasattr(self, "staging"):
            self.staging = Staging[Loaded]()
        self.staging.start(
            self.get_model(), partial(_load_twin, path=on_this_node(Path(path)), config=self.vllm_config)
        )

    def is_staged(self: Any) -> bool:
        """Whether the load of `start_staging` has ended.

        Raises:
            UpdateError: the version cannot be read whole; the model is unchanged.
        """
        return self.staging.done()

    def commit_staged(self: Any) -> Loaded:
        """Exchange the weights between two engine steps."""
        return self.staging.commit()

    def live_checksums(self: Any) -> dict[str, str]:
        """Name -> checksum for each parameter and persistent buffer of this worker's model."""
        return _checksums(self.get_model())

    def pin_routing(self: Any, rows: dict[str, dict[str, Any]]) -> None:
        """Use the recorded experts of running requests if their K/V has to be computed again.

        Args:
            rows: `async_rl.inference.vllm.segment.encode_rows` of each request, by its id in the engine.
        """
        self.model_runner.pin_routing(rows)


def _load_twin(twin: Twin, *, path: Path, config: VllmConfig) -> Loaded:
    """Load a published version into a twin, while the model decodes."""
    from async_rl.compat.vllm_reload import reload_twin  # imports vLLM

    digest = WeightsDigest()
    reload_twin(twin, read_update(path, seen=digest), config=config)
    return digest.hexdigest(), _checksums(twin.model)


def _checksums(model: torch.nn.Module) -> dict[str, str]:
    packed = [(name, getattr(module, PACKED, None)) for name, module in model.named_modules()]
    return {
        **model_checksums(model),
        **{f"{name}.packed": noted for name, noted in packed if noted is not None},
    }
