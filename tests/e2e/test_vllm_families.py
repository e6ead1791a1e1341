"""Other models and layouts: latent attention (DeepSeek), with CPU kernels of its own, and tensor parallelism."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from async_rl.engines.vllm import VllmConfig, VllmReplica, engine_environment
from async_rl.weights.transport import read_update, write_update
from tests.conformance.conftest import prompt, publish, request, until_sampled
from tests.conformance.reference import LOGPROB_TOLERANCE, logprob_gap, reference, routing_mismatches

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

CONFIG = VllmConfig(
    device="cpu", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_bytes=16 << 20
)


def assert_agrees(model: Any, tokens: Any, logprobs: Any, rows: Any, *, start: int) -> None:
    expected = reference(model, tokens)
    assert logprob_gap(expected, tokens, logprobs, start=start) <= LOGPROB_TOLERANCE
    assert routing_mismatches(expected, rows, start=0) == 0


async def test_deepseek_agrees_with_transformers_fresh_updated_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.tiny_models import deepseek_v3_config, save_checkpoint, spread_model

    paths = [save_checkpoint(deepseek_v3_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    models = [spread_model(deepseek_v3_config(), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await VllmReplica.start(CONFIG, name="replica-0", checkpoint=paths[0])
    try:
        prompts = [prompt(30 + 40 * i, seed=i) for i in range(6)]
        fresh = await asyncio.gather(*(replica.generate(request(f"f{i}", t)) for i, t in enumerate(prompts)))
        for tokens, segment in zip(prompts, fresh, strict=True):
            assert segment.routed_experts is not None
            both = np.concatenate([tokens, segment.token_ids])
            assert_agrees(models[0], both, segment.logprobs, segment.routed_experts.experts, start=len(tokens))

        running = asyncio.create_task(replica.generate(request("cut", prompts[1], max_new_tokens=300)))
        await until_sampled(replica, 10)
        assert await publish(replica, update) == 1
        cut = await running
        assert cut.routed_experts is not None
        so_far = np.concatenate([prompts[1], cut.token_ids])
        assert_agrees(models[0], so_far, cut.logprobs, cut.routed_experts.experts, start=len(prompts[1]))

        rest = await replica.generate(request("rest", so_far))
        assert rest.routed_experts is not None
        both = np.concatenate([so_far, rest.token_ids])
        assert_agrees(models[1], both, rest.logprobs, rest.routed_experts.experts, start=len(so_far))
    finally:
        await replica.close()


async def test_tensor_parallel_workers_agree_load_alike_and_end_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

    paths = [save_checkpoint(qwen3_moe_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    config = dataclasses.replace(CONFIG, tensor_parallel=2)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    replica = await VllmReplica.start(config, name="replica-0", checkpoint=paths[0])
    try:
        tokens = prompt(40)
        for seed in (0, 1):
            if seed:
                await publish(replica, update)
            segment = await replica.generate(request(f"layout-{seed}", tokens))
            assert segment.routed_experts is not None
            both = np.concatenate([tokens, segment.token_ids])
            model = spread_model(qwen3_moe_config(), seed=seed)
            assert_agrees(model, both, segment.logprobs, segment.routed_experts.experts, start=len(tokens))
        (engine,) = replica._processes
        workers = psutil.Process(engine.pid).children(recursive=True)
        assert len(workers) == 2
        engine.kill()
        assert (await asyncio.to_thread(psutil.wait_procs, workers, timeout=30))[1] == []
    finally:
        await replica.close()
