"""Real SGLang servers for tests: where the interpreter is, tiny models that SGLang serves on a CPU, requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from agent_loop.engine import EngineError, GenerateRequest
from async_rl.inference.sglang.engine import SglangConfig, SglangReplica
from async_rl.inference.sglang.server import interpreter
from async_rl.weights.transport import WeightUpdate, read_update, write_update
from message_queue.tokens import TokenOutput
from tests.conformance.reference import gap_with_rows, reference
from tests.helpers import numerics
from tests.helpers.tiny_models import COMMON, qwen3_moe_config, save_checkpoint, spread_model

VOCAB = 117
SMALL_POOL = 1200  # K/V slots: many long requests do not fit at once and some are retracted


def config(**changes: Any) -> SglangConfig:
    """A small CPU replica; prompts longer than 96 tokens are prefilled in chunks."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "threads": numerics.THREADS,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 96,
        "kv_cache_tokens": SMALL_POOL,
        "load_timeout_s": 60,
        "start_timeout_s": 240,
        "extra_args": {"decode_log_interval": 1, "schedule_conservativeness": 0.1},
    }
    return SglangConfig(**{**fields, **changes})


def require_sglang() -> None:
    """Skip the calling test where SGLang's virtualenv is not made."""
    try:
        interpreter(config())
    except EngineError as error:
        pytest.skip(str(error))


@dataclass(frozen=True, slots=True)
class Models:
    """Checkpoints of one architecture with seeds 0 and 1: folders, transformers models, updates of version 0 and 1."""

    paths: tuple[Path, Path]
    models: tuple[Any, Any]
    updates: tuple[WeightUpdate, WeightUpdate]


def make_models(folder: Path, architecture: Any) -> Models:
    """Save and load both."""
    paths = [save_checkpoint(architecture, folder / str(seed), seed=seed) for seed in (0, 1)]
    updates = [
        write_update(folder / "updates", version=i, tensors=read_update(path / "model.safetensors"))
        for i, path in enumerate(paths)
    ]
    models = [spread_model(architecture, seed=seed) for seed in (0, 1)]
    return Models((paths[0], paths[1]), (models[0], models[1]), (updates[0], updates[1]))


def qwen3_moe(**changes: Any) -> Any:
    """Every layer has experts: SGLang knows no dense ones in this family."""
    return qwen3_moe_config(vocab_size=VOCAB, dense_layers=(), **changes)


def mixtral(**changes: Any) -> Any:
    """8 experts, top-2, softmax over the chosen."""
    fields = {k: v for k, v in COMMON.items() if k != "moe_intermediate_size"}
    own = {"vocab_size": VOCAB, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**{**fields, **own, **changes})


def glm4_moe(**changes: Any) -> Any:
    """Sigmoid routing with a correction bias, one shared expert; layer 0 is dense."""
    own = {
        "vocab_size": VOCAB,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    }
    return transformers.Glm4MoeConfig(**{**COMMON, **own, **changes})


def prompt(length: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """int32 [length]."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def request(request_id: str, token_ids: Any, *, max_new_tokens: int = 24, **fields: Any) -> GenerateRequest:
    """A request that nothing but its budget stops; ids end with a character of their own."""
    return GenerateRequest(request_id=f"{request_id}.", token_ids=token_ids, max_new_tokens=max_new_tokens, **fields)


async def generate(replica: SglangReplica, ask: GenerateRequest) -> TokenOutput:
    """The one segment of a decode that no update reaches in flight."""
    [segment] = await replica.generate(ask)
    return segment


async def publish(replica: SglangReplica, update: WeightUpdate) -> int:
    """Pause, abort, load, resume; returns how many segments were cut."""
    await replica.pause()
    aborted = await replica.abort()
    await replica.load(update)
    await replica.resume()
    return aborted


async def load_frozen(replica: SglangReplica, update: WeightUpdate, kv: Any) -> int:
    """Pause, freeze, load, resume; returns how many requests were held."""
    await replica.pause()
    held = await replica.freeze()
    await replica.load(update, kv=kv)
    await replica.resume()
    return held


async def loads(replica: SglangReplica) -> dict[str, Any]:
    """SGLang's own figures of what it serves; needs decode_log_interval=1 to be of now."""
    return (await replica.backend.server.get("/v1/loads?include=core"))["loads"][0]


async def until_used(replica: SglangReplica, tokens: int, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return when the requests in flight hold `tokens` K/V slots together; SGLang has no event for it.

    Raises:
        AssertionError: one of `tasks`, which make those requests, ended before.
    """
    assert await uses(replica, tokens, tasks), f"a request ended before {tokens} slots were seen in use"


async def uses(replica: SglangReplica, tokens: int, tasks: Sequence[asyncio.Task[Any]]) -> bool:
    """As `until_used`, but false if one of `tasks` ended before."""
    started, figures = time.time(), await loads(replica)
    while figures["num_used_tokens"] < tokens or figures["timestamp"] < started:
        if any(task.done() for task in tasks):
            return False
        await asyncio.sleep(0.005)
        figures = await loads(replica)
    return True


async def idle(replica: SglangReplica) -> bool:
    """Whether SGLang itself has nothing to do, at once or a moment later: it hears of a cancellation by a call,
    and answers before it counts."""
    for _ in range(100):
        figures = await loads(replica)
        if not figures["num_running_reqs"] and not figures["num_waiting_reqs"]:
            return True
        await asyncio.sleep(0.05)
    return False


def assert_agrees(model: Any, before: Any, segment: TokenOutput, *, forced: Any = None) -> None:
    """Tokens, logprobs and all rows of one segment that followed `before`."""
    tokens = np.concatenate([before, segment.token_ids])
    expected = reference(model, tokens, forced=forced)
    assert segment.routed_experts is not None
    rows, start = segment.routed_experts, len(before)
    assert rows.end_position == len(tokens) - 1
    gap = gap_with_rows(expected, tokens, segment.logprobs, rows.experts, start=start, first_row=rows.first_position)
    assert gap <= 1
