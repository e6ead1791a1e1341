"""Other models and layouts of vLLM and SGLang: routers of every kind, latent attention, tensor parallelism."""

import asyncio
import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
from safetensors.torch import save_file

from agent_loop.engine import GenerateRequest, SamplingConfig
from async_rl.inference.sglang.engine import start_sglang
from async_rl.inference.vllm.config import FORCED_FAMILIES, Speculation
from async_rl.inference.vllm.engine import engine_environment
from async_rl.inference.vllm.process import call_ranks
from async_rl.trainer.model.families import FAMILIES as TRAINED
from async_rl.weights.transport import read_tensors, update_files
from message_queue.errors import EngineError
from tests.conformance import sglang_support
from tests.conformance.checks import assert_forced, assert_true, assert_whole, odd_rows, versions_of, whole
from tests.conformance.conftest import sglang_environment
from tests.conformance.engines import STEP_S, prompts, tokens
from tests.conformance.planted import PLUGIN, plugin_folder
from tests.conformance.probes import VllmProbe
from tests.conformance.reference import logprob_gap, reference, reference_of_parts
from tests.conformance.scored import ScoresOfTruth, probe_of
from tests.conformance.served import VLLM, make_models, plant, start_vllm, under_test
from tests.helpers import tiny_models
from tests.helpers.lanes import OWN_ENGINE
from tests.helpers.live import without_equation
from tests.helpers.updates import read_update, write_update

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

CONFIG = replace(VLLM, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_bytes=16 << 20)
CHANGES = {  # parts that the tiny config of a family does not have
    "glm4_moe": {"n_group": 2, "topk_group": 1},
    "qwen2_moe": {"mlp_only_layers": [], "norm_topk_prob": True, "shared_expert_intermediate_size": 64},
}
IN_CONFORMANCE = ("qwen3_moe",)  # tests/conformance has every test for it
ROUTED = [name for name, family in TRAINED.items() if family.expert_weights and name not in IN_CONFORMANCE]
FAMILIES = {
    **{f"vllm-{family}": partial(tiny_models.tiny_config, family, **CHANGES.get(family, {})) for family in ROUTED},
    "vllm-qwen3_5_moe_text": partial(tiny_models.with_vision, "qwen3_5_moe_text"),
    "vllm-mixtral": sglang_support.mixtral,
    "vllm-deepseek_v3-mtp": tiny_models.deepseek_v3_config,
    "vllm-glm4_moe-mtp": tiny_models.glm4_moe_config,
    "sglang-mixtral": sglang_support.mixtral,
    "sglang-glm4_moe": sglang_support.glm4_moe,
}
DENSE = {  # family -> (K/V at an update, tied embeddings, staged update)
    **{name: ("keep", False, False) for name, family in TRAINED.items() if not family.expert_weights},
    "qwen3": ("recompute", True, False),
    "llama": ("keep", True, True),
    "qwen3_5_text": ("recompute", True, True),
}


@contextlib.asynccontextmanager
async def serving(engine, models, patch, **changes):
    """An engine that serves version 0. changes: of its configuration."""
    if engine == "vllm":
        config = replace(CONFIG, **changes)
        for name, value in engine_environment(config).items():
            patch.setenv(name, value)
        replica = await start_vllm(config, checkpoint=models.paths[0])
    else:
        config = sglang_support.config(kv_cache_tokens=4096, **changes)
        with sglang_environment(plugin_folder(models.paths[0].parent)):
            replica = await start_sglang(config, name="replica-0", checkpoint=models.paths[0])
    assert without_equation(replica._live) == []
    try:
        tested = under_test(replica, models, patch=patch)
        await tested.publish(version=0)
        yield tested
        await tested.end()
    finally:
        await replica.close()


