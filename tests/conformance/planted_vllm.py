"""vLLM's side of the suite: the faults of `tests.conformance.planted`, and steps that can be slowed down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from async_rl.inference.vllm.worker import LoadsUpdates
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import read_update
from tests.conformance.planted import LOADS

EXTENSION = "tests.conformance.planted_vllm.PlantedLoads"


class PlantedLoads(LoadsUpdates):
    """Loads as `LoadsUpdates` until `plant` names a fault of `tests.conformance.planted`."""

    fault = ""
    full_speed: Any = None

    def plant(self, fault: str) -> None:
        PlantedLoads.fault = fault

    def slow_down(self: Any, step_s: float | None) -> None:
        """Make each step of the engine take `step_s` seconds more; None: full speed."""
        runner = self.model_runner
        execute = PlantedLoads.full_speed = PlantedLoads.full_speed or runner.execute_model

        def execute_slowly(*args: Any, **options: Any) -> Any:
            time.sleep(step_s or 0.0)
            return execute(*args, **options)

        runner.execute_model = execute if step_s is None else execute_slowly

    def load_update(self: Any, path: str) -> tuple[str, dict[str, str]]:
        tensors, digest = list(read_update(Path(path))), WeightsDigest()
        for name, tensor in tensors:
            digest.update(name, tensor)
        self.reload_weights(weights_iterator=iter(LOADS.spoiled(PlantedLoads.fault, tensors)))
        return digest.hexdigest(), self.live_checksums()
