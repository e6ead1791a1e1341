"""Refusals that all engines share, before any process starts."""

import contextlib
import itertools
import json
import subprocess
import sys

import pytest

from async_rl.inference import serving
from async_rl.inference.sglang import config as sglang
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm import config as vllm
from async_rl.inference.vllm.config import VllmConfig

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 117,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
}
DENSE = {**QWEN, "model_type": "qwen3", "num_experts": None}
EVERY = [VllmConfig, SglangConfig]


def checkpoint(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def check(config, folder, fields, *, capture_routing=True, **options):
    """The model of a checkpoint with these fields, as an engine serves it."""
    check_engine = vllm.check_engine if isinstance(config, VllmConfig) else sglang.check_engine
    return check_engine(config, checkpoint=checkpoint(folder, fields), capture_routing=capture_routing, **options)


POSITIVE = "replicas max_num_seqs max_num_batched_tokens tensor_parallel data_parallel expert_parallel nodes threads"
WRONG = [
    *(("device", "tpu"), ("dtype", "int8"), ("kv_cache_dtype", "int4"), ("gpu_memory_utilization", 1.5)),
    *((name, 0) for name in POSITIVE.split()),
    *(("max_model_len", 1), ("nodes", 2), ("expert_parallel", 2)),
    *(("load_timeout_s", 0.0), ("start_timeout_s", 0.0)),
]
WRONG_OF = {
    VllmConfig: [("name", "sglang"), ("max_num_batched_tokens", 8), ("kv_cache_bytes", 0), ("block_size", 20)],
    SglangConfig: [("name", "vllm"), ("kv_cache_tokens", 1031)],
}


@pytest.mark.parametrize(
    ("engine", "field", "value"), [(engine, *wrong) for engine in EVERY for wrong in [*WRONG, *WRONG_OF[engine]]]
)
def test_engine_config_names_the_field_and_the_value_that_it_refuses(engine, field, value):
    with pytest.raises(ValueError, match=rf"engine\.{field} is {value!r}"):
        engine(**{field: value})


@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize(
    ("nodes", "tensor", "data", "fits"),
    [(2, 4, 1, True), (2, 1, 4, True), (4, 2, 2, True), (2, 3, 1, False), (3, 3, 2, False), (3, 4, 1, False)],
)
def test_nodes_of_a_replica_have_equal_ranks_and_equal_parts_of_groups(engine, nodes, tensor, data, fits):
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=rf"engine\.nodes is {nodes} "):
        engine(nodes=nodes, tensor_parallel=tensor, data_parallel=data)


CHANGING = {
    VllmConfig: """speculative_config spec_method quantization hf_overrides logits_processors generation_config
        override_generation_config enable_lora kv_cache_dtype load_format model_impl watermark_config enforce_eager
        logprobs_mode distributed_executor_backend return_sampling_mask enable_expert_parallel data_parallel_size
        spec_tokens an_option_of_tomorrow""",
    SglangConfig: """disable_overlap_schedule dp_size weight_version sampling_defaults json_model_override_args
        speculative_algorithm speculative_num_steps quantization load_format enable_lora enable_custom_logit_processor
        preferred_sampling_params kv_cache_dtype enable_watermark custom_weight_loader model_impl ep_size attn_dp_size
        an_option_of_tomorrow""",
}


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in EVERY for name in CHANGING[engine].split()])
def test_extra_args_that_may_change_weights_or_distribution_are_refused(engine, name):
    with pytest.raises(ValueError, match=rf"engine\.extra_args sets {name}\b"):
        engine(extra_args={name: 2})
    assert engine(extra_args={"log_level": "info"}).extra_args


@pytest.mark.parametrize("engine", EVERY)
def test_a_dense_model_with_capture_and_a_context_beyond_that_of_the_model_are_refused(tmp_path, engine):
    with pytest.raises(ValueError, match=r"qwen3.*trainer\.router_replay"):
        check(engine(device="cpu"), tmp_path, DENSE)
    check(engine(device="cpu"), tmp_path, DENSE, capture_routing=False)
    with pytest.raises(ValueError, match=r"engine\.max_model_len is 4096.* 2048 "):
        check(engine(max_model_len=4096), tmp_path, QWEN)


