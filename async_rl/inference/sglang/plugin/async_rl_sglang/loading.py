"""Reports each load: digests of the tensors, and contents of the parameters after the load. Stages versions.

SGLang silently skips tensors with unknown names. Therefore the first load is checked on the model: every parameter is
set to NaN before the load, and a parameter that is still NaN after the load is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # quantized parameters are not checked
REPORT = "async_rl"  # key of the report in /server_info
LOADED = "loaded by rank: "  # precedes the JSON report in the message of an update
NOT_STAGED = "not yet"  # message until all ranks have loaded a version into their twins


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

    first: str = ""
    """Digest of the load at the start; empty before it."""
    published: dict[str, list[list[int]]]
    """Sums of the tensors of the load at the start that this rank hashes."""
    staging: Any = None
    """`async_rl.weights.twin.Staging`, whose loads return the report of this rank; None before the first."""


class _Version(threading.local):
    """The published version that a thread loads."""

    load_share: Callable[..., dict[str, Any]] | None = None
    """`async_rl.weights.digest.load_share` of its buckets; None at the start, when a checkpoint is loaded."""
    report: dict[str, Any] | None = None
    """Result of `load_share`; None before the load."""


_VERSION = _Version()


def load_and_hash(load: Callable[..., None], model: torch.nn.Module, weights: Any, target_device: Any) -> None:
    """Hook around DefaultModelLoader.load_weights_only; runs at the start and at every update.

    In an update it loads the buckets of the version in place of SGLang's `weights`, as these have no bucket numbers.
    """
    sums = _weights_module("checksum").sums_for(model)
    if _VERSION.load_share is not None:
        _VERSION.report = _VERSION.load_share(lambda tensors: load(model, tensors, target_device), sums=sums)
        return
    _poison(model)
    digest = _weights_module("digest").WeightsDigest()
    load(model, _hashed(weights, digest, sums=sums), target_device)
    _refuse_poison(model)
    _Loads.first = digest.hexdigest()


def report_start(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Hook after Scheduler.get_init_info: add the first load, and hooks that do not apply, to /server_info."""
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    parameters = _contents(scheduler.tp_worker.model_runner.model)
    here = {"digest": _Loads.first, "published": _Loads.published, "parameters": parameters}
    ranks = _on_all_ranks(lambda: here, group=scheduler.tp_group.cpu_group)
    return {**info, REPORT: {"ranks": ranks, "unapplied": sorted(registry._hooks.keys() - registry._patched)}}


