"""vLLM's side of the suite: the faults of `tests.conformance.planted`, and steps that can be slowed down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.inference.vllm import worker
from async_rl.inference.vllm.worker import LoadsUpdates
from async_rl.weights.digest import WeightsDigest
from tests.conformance.planted import LOADS

read_update = worker.read_update
EXTENSION = "tests.conformance.planted_vllm.PlantedLoads"


class PlantedLoads(LoadsUpdates):
    """Loads as `LoadsUpdates` until `plant` names a fault of `tests.conformance.planted`."""

    fault = ""
    full_speed: Any = None

    def plant(self, fault: str) -> None:
        PlantedLoads.fault = fault
        worker.read_update = _spoiled

    def slow_down(self: Any, step_s: float | None) -> None:
        """Make each step of the engine take `step_s` seconds more; None: full speed."""
        runner = self.model_runner
        execute = PlantedLoads.full_speed = PlantedLoads.full_speed or runner.execute_model

        def execute_slowly(*args: Any, **options: Any) -> Any:
            time.sleep(step_s or 0.0)
            return execute(*args, **options)

        runner.execute_model = execute if step_s is None else execute_slowly


def _spoiled(folder: Path, *, seen: WeightsDigest | None = None) -> Iterator[tuple[str, Any]]:
    """Instead of `async_rl.weights.transport.read_update`: the digest is right, and the tensors have the fault."""
    yield from LOADS.spoiled(PlantedLoads.fault, list(read_update(folder, seen=seen)))