@OWN_ENGINE
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_agrees_free_forced_updated_and_resumed(family, tmp_path, monkeypatch):
    engine, with_drafts = family.split("-")[0], family.endswith("-mtp")
    changes = {"speculation": Speculation(method="mtp", tokens=2)} if with_drafts else {}
    if engine == "sglang":
        sglang_support.require_sglang()
    models = make_models(tmp_path, FAMILIES[family]())
    model = family.removeprefix(f"{engine}-").removesuffix("-mtp")
    if "mlp.router.expert_bias" in TRAINED[model].layer_weights:  # as shipped, with a layer that serves for drafts
        tiny_models.add_prediction_layer(models.paths[0], repeats=with_drafts)
    elif model in ("qwen3_next", "qwen3_5_moe_text"):
        tiny_models.add_mtp_weights(models.paths[0])
    async with serving(engine, models, monkeypatch, **changes) as tested:
        await asyncio.gather(*(tested.ask(f"free-{i}", ids) for i, ids in enumerate(prompts(5, length=30, step=40))))
        await tested.ask("loop", tokens(20), max_new_tokens=80, sampling=SamplingConfig(temperature=0.0))
        ids = whole(tested.exchanges[0])
        if engine == "sglang" or model in FORCED_FAMILIES:
            assert_forced(tested, await tested.ask("forced", ids, forced_experts=odd_rows(tested, len(ids) - 1)))
        rollouts, tasks = tested.start_rollouts(prompts(2, length=50), max_new_tokens=160)
        for mode, staged in (("keep-recompute", False), ("keep-recompute", True), ("resume", True)):
            await tested.until_more(20)
            await tested.publish(mode, stays_slow=mode != "resume", staged=staged)
        await asyncio.gather(*tasks)
        for rollout in rollouts:
            assert [versions_of(exchange) for exchange in tested.of_session(rollout.name)] == [[0, 1, 2], [3]]
        assert_whole(tested, *rollouts)
        drafts = (await tested.replica.stats()).drafts
        assert 0 < drafts.accepted < drafts.proposed if with_drafts else drafts.proposed == 0


@OWN_ENGINE
@pytest.mark.parametrize("family", DENSE)
async def test_a_dense_model_is_updated_in_flight(tmp_path, monkeypatch, family):
    kv, tied, staged = DENSE[family]
    models = make_models(tmp_path, tiny_models.tiny_config(family, tie_word_embeddings=tied))
    for name, value in engine_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    replica = await start_vllm(CONFIG, checkpoint=models.paths[0], capture_routing=False)
    try:
        probe = VllmProbe(replica, kv_tokens=0, patch=monkeypatch)
        await probe.slow_down(STEP_S)
        request = GenerateRequest(request_id="dense", token_ids=tokens(40), max_new_tokens=120)
        running = asyncio.create_task(replica.generate(request))
        while await probe.sampled([request]) < 10:  # noqa: ASYNC110 - no engine has an event for it
            await asyncio.sleep(0.004)
        if staged:
            await replica.stage(models.updates[1])
        await replica.pause()
        assert await replica.freeze() == 1
        await replica.load(models.updates[1], kv=kv)
        await replica.resume()
        await probe.slow_down(None)
        first, second = await running
    finally:
        await replica.close()
    old, new, _ = models.models
    so_far = np.concatenate([tokens(40), first.token_ids])
    ids = np.concatenate([so_far, second.token_ids])
    assert logprob_gap(reference(old, so_far), so_far, first.logprobs, start=40) <= 1
    kept = len(so_far) - 1 if kv == "keep" else 0
    expected = reference_of_parts([(old, kept), (new, len(ids))], ids)
    assert logprob_gap(expected, ids, second.logprobs, start=len(so_far)) <= 1


@OWN_ENGINE
async def test_a_dense_model_of_sglang_is_updated(tmp_path):
    sglang_support.require_sglang()
    models = make_models(tmp_path, tiny_models.llama_config(tie_word_embeddings=True))
    config = sglang_support.config(kv_cache_tokens=4096)
    replica = await start_sglang(config, name="replica-0", checkpoint=models.paths[0], capture_routing=False)
    try:
        for number, model in enumerate(models.models):
            if number:
                await replica.pause()
                await replica.freeze()
                await replica.load(models.updates[number], kv="recompute")
                await replica.resume()
            request = GenerateRequest(request_id=f"dense-{number}", token_ids=tokens(40), max_new_tokens=60)
            (segment,) = await replica.generate(request)
            ids = np.concatenate([tokens(40), segment.token_ids])
            assert logprob_gap(reference(model, ids), ids, segment.logprobs, start=40) <= 1
    finally:
        await replica.close()


async def ask_two(tested):
    """Two requests at once, one for each group of data parallelism."""
    number = len(tested.exchanges)
    await asyncio.gather(*(tested.ask(f"both-{number + i}", tokens(40, seed=i)) for i in range(2)))


