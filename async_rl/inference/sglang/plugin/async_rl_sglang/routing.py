"""Keeps the routing rows of retracted requests, and forces recorded rows when a position is recomputed.

SGLang stores rows by K/V slot. A retracted request loses its slots and rows, and the prefill that recomputes its K/V
writes new rows, with other experts if the weights changed. Here the rows are copied to the request before its
slots are freed. The recomputing prefill is forced to these rows, in the same way as to rows that came with the request,
so that the new slots contain the same rows.

Rows of a request are int32 [positions, layers, top_k] on the host, from position 0 on, dense layers included. -1 leaves
a position to the router.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import forcing

FORCED = "async_rl_forced"  # key of the forced rows in sampling_params.custom_params
_ROWS = "_async_rl_rows"  # attribute of a request: its rows
_KEPT = "_async_rl_kept"  # attribute of a request: number of rows that were computed for this request


def _capturer() -> Any:
    module: Any = importlib.import_module("sglang.srt.state_capturer.routed_experts")
    return module.get_global_experts_capturer()


# ---- kept rows


def keep_rows(*, req: Any, req_to_token_pool: Any, **rest: Any) -> None:
    """Hook before schedule_batch.release_req frees the slots of a retracted request: keep its rows."""
    del rest
    capturer = _capturer()
    if not req.return_routed_experts or capturer is None or not req.output_ids or req.finished():
        return
    length = len(req.origin_input_ids) + len(req.output_ids)
    rows = capturer.get_topk(req_pool_idx=req.kv.req_pool_idx, seqlen=length, req_to_token_pool=req_to_token_pool)
    earlier = getattr(req, _ROWS, None)
    kept = getattr(req, _KEPT, 0)
    if earlier is not None and kept:
        rows[:kept] = earlier[:kept]
    forcing.free_dense_layers(rows)
    setattr(req, _ROWS, rows)
    setattr(req, _KEPT, length - 1)
    mark = f"|retracted|{req.rid}"
    if not (req.extra_key or "").endswith(mark):
        req.extra_key = f"{req.extra_key or ''}{mark}"  # from now on its K/V depends on forced rows


def abort_with_rows(send: Callable[..., None], scheduler: Any, abort: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around Scheduler.send_abort_output, for a retracted request that waits or is partly prefilled.

    SGLang would return only the tokens of such a request; the hook also returns their rows and kept tokens.
    """
    rows, cut = getattr(req, _KEPT, 0), req.return_sampling_mask and req.output_ids
    if not (rows or cut) or abort.finished_reason is not None:
        send(scheduler, abort, req, *args, **kwargs)
        return
    batch: Any = importlib.import_module("sglang.srt.managers.schedule_batch")
    req.finished_reason = batch.FINISH_ABORT()
    if rows:
        req.routed_experts = _as_collected(req, req.routed_experts_start_len)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def _as_collected(req: Any, start: int) -> torch.Tensor:
    """Rows from position `start` on in SGLang's form, with zeros in dense layers."""
    return getattr(req, _ROWS)[start:].clamp(min=0)


# ---- forced rows


def plan_forcing(forward_batch: Any, kind: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ForwardBatch.init_new: collect the forced rows of the tokens in a prefill."""
    del kind, args, kwargs
    if not forward_batch.forward_mode.is_extend() or forward_batch.extend_seq_lens_cpu is None:
        return forward_batch
    parts: list[tuple[int, torch.Tensor]] = []
    at = 0
    for req, start, count in zip(
        batch.reqs, forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True
    ):
        rows = _rows_of(req)
        if rows is not None and start < len(rows):
            parts.append((at, rows[start : start + count]))
        at += count
    if parts:
        plan = torch.full((at, *parts[0][1].shape[1:]), -1, dtype=torch.int32)
        for offset, rows in parts:
            plan[offset : offset + len(rows)] = rows
        setattr(forward_batch, forcing.PLAN, plan.to(forward_batch.input_ids.device))
    return forward_batch


def join_plans(result: Any, forward_batch: Any, *args: Any) -> Any:
    """Hook after ForwardBatch.prepare_mlp_sync_batch: join the forced rows of all groups of attention data parallelism.

    A layer with experts then forwards the tokens of all groups, one group after the other, on every rank: groups with 4
    and 6 tokens have the rows 0 to 3 and 4 to 9. Collective.
    """
    del args
    if not forward_batch.is_extend_in_batch:
        return result
    parallel: Any = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    plan: torch.Tensor | None = getattr(forward_batch, forcing.PLAN, None)
    ranks: list[Any] = [None] * parallel.tp_size
    mine = (parallel.attn_dp_rank, None if plan is None else plan.cpu())
    torch.distributed.all_gather_object(ranks, mine, group=parallel.tp_group.cpu_group)
    plans = {group: rows for group, rows in ranks if rows is not None}
    if not plans:
        return result
    counts = forward_batch.global_num_tokens_cpu
    joined = torch.full((sum(counts), *next(iter(plans.values())).shape[1:]), -1, dtype=torch.int32)
    for group, rows in plans.items():
        start = sum(counts[:group])
        joined[start : start + len(rows)] = rows
    setattr(forward_batch, forcing.PLAN, joined.to(forward_batch.input_ids.device))
    return result


def forward_forced(forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ModelRunner.forward: apply the forced rows of the batch."""
    with forcing.applied(forward_batch):
        return forward(runner, forward_batch, *args, **kwargs)


def _rows_of(req: Any) -> torch.Tensor | None:
    """Rows kept at a retraction, else rows that came with the request, else None."""
    rows = getattr(req, _ROWS, None)
    if rows is not None:
        return rows
    given = (req.sampling_params.custom_params or {}).get(FORCED)
    if given is None:
        return None
    flat = torch.frombuffer(bytearray(base64.b64decode(given["rows"])), dtype=getattr(torch, given["dtype"]))
    moe = flat.reshape(given["shape"]).to(torch.int32)
    rows = torch.full((given["start"] + len(moe), given["num_layers"], moe.shape[2]), -1, dtype=torch.int32)
    rows[given["start"] :, given["layers"]] = moe
    setattr(req, _ROWS, rows)
    return rows


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "sglang.srt.managers.schedule_batch.release_req": (keep_rows, "BEFORE"),
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output": (abort_with_rows, "AROUND"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (plan_forcing, "AFTER"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch": (join_plans, "AFTER"),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": (forward_forced, "AROUND"),
    "sglang.srt.layers.moe.topk.select_experts": (forcing.select_forced, "AROUND"),
}
