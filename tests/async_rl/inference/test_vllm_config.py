"""What a vLLM replica refuses before any process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.engine import EngineError
from async_rl.inference.checkpoint_weights import digest_checkpoint, weight_files
from async_rl.inference.vllm import plugin as vllm_plugin
from async_rl.inference.vllm.config import OWN_VARIABLES, engine_args
from async_rl.inference.vllm.engine import VllmConfig, check_engine, engine_environment, start_vllm
from async_rl.weights.model_info import CheckpointError

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 117,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
DEEPSEEK = {**QWEN, "model_type": "deepseek_v3", "kv_lora_rank": 512, "first_k_dense_replace": 1}
DENSE = {**QWEN, "model_type": "qwen3", "num_experts": None}


def checkpoint(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "sglang"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("replicas", 0),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 8),
        ("kv_cache_bytes", 0),
        ("gpu_memory_utilization", 1.5),
        ("block_size", 20),
        ("tensor_parallel", 0),
        ("threads", 0),
        ("load_timeout_s", 0.0),
        ("start_timeout_s", 0.0),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field: str, value: Any):
    with pytest.raises(ValueError, match=rf"engine\.{field} is {value!r}[,;].+"):
        VllmConfig(**{field: value})


def test_extra_args_cannot_undo_what_the_replica_sets():
    with pytest.raises(ValueError, match=r"engine.extra_args sets enforce_eager, logprobs_mode"):
        VllmConfig(extra_args={"enforce_eager": False, "logprobs_mode": "raw_logprobs"})


CHANGING = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "spec_method": "ngram",
    "quantization": "fp8",
    "hf_overrides": {"rope_theta": 1e4},
    "logits_processors": ["module:Processor"],
    "override_generation_config": {"top_k": 4},
    "generation_config": "auto",
    "enable_lora": True,
    "kv_cache_dtype": "fp8",
    "load_format": "dummy",
    "model_impl": "transformers",
    "watermark_config": {},
    "an_option_of_tomorrow": 1,
}


@pytest.mark.parametrize("name", CHANGING)
def test_extra_args_that_may_change_weights_or_distribution_are_refused(name: str):
    with pytest.raises(ValueError, match=rf"engine\.extra_args sets {name}\b"):
        VllmConfig(extra_args={name: CHANGING[name]})
    assert VllmConfig(extra_args={"max_num_scheduled_tokens": 64}).extra_args


def test_extra_args_cannot_undo_a_repair_of_latent_attention(tmp_path: Path):
    config = VllmConfig(device="cpu", extra_args={"compilation_config": {"custom_ops": ["all"]}})
    model = check_engine(config, checkpoint=checkpoint(tmp_path, DEEPSEEK), capture_routing=True)
    with pytest.raises(ValueError, match=r"engine\.extra_args sets compilation_config, which deepseek_v3"):
        engine_args(config, model, capture_routing=True)
    model = check_engine(config, checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)
    assert engine_args(config, model, capture_routing=True)["compilation_config"] == {"custom_ops": ["all"]}


def test_capture_under_a_compiled_graph_is_refused_on_the_cpu(tmp_path: Path):
    config = VllmConfig(device="cpu", enforce_eager=False)
    with pytest.raises(ValueError, match=r"engine.enforce_eager is false with routing capture on"):
        check_engine(config, checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)
    check_engine(config, checkpoint=tmp_path, capture_routing=False)
    check_engine(VllmConfig(device="cuda", enforce_eager=False), checkpoint=tmp_path, capture_routing=True)


def test_capture_of_a_dense_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\(qwen3\) is a dense model.*trainer\.router_replay=none"):
        check_engine(VllmConfig(), checkpoint=checkpoint(tmp_path, DENSE), capture_routing=True)
    check_engine(VllmConfig(), checkpoint=tmp_path, capture_routing=False)


@pytest.mark.parametrize(
    ("fields", "device", "capture", "why"),
    [
        ({"model_type": "granitemoe"}, "cpu", True, "family is granitemoe, and routers are forced in qwen3_moe"),
        ({}, "cuda", True, "engine.device is cuda, and routers are forced in vLLM's CPU worker only"),
        ({}, "cpu", False, "routing capture is off"),
    ],
)
def test_forced_routing_is_refused_where_no_router_can_be_forced(
    tmp_path: Path, fields: dict[str, Any], device: Any, capture: bool, why: str
):
    config, path = VllmConfig(device=device), checkpoint(tmp_path, {**QWEN, **fields})
    with pytest.raises(ValueError, match=rf"forced routing is asked for, but .*{why}.*; use rollout.resume_routing="):
        check_engine(config, checkpoint=path, capture_routing=capture, force_routing=True)
    model = check_engine(config, checkpoint=path, capture_routing=capture)
    assert model.unforcible is not None
    assert (model.routing is None) is not capture


@pytest.mark.parametrize(
    "fields", [QWEN, DEEPSEEK, *({**QWEN, "model_type": family} for family in ("mixtral", "olmoe", "glm4_moe"))]
)
def test_forced_routing_is_built_for_the_families_that_are_proven(tmp_path: Path, fields: dict[str, Any]):
    path = checkpoint(tmp_path, fields)
    model = check_engine(VllmConfig(device="cpu"), checkpoint=path, capture_routing=True, force_routing=True)
    assert model.unforcible is None


@pytest.mark.parametrize("family", ["glm4_moe", "olmoe", "deepseek_v3"])
def test_tied_weights_that_vllm_would_not_tie_are_refused(tmp_path: Path, family: str):
    path = checkpoint(tmp_path, {**QWEN, "model_type": family, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match=rf"\({family}\) has tie_word_embeddings=true.*tie_word_embeddings=false"):
        check_engine(VllmConfig(device="cpu"), checkpoint=path, capture_routing=True)
    checkpoint(tmp_path, {**QWEN, "tie_word_embeddings": True})
    assert check_engine(VllmConfig(device="cpu"), checkpoint=path, capture_routing=True).info.tied


def test_a_context_beyond_the_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"engine.max_model_len is 4096, more than the 2048 positions"):
        check_engine(VllmConfig(max_model_len=4096), checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)


@pytest.mark.parametrize(("fields", "bad", "good"), [(QWEN, 48, 64), (DEEPSEEK, 32, 16)])
def test_a_block_size_without_a_cpu_kernel_is_refused(tmp_path: Path, fields: dict[str, Any], bad: int, good: int):
    path = checkpoint(tmp_path, fields)
    with pytest.raises(ValueError, match=rf"engine.block_size is {bad}[,;]"):
        check_engine(VllmConfig(device="cpu", block_size=bad), checkpoint=path, capture_routing=True)
    for size in (good, None):
        check_engine(VllmConfig(device="cpu", block_size=size), checkpoint=path, capture_routing=True)


def test_latent_attention_on_the_cpu_avoids_kernels_that_are_wrong_or_refuse(tmp_path: Path):
    def args(fields: dict[str, Any], device: Any, dtype: str = "float32") -> dict[str, Any]:
        config = VllmConfig(device=device, dtype=dtype)
        model = check_engine(config, checkpoint=checkpoint(tmp_path, fields), capture_routing=True)
        return engine_args(config, model, capture_routing=True)

    assert args(DEEPSEEK, "cpu")["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert args(DEEPSEEK, "cpu")["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in args(DEEPSEEK, "cpu", "bfloat16")
    assert not {"compilation_config", "attention_backend"} & set(args(QWEN, "cpu"))
    on_gpu = args(DEEPSEEK, "cuda")
    assert not {"compilation_config", "attention_backend", "worker_cls", "kv_cache_memory_bytes"} & set(on_gpu), (
        "a GPU needs no repair"
    )
    assert on_gpu["gpu_memory_utilization"] == 0.85


async def test_a_process_without_the_engine_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (checkpoint(tmp_path, QWEN) / "model.safetensors").touch()
    config = VllmConfig(device="cpu", threads=2)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    with pytest.raises(EngineError, match=r"replica-3: the process has OMP_NUM_THREADS='64' \(needs '2'\)"):
        await start_vllm(config, name="replica-3", checkpoint=tmp_path)


def test_the_environment_follows_the_device():
    assert engine_environment(VllmConfig(device="cpu"))["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    on_gpu = engine_environment(VllmConfig(device="cuda"))
    assert on_gpu["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in on_gpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_variable_that_a_replica_sets_is_its_own(device: Any):
    assert set(engine_environment(VllmConfig(device=device))) <= OWN_VARIABLES


def test_workers_of_tensor_parallelism_are_processes_of_the_replica(tmp_path: Path):
    def args(tensor_parallel: int) -> dict[str, Any]:
        config = VllmConfig(device="cpu", tensor_parallel=tensor_parallel)
        model = check_engine(config, checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)
        return engine_args(config, model, capture_routing=True)

    assert args(2)["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in args(1)
    with pytest.raises(ValueError, match=r"engine\.extra_args sets distributed_executor_backend"):
        VllmConfig(extra_args={"distributed_executor_backend": "ray"})


def test_kept_tokens_are_returned_by_every_cpu_engine_and_if_asked_for_on_a_gpu(tmp_path: Path):
    def returned(device: Any, *, capture_support: bool) -> bool:
        config = VllmConfig(device=device)
        model = check_engine(config, checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)
        return engine_args(config, model, capture_routing=True, capture_support=capture_support)["return_sampling_mask"]

    assert [returned("cuda", capture_support=wanted) for wanted in (False, True)] == [False, True]
    assert returned("cpu", capture_support=False)
    with pytest.raises(ValueError, match="return_sampling_mask"):
        VllmConfig(extra_args={"return_sampling_mask": False})


def test_the_plugin_is_declared_and_imports_nothing_when_not_wanted():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="async_rl")
    assert entry.load() is vllm_plugin.register
    script = (
        "import sys, async_rl.inference.vllm.plugin as plugin\n"
        "plugin.register()\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'costs every vLLM process of the environment'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={}, timeout=60)


def test_importing_the_replica_does_not_import_vllm():
    script = "import sys, async_rl.inference.vllm.engine; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_digest_of_a_checkpoint_is_that_of_its_tensors_however_they_are_split(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate("abc")}
    whole, split = tmp_path / "whole", tmp_path / "split"
    whole.mkdir()
    split.mkdir()
    save_file(tensors, whole / "model.safetensors")
    files = {"b": "model-00001.safetensors", "a": "model-00002.safetensors", "c": "model-00002.safetensors"}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"stray": tensors["a"]}, split / "consolidated.safetensors")
    assert digest_checkpoint(whole) == digest_checkpoint(split)
    (split / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002\.safetensors, which its index names"):
        weight_files(split)
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        weight_files(tmp_path)
