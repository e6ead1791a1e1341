"""A vLLM replica: refusals before any process starts, and the arguments and environment of its engine."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from async_rl.inference.vllm import plugin as vllm_plugin
from async_rl.inference.vllm.config import OWN_VARIABLES, Speculation, VllmConfig, engine_args, engine_environment
from async_rl.inference.vllm.engine import start_vllm
from message_queue.errors import EngineError
from tests.async_rl.inference.test_serving import QWEN, check, checkpoint

DEEPSEEK = {**QWEN, "model_type": "deepseek_v3", "kv_lora_rank": 512, "first_k_dense_replace": 1}


def args_of(folder, fields=QWEN, *, device="cpu", capture_support=False, **options):
    """Arguments of the engine for a checkpoint with these fields."""
    config = VllmConfig(device=device, **options)
    return engine_args(config, check(config, folder, fields), capture_routing=True, capture_support=capture_support)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
GPT_OSS = {**QWEN, "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_parameters": YARN}


@pytest.mark.parametrize(
    ("fields", "refused", "named", "accepted"),
    [
        (QWEN, {"enforce_eager": False}, r"engine\.enforce_eager", {"device": "cuda", "enforce_eager": False}),
        (QWEN, {"block_size": 48}, r"engine\.block_size is 48[,;]", {"block_size": 64}),
        (DEEPSEEK, {"block_size": 32}, r"engine\.block_size is 32[,;]", {"block_size": 16}),
        (
            QWEN,
            {"tensor_parallel": 2, "data_parallel": 2},
            r"engine\.tensor_parallel is 2 with engine\.data_parallel=2 on the CPU",
            {"device": "cuda", "tensor_parallel": 2, "data_parallel": 2},
        ),
        ({**GPT_OSS, "rms_norm_eps": 1e-6}, {}, "rms_norm_eps=1e-06", None),
        ({**GPT_OSS, "rope_parameters": {"rope_type": "default"}}, {}, "rope_type='default'", None),
        ({**GPT_OSS, "rope_parameters": {**YARN, "attention_factor": 1.5}}, {}, "attention_factor", None),
        (GPT_OSS, {"dtype": "float16"}, r"engine\.dtype=float16", {"dtype": "float16", "device": "cuda"}),
    ],
)
def test_what_vllm_cannot_do_with_a_model_is_refused(tmp_path, fields, refused, named, accepted):
    with pytest.raises(ValueError, match=named):
        check(VllmConfig(**{"device": "cpu"} | refused), tmp_path, fields)
    if accepted is not None:
        check(VllmConfig(**{"device": "cpu"} | accepted), tmp_path, fields)
    if "enforce_eager" in refused:
        check(VllmConfig(device="cpu", **refused), tmp_path, fields, capture_routing=False)


MTP = {"speculation": Speculation(method="mtp", tokens=3)}
NGRAM = {"speculation": Speculation(method="ngram")}


@pytest.mark.parametrize(
    ("fields", "refused", "named", "accepted"),
    [
        (QWEN, MTP, r"speculation\.method is mtp.*qwen3_moe", NGRAM),
        (DEEPSEEK, MTP, r"speculation\.method is mtp.*num_nextn_predict_layers", NGRAM),
        ({**DEEPSEEK, "num_nextn_predict_layers": 2}, MTP, r"speculation\.tokens is 3 with 2 layers", NGRAM),
        (
            {**QWEN, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
            NGRAM,
            "ngram, .*state of gated delta nets",
            {},
        ),
        (QWEN, {**NGRAM, "device": "cuda"}, r"speculation\.method is ngram on a GPU", {"device": "cuda"}),
        (QWEN, {**NGRAM, "data_parallel": 2}, r"speculation.*engine\.data_parallel=2", {**NGRAM, "tensor_parallel": 2}),
    ],
)
def test_drafts_that_vllm_cannot_make_are_refused(tmp_path, fields, refused, named, accepted):
    with pytest.raises(ValueError, match=named):
        check(VllmConfig(**{"device": "cpu", **refused}), tmp_path, fields)
    check(VllmConfig(**{"device": "cpu", **accepted}), tmp_path, fields)
    check(VllmConfig(device="cpu", **MTP), tmp_path, {**DEEPSEEK, "num_nextn_predict_layers": 1})


def test_the_acceptance_of_drafts_is_the_exact_one(tmp_path):
    asked = args_of(tmp_path, **NGRAM)["speculative_config"]
    assert (asked["method"], asked["rejection_sample_method"]) == ("ngram", "standard")
    assert "speculative_config" not in args_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "device", "capture", "named"),
    [
        ({"model_type": "granitemoe"}, "cpu", True, "granitemoe"),
        ({}, "cuda", True, r"engine\.device is cuda"),
        ({}, "cpu", False, "capture"),
    ],
)
def test_forced_routing_that_vllm_cannot_do_is_refused(tmp_path, fields, device, capture, named):
    config, fields = VllmConfig(device=device), {**QWEN, **fields}
    with pytest.raises(ValueError, match=rf"{named}.*rollout\.resume_routing"):
        check(config, tmp_path, fields, capture_routing=capture, force_routing=True)
    model = check(config, tmp_path, fields, capture_routing=capture)
    assert model.unforcible is not None
    assert (model.routing is None) is not capture


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "mixtral", "olmoe", "glm4_moe", "gpt_oss"]
)
def test_vllm_offers_forced_routing_for_the_tested_families(tmp_path, family):
    fields = {**{"deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS}.get(family, QWEN), "model_type": family}
    assert check(VllmConfig(device="cpu"), tmp_path, fields, force_routing=True).unforcible is None


def test_gated_delta_nets_on_the_cpu_need_a_type_and_heads_that_have_kernels(tmp_path):
    fields = {**QWEN, "model_type": "qwen3_next", "linear_key_head_dim": 128, "linear_value_head_dim": 32}
    check(VllmConfig(device="cpu"), tmp_path, fields)
    check(VllmConfig(device="cpu", dtype="bfloat16"), tmp_path, {**fields, "linear_value_head_dim": 64})
    with pytest.raises(ValueError, match=r"linear_value_head_dim=32; .*64, 128 only; .*dtype=float32"):
        check(VllmConfig(device="cpu", dtype="bfloat16"), tmp_path, fields)
    with pytest.raises(ValueError, match=r"engine\.dtype is float16, .*bfloat16 or float32"):
        check(VllmConfig(device="cpu", dtype="float16"), tmp_path, fields)


def test_the_text_part_of_a_checkpoint_with_a_vision_tower_is_checked_and_served_alone(tmp_path):
    text = {**QWEN, "model_type": "qwen3_5_moe_text", "linear_key_head_dim": 128, "linear_value_head_dim": 32}
    fields = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}}
    assert args_of(tmp_path, fields)["language_model_only"]
    assert "language_model_only" not in args_of(tmp_path, text)
    with pytest.raises(ValueError, match=r"linear_value_head_dim=32"):
        check(VllmConfig(device="cpu", dtype="bfloat16"), tmp_path, fields)


def test_latent_attention_on_the_cpu_avoids_kernels_that_are_wrong_or_refuse(tmp_path):
    on_cpu = args_of(tmp_path, DEEPSEEK)
    assert on_cpu["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert on_cpu["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in args_of(tmp_path, DEEPSEEK, dtype="bfloat16")
    assert not {"compilation_config", "attention_backend"} & set(args_of(tmp_path, QWEN))
    own = {"compilation_config": {"custom_ops": ["all"]}}
    with pytest.raises(ValueError, match=r"engine\.extra_args sets compilation_config"):
        args_of(tmp_path, DEEPSEEK, extra_args=own)
    assert args_of(tmp_path, QWEN, extra_args=own)["compilation_config"] == own["compilation_config"]
    on_gpu = args_of(tmp_path, DEEPSEEK, device="cuda")
    repairs = {"compilation_config", "attention_backend", "worker_cls", "kv_cache_memory_bytes"}
    assert not repairs & set(on_gpu), "a GPU needs no repair"
    assert on_gpu["gpu_memory_utilization"] == 0.85


@pytest.mark.parametrize("name", ["tensor_parallel", "data_parallel"])
def test_ranks_of_a_replica_are_its_own_processes(tmp_path, name):
    args, alone = args_of(tmp_path, **{name: 2}, expert_parallel=2), args_of(tmp_path)
    assert args["distributed_executor_backend"] == "mp" and "distributed_executor_backend" not in alone
    assert (args[f"{name}_size"], args["enable_expert_parallel"]) == (2, True)
    assert (alone["tensor_parallel_size"], alone["data_parallel_size"]) == (1, 1)
    assert alone["enable_expert_parallel"] is False


@pytest.mark.parametrize(
    ("device", "wanted", "given"), [("cuda", False, False), ("cuda", True, True), ("cpu", False, True)]
)
def test_kept_tokens_are_returned_on_a_gpu_if_wanted(tmp_path, device, wanted, given):
    assert args_of(tmp_path, device=device, capture_support=wanted)["return_sampling_mask"] is given


async def test_process_without_the_engine_environment_is_refused(tmp_path, monkeypatch):
    (checkpoint(tmp_path, QWEN) / "model.safetensors").touch()
    config = VllmConfig(device="cpu", threads=2)
    for name, value in engine_environment(config).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    with pytest.raises(EngineError, match=r"replica-3.*OMP_NUM_THREADS"):
        await start_vllm(config, name="replica-3", checkpoint=tmp_path)


def test_engine_environment_follows_the_device():
    on_cpu, on_gpu = (engine_environment(VllmConfig(device=device)) for device in ("cpu", "cuda"))
    assert on_cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert on_gpu["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in on_gpu
    assert set(on_cpu) | set(on_gpu) <= OWN_VARIABLES


def test_vllm_plugin_is_declared_and_imports_nothing_unless_wanted():
    (entry,) = entry_points(group="vllm.general_plugins", name="async_rl")
    assert entry.load() is vllm_plugin.register
    script = (
        "import sys, async_rl.inference.vllm.plugin as plugin\n"
        "plugin.register()\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), 'costs every vLLM process of the environment'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={}, timeout=60)
