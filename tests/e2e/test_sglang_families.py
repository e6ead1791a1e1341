"""Other families and layouts: softmax and sigmoid routers, dense first layers, tensor parallelism."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from async_rl.inference.sglang.engine import SglangReplica, start_sglang
from message_queue.tokens import RoutedExperts, TokenOutput
from tests.conformance.sglang_support import (
    Models,
    assert_agrees,
    config,
    generate,
    glm4_moe,
    load_frozen,
    make_models,
    mixtral,
    prompt,
    publish,
    qwen3_moe,
    request,
    require_sglang,
    uses,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

LONG = config(max_model_len=2048, kv_cache_tokens=4096)


async def cut_by_updates(replica: SglangReplica, models: Models, tokens: Any) -> list[TokenOutput]:
    """Segments of a request that a load reaches in flight and an abort ends later.

    A fast server may end a request before it is looked at: it is then made again, twice as long.
    """
    for budget in (440, 880, 1760):
        await publish(replica, models.updates[0])
        running = asyncio.create_task(replica.generate(request(f"cut{budget}", tokens, max_new_tokens=budget)))
        reached = (
            await uses(replica, len(tokens) + 20, [running])
            and await load_frozen(replica, models.updates[1], "recompute") == 1
            and await uses(replica, len(tokens) + 60, [running])
            and await publish(replica, models.updates[0]) == 1
        )
        segments = await running
        if reached and len(segments) == 2:
            return segments
    pytest.fail(f"requests of up to {budget} tokens ended before the load or the abort")


@pytest.mark.parametrize("family", [mixtral, glm4_moe], ids=["mixtral", "glm4_moe"])
async def test_a_family_agrees_fresh_forced_updated_and_resumed(tmp_path: Path, family: Any):
    require_sglang()
    models = make_models(tmp_path, family())
    layers = 4 if family is mixtral else 3
    replica = await start_sglang(LONG, name="replica-0", checkpoint=models.paths[0])
    try:
        prompts = [prompt(30 + 40 * i, seed=i) for i in range(5)]
        fresh = await asyncio.gather(*(generate(replica, request(f"f{i}", t)) for i, t in enumerate(prompts)))
        for tokens, segment in zip(prompts, fresh, strict=True):
            assert segment.routed_experts is not None
            assert segment.routed_experts.experts.shape[1:] == (layers, 2), "dense layers do not travel"
            assert_agrees(models.models[0], tokens, segment)

        rows = np.zeros((100, layers, 2), np.uint8)
        rows[..., 1] = 5
        forced = RoutedExperts(first_position=0, experts=rows)
        segment = await generate(replica, request("forced", prompts[3], forced_experts=forced))
        assert_agrees(models.models[0], prompts[3], segment, forced=rows)

        before, after = await cut_by_updates(replica, models, prompts[1])
        assert (before.weights.version, after.weights.version) == (0, 1)
        assert before.routed_experts is not None
        assert_agrees(models.models[0], prompts[1], before)
        so_far = np.concatenate([prompts[1], before.token_ids])
        assert_agrees(models.models[1], so_far, after, forced=before.routed_experts.experts)
        so_far = np.concatenate([so_far, after.token_ids])
        rest = await generate(replica, request("rest", so_far, existing_rows=len(so_far) - 1))
        assert_agrees(models.models[0], so_far, rest)
    finally:
        await replica.close()


async def test_tensor_parallel_ranks_agree_load_alike_and_end_together(tmp_path: Path):
    require_sglang()
    models = make_models(tmp_path, qwen3_moe())
    replica = await start_sglang(config(tensor_parallel=2), name="replica-0", checkpoint=models.paths[0])
    try:
        for version in (0, 1):
            if version:
                await publish(replica, models.updates[1])
            segment = await generate(replica, request(f"layout{version}", prompt(40)))
            assert segment.weights == models.updates[version].weights
            assert_agrees(models.models[version], prompt(40), segment)
        processes = psutil.Process(replica.backend.server.pid).children(recursive=True)
        assert sum("scheduler" in process.name() for process in processes) == 2
    finally:
        await replica.close()
    assert (await asyncio.to_thread(psutil.wait_procs, processes, timeout=30))[1] == []