async def update_in_flight(tested):
    """Loads that recompute the K/V of requests in flight, on every group."""
    rollouts, tasks = tested.start_rollouts(prompts(2, length=50), max_new_tokens=80)
    for staged in (False, True):
        await tested.until_more(10)
        await tested.publish("keep-recompute", stays_slow=not staged, staged=staged)
    await asyncio.gather(*tasks)
    assert_whole(tested, *rollouts)


async def find_wrong_bucket(tested, folder):
    """A bucket that rank 1 hashes has other values; the next load is good."""
    good = tested.update(1)
    bad = write_update(folder / "wrong", version=2, tensors=read_update(good.path), bucket_bytes=256 << 10)
    file = update_files(bad.path)[1]
    save_file({name: tensor + 1 for name, tensor in read_tensors(file)}, file)
    with pytest.raises(EngineError, match=f"rank 1 .*{file.stem}"):
        await tested.replica.stage(bad)
    await tested.ask("still", tokens(40))
    await tested.replica.pause()
    with pytest.raises(EngineError, match=f"rank 1 .*{file.stem}"):
        await tested.replica.load(bad)
    if isinstance(tested.probe, VllmProbe):
        await plant(tested, folder, "skipped")
        with pytest.raises(EngineError, match=r"rank 1 .*(other tensors|digest)"):
            await tested.load(1)
        await plant(tested, folder, "")
    await tested.load(1)
    await tested.resume()
    await tested.ask("again", tokens(40))
    assert_true(tested, tested.exchanges)


async def find_wrong_experts(tested, folder, *, staged):
    """Experts that stayed old on one rank, and a load that reached no rank."""
    plugins = folder / PLUGIN
    await plant(tested, plugins, "")
    await tested.publish(version=9, staged=staged)
    await plant(tested, plugins, "stale-on-1 .experts.")
    wrong = r"version 10 .*experts.* on rank 1, made of .*experts"
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match=wrong)):
        await tested.publish(version=10, staged=staged)
    await plant(tested, plugins, "")
    await tested.load(12)
    await tested.resume()
    probe = probe_of(tested)
    probe.ask_all(version=12)
    await probe.compare(12, ScoresOfTruth(tested, version=12))
    await plant(tested, plugins, "none")
    await tested.replica.pause()
    with pytest.raises(EngineError, match="version 13"):
        await tested.load(13)


LAYOUTS = {
    "vllm-tp2": {"tensor_parallel": 2},
    "vllm-tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "vllm-dp2-ep2": {"data_parallel": 2, "expert_parallel": 2},
    "sglang-tp2": {"tensor_parallel": 2},
    "sglang-dp2-ep2": {"data_parallel": 2, "expert_parallel": 2},
}


@OWN_ENGINE
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly if "sglang" in name else ()) for name in LAYOUTS]
)
async def test_ranks_of_a_layout_agree_load_alike_and_end_together(layout, tmp_path, monkeypatch):
    engine, fields = layout.split("-")[0], LAYOUTS[layout]
    if engine == "sglang":
        sglang_support.require_sglang()
    if layout == "vllm-tp2":  # ranks split sinks, experts and their biases
        architecture = tiny_models.gpt_oss_config()
    else:
        architecture = tiny_models.qwen3_moe_config() if engine == "vllm" else sglang_support.qwen3_moe()
    async with serving(engine, make_models(tmp_path, architecture), monkeypatch, **fields) as tested:
        await ask_two(tested)
        for staged in (False, True, True):
            await tested.publish(staged=staged)
            await ask_two(tested)
        assert_true(tested, tested.exchanges)
        assert_forced(tested, await tested.ask("forced", tokens(90), forced_experts=odd_rows(tested, 60)))
        await find_wrong_bucket(tested, tmp_path)
        if "dp2" in layout:
            await update_in_flight(tested)
        if "ep2" in layout:
            await find_wrong_experts(tested, tmp_path, staged="dp2" in layout)
        backend = tested.replica.backend
        pids = [process.pid for process in backend.processes] if engine == "vllm" else [backend.server.pid]
        ranks = [rank for pid in pids for rank in psutil.Process(pid).children(recursive=True)]
        if engine == "vllm":
            assert len(await call_ranks(backend.engine, "first_load", [])) == len(ranks) == 2
            psutil.Process(pids[0]).kill()
        else:
            assert sum("scheduler" in process.name() for process in ranks) == 2
    assert (await asyncio.to_thread(psutil.wait_procs, ranks, timeout=30))[1] == []
