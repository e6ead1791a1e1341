"""Rows that stay what they were: kept over a retraction, and forced where a position is forwarded again.

SGLang holds rows by K/V slot, so a retracted request loses its rows with its slots and gets those of the prefill that
recomputes them; when new weights arrived meanwhile these are other experts. Here the rows move to the request before
its slots go. The prefill that recomputes it uses them again, as it uses rows that came with the request, so SGLang
finds the same rows in the new slots.

Rows of a request are int32 [positions, layers, top_k] from position 0 on, dense layers included, on the host; -1 is a
position that is routed freely.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import forcing

FORCED = "async_rl_forced"  # key in sampling_params.custom_params
_ROWS = "_async_rl_rows"
_KEPT = "_async_rl_kept"  # how many of the rows were computed for this request


def _capturer() -> Any:
    module: Any = importlib.import_module("sglang.srt.state_capturer.routed_experts")
    return module.get_global_experts_capturer()


# ---- kept rows


def keep_rows(*, req: Any, req_to_token_pool: Any, **rest: Any) -> None:
    """Before schedule_batch.release_req, which frees the slots of a request that is retracted."""
    del rest
    capturer = _capturer()
    if not req.return_routed_experts or capturer is None or not req.output_ids or req.finished():
        return
    length = len(req.origin_input_ids) + len(req.output_ids)
    rows = capturer.get_topk(req_pool_idx=req.kv.req_pool_idx, seqlen=length, req_to_token_pool=req_to_token_pool)
    held = getattr(req, _ROWS, None)
    kept = getattr(req, _KEPT, 0)
    if held is not None and kept:
        rows[:kept] = held[:kept]
    forcing.free_dense_layers(rows)
    setattr(req, _ROWS, rows)
    setattr(req, _KEPT, length - 1)
    mark = f"|retracted|{req.rid}"
    if not (req.extra_key or "").endswith(mark):
        req.extra_key = f"{req.extra_key or ''}{mark}"  # its K/V is of forced rows from here on


def abort_with_rows(send: Callable[..., None], scheduler: Any, abort: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Around Scheduler.send_abort_output, which answers for a retracted request that waits or is prefilled in chunks.

    SGLang would answer with the tokens alone; here they come with their rows and their kept tokens.
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
    """Rows from `start` on as SGLang has them: zeros in dense layers."""
    return getattr(req, _ROWS)[start:].clamp(min=0)


# ---- forced rows


def plan_forcing(forward_batch: Any, kind: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """After ForwardBatch.init_new: which of the tokens of a prefill have their experts given."""
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
        forward_batch._async_rl_plan = plan.to(forward_batch.input_ids.device)
    return forward_batch


def forward_forced(forward: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward."""
    plan = getattr(forward_batch, "_async_rl_plan", None)
    if plan is None:
        return forward(runner, forward_batch, *args, **kwargs)
    with forcing.applied(plan):
        return forward(runner, forward_batch, *args, **kwargs)


def _rows_of(req: Any) -> torch.Tensor | None:
    """Rows kept by a retraction, else those that came with the request."""
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
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": (forward_forced, "AROUND"),
    "sglang.srt.layers.moe.topk.select_experts": (forcing.select_forced, "AROUND"),
}
