"""Reports each load: a digest of the tensors, and checksums of the parameters after the load. Stages versions.

SGLang silently skips tensors with unknown names. Therefore the first load is checked on the model: every parameter is
set to NaN before the load, and a parameter that is still NaN after the load is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantized parameters are not checked
REPORT = "async_rl"  # key of the report in /server_info
LOADED = "loaded by rank: "  # precedes the JSON report in the message of an update
STORE_VARIABLE = "ASYNC_RL_STORE"  # see `async_rl.weights.store`
STAGED = "staged"  # message when all ranks have loaded a version beside the model


@cache
def _weights_module(name: str) -> Any:
    """A module of `async_rl.weights`, imported by path, because async_rl is not installed in SGLang's virtualenv."""
    path = Path(__file__).parents[4] / "weights" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"async_rl_sglang._{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Loads:
    """State of this process."""

    digest: str = ""
    """Digest of the last load; empty before the first load."""
    staging: Any = None
    """`async_rl.weights.twin.Staging`, whose loads return the report of this rank; None before the first."""


def load_and_hash(load: Callable[..., None], model: torch.nn.Module, weights: Any, target_device: Any) -> None:
    """Hook around DefaultModelLoader.load_weights_only, which runs at the start and at every update."""
    first = not _Loads.digest
    if first:
        _poison(model)
    digest = _weights_module("digest").WeightsDigest()
    load(model, _hashed(weights, digest), target_device)
    if first:
        _refuse_poison(model)
    _Loads.digest = digest.hexdigest()


def report_start(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Hook after Scheduler.get_init_info: add the first load and the applied hooks to /server_info."""
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks = sorted(registry.HookRegistry._patched)
    ranks = _load_by_rank(scheduler.tp_worker, group=scheduler.tp_group.cpu_group)
    return {**info, REPORT: {"ranks": ranks, "hooks": hooks}}


def pass_report(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Hook after DataParallelController.get_init_info: pass on the report, which is the same from each scheduler."""
    return {**info, REPORT: controller._scheduler_init_infos[0][REPORT]}


def report_update(update: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Hook around SchedulerWeightUpdaterManager.update_weights_from_disk: add the report to the message."""
    request.model_path = str(_on_this_node(Path(request.model_path)))
    answer = update(updater, request)
    if answer.success:
        ranks = _load_by_rank(updater.tp_worker, group=updater.tp_cpu_group)
        answer.message = f"{answer.message} {LOADED}{json.dumps(ranks)}"
    return answer


def stage(check: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Hook around SchedulerWeightUpdaterManager.check_weights, which runs beside requests: adds three actions.

    `stage FOLDER` starts to load a version into a twin of the model. `staged` tells whether all ranks have loaded it.
    `commit` exchanges the weights and reports the load in the message.
    """
    action, _, folder = request.action.partition(" ")
    if action not in ("stage", "staged", "commit"):
        return check(updater, request)
    io: Any = importlib.import_module("sglang.srt.managers.io_struct")
    try:
        message = {"stage": _start, "staged": _is_staged, "commit": _commit}[action](updater, folder)
        return io.CheckWeightsReqOutput(success=True, message=message)
    except Exception as error:  # noqa: BLE001 - an error in the scheduler would end the server
        return io.CheckWeightsReqOutput(success=False, message=f"{type(error).__name__}: {error}")


def _start(updater: Any, folder: str) -> str:
    _Loads.staging = _Loads.staging or _weights_module("twin").Staging()
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    runner = updater.tp_worker.model_runner
    device = torch.device(runner.device)

    def load(twin: Any) -> dict[str, Any]:
        loader.restore_weights_before_loading(twin.model, device)
        loader.load_weights_and_postprocess(twin.model, _tensors(_on_this_node(Path(folder))), device)
        return {"digest": _Loads.digest, "checksums": _weights_module("checksum").model_checksums(twin.model)}

    _Loads.staging.start(runner.model, load)
    return "started"


def _is_staged(updater: Any, _: str) -> str:
    """STAGED if all ranks have loaded. Collective; raises the error of any rank on all."""
    try:
        here = (_Loads.staging.done(), "")
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        here = (True, f"{type(error).__name__}: {error}")
    ranks = _gathered(here, group=updater.tp_cpu_group)
    if errors := [error for _, error in ranks if error]:
        raise RuntimeError(errors[0])
    return STAGED if all(done for done, _ in ranks) else "not yet"


def _commit(updater: Any, _: str) -> str:
    return f"{LOADED}{json.dumps(_gathered(_Loads.staging.commit(), group=updater.tp_cpu_group))}"


def _on_this_node(folder: Path) -> Path:
    """See `async_rl.weights.store.on_this_node`, whose module this virtualenv cannot import."""
    store = os.environ.get(STORE_VARIABLE)
    return folder if store is None else Path(store) / folder.name


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, file.get_tensor(name)


def flush_pools_only(scheduler: Any, empty_cache: bool = True) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Hook before Scheduler.flush_cache: keep the allocator's cache; flushing it takes 0.4 s on the CPU."""
    del empty_cache
    return (scheduler,), {"empty_cache": False}


async def flush_all(flush: Callable[..., Any], manager: Any, timeout_s: float | None = None) -> Any:
    """Hook around TokenizerControlMixin.flush_cache: the first answer that is a failure, if any.

    With attention data parallelism, SGLang asks the scheduler of every group and returns the answer of the first.
    """
    del flush
    io: Any = importlib.import_module("sglang.srt.managers.io_struct")
    answers = await manager.flush_cache_communicator(io.FlushCacheReqInput(timeout_s=timeout_s))
    return next((answer for answer in answers if not answer.success), answers[0])


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only": (load_and_hash, "AROUND"),
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": (report_start, "AFTER"),
    "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info": (pass_report, "AFTER"),
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache": (flush_all, "AROUND"),
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": (flush_pools_only, "BEFORE"),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk": (
        report_update,
        "AROUND",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights": (
        stage,
        "AROUND",
    ),
}


def _load_by_rank(worker: Any, *, group: Any) -> list[dict[str, Any]]:
    """For each tensor-parallel rank: digest of the last load, and checksums of its parameters. Collective."""
    checksums = _weights_module("checksum").model_checksums(worker.model_runner.model)
    return _gathered({"digest": _Loads.digest, "checksums": checksums}, group=group)


def _gathered(value: Any, *, group: Any) -> list[Any]:
    """Value of each tensor-parallel rank. Collective."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(ranks, value, group=group)
    return ranks


def _hashed(tensors: Iterable[tuple[str, torch.Tensor]], digest: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors unchanged and add each to `digest`."""
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
            f"the checkpoint has no tensor for {len(unfilled)} parameters of the model "
            f"({', '.join(unfilled[:3])}, ...); save it with the tensor names that SGLang expects"
        )
