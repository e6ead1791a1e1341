"""Says what the model was given: a digest over every tensor of a load, and parameters that no tensor filled.

SGLang skips a tensor whose name it does not know without a word, so a first load is checked from the other side: every
parameter is NaN before and must be something else after.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantized parameters are left alone
REPORT = "async_rl"  # key in /server_info
LOADED = "loaded digests="  # in the message of an update


def _digest_class() -> Any:
    """`async_rl.weights.digest.WeightsDigest`, by path: async_rl is not installed beside SGLang."""
    path = Path(__file__).parents[4] / "weights" / "digest.py"
    spec = importlib.util.spec_from_file_location("async_rl_sglang._digest", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WeightsDigest


class _Loads:
    """State of this process: digest of the last load."""

    digest: str = ""


def load_and_hash(load: Callable[..., None], model: torch.nn.Module, weights: Any, target_device: Any) -> None:
    """Around DefaultModelLoader.load_weights_only, which loads at the start and at every update."""
    first = not _Loads.digest
    if first:
        _poison(model)
    digest = _digest_class()()
    load(model, _hashed(weights, digest), target_device)
    if first:
        _refuse_poison(model)
    _Loads.digest = digest.hexdigest()


def report_start(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """After Scheduler.get_init_info, which ends up in /server_info: the first digests, and the hooks that hold."""
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks = sorted(registry.HookRegistry._patched)
    return {**info, REPORT: {"digests": _digests(scheduler.tp_group.cpu_group), "hooks": hooks}}


def report_update(answer: Any, updater: Any, request: Any) -> Any:
    """After SchedulerWeightUpdaterManager.update_weights_from_disk: the digest travels in its message."""
    del request
    if answer.success:
        answer.message = f"{answer.message} {LOADED}{','.join(_digests(updater.tp_cpu_group))};"
    return answer


def flush_pools_only(scheduler: Any, empty_cache: bool = True) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Before Scheduler.flush_cache: the allocator's own cache is left alone, or a flush takes 0.4 s on the CPU."""
    del empty_cache
    return (scheduler,), {"empty_cache": False}


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only": (load_and_hash, "AROUND"),
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": (report_start, "AFTER"),
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": (flush_pools_only, "BEFORE"),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk": (
        report_update,
        "AFTER",
    ),
}


def _digests(group: Any) -> list[str]:
    """Digest of every tensor-parallel rank; one means that all agree."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, _Loads.digest, group=group)
    return sorted(set(found))


def _hashed(tensors: Iterable[tuple[str, torch.Tensor]], digest: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on and hash what passes."""
    for name, tensor in tensors:
        digest.update(name, tensor.cpu())
        yield name, tensor


def _poison(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype in CHECKED_DTYPES:
            parameter.data.fill_(float("nan"))


def _refuse_poison(model: torch.nn.Module) -> None:
    unfilled = [n for n, p in model.named_parameters() if p.dtype in CHECKED_DTYPES and bool(p.isnan().any())]
    if unfilled:
        raise RuntimeError(
            f"the checkpoint has no tensor that fills {len(unfilled)} parameters of the model "
            f"({', '.join(unfilled[:3])}, ...); save it with the names that SGLang knows"
        )
