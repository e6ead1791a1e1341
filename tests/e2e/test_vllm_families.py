"""Other models and layouts: routers of every kind, latent attention with CPU kernels of its own, tensor parallelism."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from async_rl.inference.vllm import engine as vllm
from async_rl.inference.vllm.engine import VllmConfig, VllmReplica, engine_environment
from async_rl.weights.transport import read_update, write_update
from message_queue.tokens import RoutedExperts
from tests.conformance.conftest import VOCAB, generate, prompt, publish, request, slowly, start_vllm, until_sampled
from tests.conformance.reference import (
    gap_with_rows,
    logprob_gap,
    reference,
    reference_of_parts,
)
from tests.helpers import numerics

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

CONFIG = VllmConfig(
    device="cpu",
    threads=numerics.THREADS,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    kv_cache_bytes=16 << 20,
)


def assert_agrees(model: Any, tokens: Any, logprobs: Any, rows: Any, *, start: int, forced: Any = None) -> None:
    expected = reference(model, tokens, forced=forced)
    assert gap_with_rows(expected, tokens, logprobs, rows, start=start, first_row=0) <= 1


async def test_deepseek_agrees_with_transformers_fresh_updated_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.helpers.tiny_models import deepseek_v3_config, save_checkpoint, spread_model

    paths = [save_checkpoint(deepseek_v3_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    models = [spread_model(deepseek_v3_config(), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await start_vllm(CONFIG, checkpoint=paths[0])
    try:
        prompts = [prompt(30 + 40 * i, seed=i) for i in range(6)]
        fresh = await asyncio.gather(*(generate(replica, request(f"f{i}", t)) for i, t in enumerate(prompts)))
        for tokens, segment in zip(prompts, fresh, strict=True):
            assert segment.routed_experts is not None
            both = np.concatenate([tokens, segment.token_ids])
            assert_agrees(models[0], both, segment.logprobs, segment.routed_experts.experts, start=len(tokens))

        (running,) = slowly(replica, [generate(replica, request("cut", prompts[1], max_new_tokens=300))])
        await until_sampled(replica, 10)
        assert await publish(replica, update) == 1
        cut = await running
        assert cut.routed_experts is not None
        so_far = np.concatenate([prompts[1], cut.token_ids])
        assert_agrees(models[0], so_far, cut.logprobs, cut.routed_experts.experts, start=len(prompts[1]))

        rest = await generate(replica, request("rest", so_far))
        assert rest.routed_experts is not None
        both = np.concatenate([so_far, rest.token_ids])
        assert_agrees(models[1], both, rest.logprobs, rest.routed_experts.experts, start=len(so_far))
        await assert_forced(replica, models[1], so_far, cut.routed_experts)
    finally:
        await replica.close()


async def assert_forced(replica: VllmReplica, model: Any, tokens: Any, forced: RoutedExperts) -> None:
    """`model` is what the replica serves; `forced` is not what it would choose."""
    segment = await generate(replica, request("forced", tokens, forced_experts=forced))
    assert segment.routed_experts is not None
    rows = segment.routed_experts.experts
    assert (rows[: len(forced.experts)] == forced.experts).all()
    both = np.concatenate([tokens, segment.token_ids])
    assert_agrees(model, both, segment.logprobs, rows, start=len(tokens), forced=forced.experts)
    assert logprob_gap(reference(model, both), both, segment.logprobs, start=len(tokens)) > 10


def family_config(family: str) -> Any:
    """8 experts, top-2."""
    import transformers

    from tests.helpers.tiny_models import COMMON, glm4_moe_config

    fields = {**COMMON, "vocab_size": VOCAB, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    match family:
        case "mixtral":
            return transformers.MixtralConfig(**fields, num_local_experts=8)
        case "olmoe":
            return transformers.OlmoeConfig(**fields, num_experts=8, norm_topk_prob=False)
        case "qwen2_moe":
            return transformers.Qwen2MoeConfig(
                **fields, num_experts=8, norm_topk_prob=True, shared_expert_intermediate_size=64
            )
        case "glm4_moe":
            return glm4_moe_config(vocab_size=VOCAB, n_group=2, topk_group=1)
        case _:
            raise ValueError(family)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "glm4_moe"])
async def test_a_family_agrees_free_forced_and_over_an_update_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    from tests.helpers.tiny_models import save_checkpoint, spread_model

    paths = [save_checkpoint(family_config(family), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    models = [spread_model(family_config(family), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await start_vllm(CONFIG, checkpoint=paths[0])
    try:
        tokens = prompt(50)
        fresh = await generate(replica, request("fresh", tokens))
        assert fresh.routed_experts is not None
        both = np.concatenate([tokens, fresh.token_ids])
        assert_agrees(models[0], both, fresh.logprobs, fresh.routed_experts.experts, start=50)

        (running,) = slowly(replica, [replica.generate(request("update", tokens, max_new_tokens=120))])
        await until_sampled(replica, 10)
        await replica.pause()
        assert await replica.freeze() == 1
        await replica.load(update, kv="recompute")
        await replica.resume()
        first, second = await running
        assert first.routed_experts is not None
        assert second.routed_experts is not None
        so_far = np.concatenate([tokens, first.token_ids])
        whole = np.concatenate([so_far, second.token_ids])
        rows = np.concatenate([first.routed_experts.experts, second.routed_experts.experts])
        forced = first.routed_experts.experts
        assert_agrees(models[0], so_far, first.logprobs, forced, start=50)
        assert_agrees(models[1], whole, second.logprobs, rows, start=len(so_far), forced=forced)
        await assert_forced(replica, models[1], both, fresh.routed_experts)
    finally:
        await replica.close()


@pytest.mark.parametrize(("kv", "tied"), [("keep", False), ("recompute", True)])
async def test_a_dense_model_is_updated_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: Literal["keep", "recompute"], tied: bool
):
    from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint, spread_model

    model = qwen3_dense_config(tie_word_embeddings=tied)
    paths = [save_checkpoint(model, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    old, new = (spread_model(model, seed=seed) for seed in (0, 1))
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await start_vllm(CONFIG, checkpoint=paths[0], capture_routing=False)
    try:
        (running,) = slowly(replica, [replica.generate(request("dense", prompt(40), max_new_tokens=120))])
        await until_sampled(replica, 10)
        await replica.pause()
        assert await replica.freeze() == 1
        await replica.load(update, kv=kv)
        await replica.resume()
        first, second = await running
        so_far = np.concatenate([prompt(40), first.token_ids])
        whole = np.concatenate([so_far, second.token_ids])
        assert logprob_gap(reference(old, so_far), so_far, first.logprobs, start=40) <= 1
        kept = len(so_far) - 1 if kv == "keep" else 0
        expected = reference_of_parts([(old, kept), (new, len(whole))], whole)
        assert logprob_gap(expected, whole, second.logprobs, start=len(so_far)) <= 1
    finally:
        await replica.close()


async def test_tensor_parallel_workers_agree_load_alike_and_end_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

    paths = [save_checkpoint(qwen3_moe_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    config = dataclasses.replace(CONFIG, tensor_parallel=2)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    replica = await vllm.start_vllm(config, name="replica-0", checkpoint=paths[0])
    try:
        tokens = prompt(40)
        for seed in (0, 1):
            if seed:
                await publish(replica, update)
            segment = await generate(replica, request(f"layout-{seed}", tokens))
            assert segment.routed_experts is not None
            both = np.concatenate([tokens, segment.token_ids])
            model = spread_model(qwen3_moe_config(), seed=seed)
            assert_agrees(model, both, segment.logprobs, segment.routed_experts.experts, start=len(tokens))
            if not seed:
                forced = segment.routed_experts
        await assert_forced(replica, model, np.concatenate([tokens, tokens, tokens]), forced)
        (engine,) = replica.backend.processes
        workers = psutil.Process(engine.pid).children(recursive=True)
        assert len(workers) == 2
        engine.kill()
        assert (await asyncio.to_thread(psutil.wait_procs, workers, timeout=30))[1] == []
    finally:
        await replica.close()