def pass_report(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """Hook after DataParallelController.get_init_info: pass on the report, the same from each scheduler."""
    return {**info, REPORT: controller._scheduler_init_infos[0][REPORT]}


def update_and_report(update: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Hook around SchedulerWeightUpdaterManager.update_weights_from_disk: add the reports of all ranks to the message.

    An update that fails on any rank fails on all, and its message names the rank. SGLang reads the config of the model,
    and sees files of tensors, in the folder of its checkpoint.
    """
    version, model = request.model_path, updater.tp_worker.model_runner.model
    request.model_path = updater.tp_worker.model_runner.model_config.model_path
    answers: list[Any] = []

    def load() -> dict[str, Any]:
        answers.append(update(updater, request))
        if not answers[0].success:
            raise RuntimeError(answers[0].message)
        return _contents(model)

    try:
        ranks = _on_all_ranks(
            lambda: _load_version(version, load, model=model, group=updater.tp_cpu_group),
            group=updater.tp_cpu_group,
        )
    except RuntimeError as error:
        io: Any = importlib.import_module("sglang.srt.managers.io_struct")
        return io.UpdateWeightFromDiskReqOutput(success=False, message=str(error))
    answers[0].message = f"{answers[0].message} {LOADED}{json.dumps(ranks)}"
    return answers[0]


def stage(check: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Hook around SchedulerWeightUpdaterManager.check_weights, a call that needs no pause: adds three actions.

    `stage VERSION` starts to load a version into a twin of the model. `staged` returns the reports of all ranks in the
    message when all have loaded it. `commit` exchanges the weights.
    """
    action, _, version = request.action.partition(" ")
    if action not in ("stage", "staged", "commit"):
        return check(updater, request)
    io: Any = importlib.import_module("sglang.srt.managers.io_struct")
    try:
        message = {"stage": _start, "staged": _staged, "commit": _commit}[action](updater, version)
        return io.CheckWeightsReqOutput(success=True, message=message)
    except Exception as error:  # noqa: BLE001 - an error in the scheduler would end the server
        return io.CheckWeightsReqOutput(success=False, message=f"{type(error).__name__}: {error}")


def _start(updater: Any, version: str) -> str:
    _Loads.staging = _Loads.staging or _weights_module("twin").Staging()
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    runner = updater.tp_worker.model_runner
    device = torch.device(runner.device)

    def load(twin: Any) -> dict[str, Any]:
        def load_twin() -> dict[str, Any]:
            loader.restore_weights_before_loading(twin.model, device)
            loader.load_weights_and_postprocess(twin.model, (), device)
            return _contents(twin.model)

        return _load_version(version, load_twin, model=twin.model, group=updater.tp_cpu_group)

    _Loads.staging.start(runner.model, load)
    return "started"


def _staged(updater: Any, _: str) -> str:
    """Reports of all ranks, or NOT_STAGED. Collective; raises the errors of all ranks on all."""
    ranks = _on_all_ranks(lambda: _Loads.staging.result(), group=updater.tp_cpu_group)
    return NOT_STAGED if None in ranks else f"{LOADED}{json.dumps(ranks)}"


def _commit(updater: Any, _: str) -> str:
    _on_all_ranks(lambda: _Loads.staging.commit(), group=updater.tp_cpu_group)
    return "exchanged"


def _load_version(version: str, load: Callable[[], dict[str, Any]], *, model: Any, group: Any) -> dict[str, Any]:
    """Report of this rank on a load of a published version.

    Args:
        version: see `async_rl.weights.transport.readable_by_ranks`.
        load: loads by `load_and_hash` and returns the contents of the parameters.
        model: model that is loaded.
        group: process group with all ranks of the server.
    """
    digests, ahead = _weights_module("digest"), 1
    place = {"rank": torch.distributed.get_rank(group), "ranks": torch.distributed.get_world_size(group)}
    if version.startswith("{"):
        device = next(model.parameters()).device
        buckets = _weights_module("group").received(json.loads(version), device=device, **place)
    else:
        files = sorted(digests.on_this_node(Path(version)).glob("*.safetensors"))
        buckets, ahead = digests.mapped(files), len(files)
    try:
        with contextlib.closing(buckets):
            _VERSION.load_share, _VERSION.report = partial(digests.load_share, buckets, ahead=ahead, **place), None
            parameters = load()
        if _VERSION.report is None:
            raise RuntimeError("SGLang loaded no weights")
        return {**_VERSION.report, "parameters": parameters}
    finally:
        _VERSION.load_share = None


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
        update_and_report,
        "AROUND",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights": (
        stage,
        "AROUND",
    ),
}


def _contents(model: torch.nn.Module) -> dict[str, Any]:
    return _weights_module("checksum").model_contents(model)


def _on_all_ranks(work: Callable[[], Any], *, group: Any) -> list[Any]:
    """Result of `work` on every tensor-parallel rank. Collective.

    Raises:
        RuntimeError: on all ranks, if `work` failed on any; names each with its error.
    """
    try:
        here = (work(), "")
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        here = (None, f"{type(error).__name__}: {error}")
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(outcomes, here, group=group)
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]:
        raise RuntimeError("; ".join(failed))
    return [result for result, _ in outcomes]


def _hashed(
    tensors: Iterable[tuple[str, torch.Tensor]], digest: Any, *, sums: Callable[[torch.Tensor], list[list[int]]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors unchanged, add each to `digest`, and store the sums of this rank's share."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    _Loads.published = {}
    for number, (name, tensor) in enumerate(tensors):
        digest.update(name, tensor.cpu())
        if number % ranks == rank:
            _Loads.published[name] = sums(tensor)
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