@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 2, 2), (1, 2, 1), (4, 2, 8)])
def test_layouts_that_share_experts_are_accepted_for_models_with_experts(tmp_path, engine, layout):
    fields = dict(zip(("tensor_parallel", "data_parallel", "expert_parallel"), layout, strict=True))
    config = engine(device="cuda", **fields)
    assert config.ranks == layout[0] * layout[1]
    check(config, tmp_path, {**QWEN, "moe_intermediate_size": 64})
    for name in ("data_parallel", "expert_parallel"):
        if fields[name] > 1:
            with pytest.raises(ValueError, match=rf"engine\.{name} is {fields[name]}, and qwen3 .*engine\.replicas"):
                check(config, tmp_path, DENSE, capture_routing=False)


@pytest.mark.parametrize("engine", EVERY)
def test_experts_that_do_not_divide_over_the_ranks_are_refused(tmp_path, engine):
    fields, layout = {**QWEN, "moe_intermediate_size": 6}, {"device": "cuda", "tensor_parallel": 2, "data_parallel": 2}
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel x engine\.data_parallel is 4.* 6 columns"):
        check(engine(**layout), tmp_path, fields)
    spread = engine(**layout, expert_parallel=4)
    check(spread, tmp_path, fields)
    with pytest.raises(ValueError, match=r"engine\.expert_parallel is 4.* 6 experts"):
        check(spread, tmp_path, {**fields, "num_experts": 6})


UNTIED = {VllmConfig: ("glm4_moe", "olmoe", "deepseek_v3"), SglangConfig: ("qwen3_moe", "mixtral", "glm4_moe")}


@pytest.mark.parametrize(("engine", "family"), [(engine, family) for engine in EVERY for family in UNTIED[engine]])
def test_tied_weights_that_an_engine_would_not_tie_are_refused(tmp_path, engine, family):
    tied = {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match=rf"\({family}\).*tie_word_embeddings"):
        check(engine(device="cpu"), tmp_path, {**QWEN, **tied, "model_type": family})
    check(engine(device="cpu"), tmp_path, {**DENSE, **tied}, capture_routing=False)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_replica_module_imports_no_engine(engine):
    script = (
        f"import sys, async_rl.inference.{engine}.engine; assert not {{'sglang', 'vllm', 'ray'}} & {{*sys.modules}}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def arguments(config, folder):
    """Arguments of the engine of a replica; those of SGLang are a mapping as well."""
    model = check(config, folder, QWEN)
    if isinstance(config, VllmConfig):
        return vllm.engine_args(config, model, capture_routing=True)
    given = sglang.server_arguments(config, folder, port=1, served_name="n", label="first", capture_routing=True)
    return dict(itertools.pairwise(given))


def test_engine_leaves_the_room_of_the_twin_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "gpu_bytes", lambda: 40e9)
    staged = {"device": "cuda", "gpu_memory_utilization": 0.8, "twin_bytes": int(8e9)}
    assert arguments(VllmConfig(**staged), tmp_path)["gpu_memory_utilization"] == pytest.approx(0.6)
    assert float(arguments(SglangConfig(**staged), tmp_path)["--mem-fraction-static"]) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"engine\.gpu_memory_utilization is 0\.8.*tensor_parallel"):
        VllmConfig(**{**staged, "twin_bytes": int(32e9)}).gpu_share()


@pytest.mark.parametrize(("engine", "name"), [(VllmConfig, "kv_cache_dtype"), (SglangConfig, "--kv-cache-dtype")])
def test_kv_in_8_bits_is_for_gpus(engine, name, tmp_path):
    with pytest.raises(ValueError, match=r"engine\.kv_cache_dtype is fp8_e4m3 on the CPU"):
        check(engine(device="cpu", kv_cache_dtype="fp8_e4m3"), tmp_path, QWEN)
    assert arguments(engine(device="cuda", kv_cache_dtype="fp8_e4m3"), tmp_path)[name] == "fp8_e4m3"


def test_kv_in_8_bits_takes_a_quarter_of_float32():
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    assert serving.kv_bytes_per_token(fields, VllmConfig()) == 2 * 2 * 2 * 32 * 4
    assert serving.kv_bytes_per_token(fields, VllmConfig(kv_cache_dtype="fp8_e5m2")) == 2 * 2 * 2 * 32
