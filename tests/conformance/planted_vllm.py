"""vLLM's side of `tests.conformance.planted`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.engines.vllm_worker import LoadsUpdates
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import read_update
from tests.conformance.planted import LOADS

EXTENSION = "tests.conformance.planted_vllm.PlantedLoads"


class PlantedLoads(LoadsUpdates):
    """Loads as `LoadsUpdates` until `plant` names a fault of `tests.conformance.planted`."""

    fault = ""

    def plant(self, fault: str) -> None:
        PlantedLoads.fault = fault

    def load_update(self: Any, path: str) -> tuple[str, dict[str, str]]:
        tensors, digest = list(read_update(Path(path))), WeightsDigest()
        for name, tensor in tensors:
            digest.update(name, tensor)
        self.reload_weights(weights_iterator=iter(LOADS.spoiled(PlantedLoads.fault, tensors)))
        return digest.hexdigest(), self.live_checksums()
