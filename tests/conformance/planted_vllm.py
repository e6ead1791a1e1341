"""vLLM's side of the suite: the faults of `tests.conformance.planted`, and steps that can be slowed down."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from async_rl.inference.vllm import worker
from async_rl.inference.vllm.worker import LoadsUpdates
from tests.conformance.planted import LOADS

load_share = worker.load_share
EXTENSION = "tests.conformance.planted_vllm.PlantedLoads"


class PlantedLoads(LoadsUpdates):
    """Loads as `LoadsUpdates` until `plant` names a fault of `tests.conformance.planted`."""

    fault = ""
    full_speed: Any = None

    def plant(self, fault: str) -> None:
        PlantedLoads.fault = fault
        worker.load_share = _spoiled

    def slow_down(self: Any, step_s: float | None) -> None:
        """Make each step of the engine take `step_s` seconds more; None: full speed."""
        runner = self.model_runner
        execute = PlantedLoads.full_speed = PlantedLoads.full_speed or runner.execute_model

        def execute_slowly(*args: Any, **options: Any) -> Any:
            time.sleep(step_s or 0.0)
            return execute(*args, **options)

        runner.execute_model = execute if step_s is None else execute_slowly


def _spoiled(
    buckets: Iterable[Any], load: Callable[[Iterator[tuple[str, Any]]], object], **options: Any
) -> dict[str, Any]:
    """Instead of `async_rl.weights.digest.load_share`: the report is right, and the tensors have the fault.

    skipped: the loader of rank 1 does not take the last tensor.
    """
    held = list(buckets)

    def spoil(tensors: Iterator[tuple[str, Any]]) -> None:
        if PlantedLoads.fault == "skipped":
            taken = sum(map(len, held)) - (torch.distributed.get_rank() == 1)
            load(islice(tensors, taken))
        else:
            load(iter(LOADS.spoiled(PlantedLoads.fault, list(tensors))))

    return load_share(held, spoil, **options)
