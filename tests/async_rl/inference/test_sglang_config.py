"""What an SGLang replica refuses before any process starts, and what it asks of its server."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.engine import EngineError
from async_rl.inference.replica import EngineLoad
from async_rl.inference.sglang.config import CPU_PATH, OWN_VARIABLES, PLUGIN_PATH, server_arguments, server_environment
from async_rl.inference.sglang.engine import SglangConfig, check_engine, start_sglang
from async_rl.inference.sglang.server import check_version, interpreter
from async_rl.inference.sglang.update import HOOKS, REPORTED, first_load, reported_load
from message_queue.tokens import ContractError

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
PLUGIN = PLUGIN_PATH / "async_rl_sglang"


def checkpoint(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "vllm"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("replicas", 0),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("kv_cache_tokens", 1031),
        ("gpu_memory_utilization", 1.5),
        ("tensor_parallel", 0),
        ("threads", 0),
        ("load_timeout_s", 0.0),
        ("start_timeout_s", 0.0),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field: str, value: Any):
    with pytest.raises(ValueError, match=rf"engine\.{field} is {value!r}[,;].+"):
        SglangConfig(**{field: value})


@pytest.mark.parametrize(
    "name",
    [
        *("disable_overlap_schedule", "dp_size", "weight_version", "sampling_defaults"),
        *("speculative_algorithm", "speculative_num_steps", "quantization", "json_model_override_args", "load_format"),
        *("enable_custom_logit_processor", "preferred_sampling_params", "enable_lora", "kv_cache_dtype"),
        *("enable_watermark", "custom_weight_loader", "model_impl", "an_option_of_tomorrow"),
    ],
)
def test_extra_args_that_may_change_weights_or_distribution_are_refused(name: str):
    with pytest.raises(ValueError, match=rf"engine\.extra_args sets {name}\b"):
        SglangConfig(extra_args={name: 2})
    assert SglangConfig(extra_args={"page_size": 1}).extra_args


def test_capture_of_a_dense_model_is_refused(tmp_path: Path):
    config = SglangConfig(device="cpu")
    with pytest.raises(ValueError, match=r"\(qwen3\) is a dense model.*trainer\.router_replay=none"):
        check_engine(config, checkpoint=checkpoint(tmp_path, DENSE), capture_routing=True)
    check_engine(config, checkpoint=tmp_path, capture_routing=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_tied_weights_that_sglang_would_not_tie_are_refused(tmp_path: Path, family: str):
    config = SglangConfig(device="cpu")
    path = checkpoint(tmp_path, {**QWEN, "model_type": family, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match=rf"\({family}\) has tie_word_embeddings=true.*tie_word_embeddings=false"):
        check_engine(config, checkpoint=path, capture_routing=True)
    checkpoint(tmp_path, {**DENSE, "tie_word_embeddings": True})
    assert check_engine(config, checkpoint=path, capture_routing=False).info.tied


def test_a_context_beyond_the_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"engine.max_model_len is 4096, more than the 2048 positions"):
        check_engine(SglangConfig(max_model_len=4096), checkpoint=checkpoint(tmp_path, QWEN), capture_routing=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dense_layers_that_sglang_would_ignore_are_refused(tmp_path: Path, device: Any):
    path = checkpoint(tmp_path, {**QWEN, "mlp_only_layers": [0]})
    with pytest.raises(ValueError, match=r"mlp_only_layers=\[0\], which SGLang ignores in qwen3_moe.*use engine=vllm"):
        check_engine(SglangConfig(device=device), checkpoint=path, capture_routing=True)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen2_moe", "Triton kernel"),
        ("deepseek_v3", "latent attention"),
        ("olmoe", "qwen3_moe"),
    ],
)
def test_a_family_that_does_not_run_on_the_cpu_is_refused_there(tmp_path: Path, family: str, why: str):
    path = checkpoint(tmp_path, {**QWEN, "model_type": family})
    with pytest.raises(ValueError, match=rf"does not run {family} .* on the CPU: .*{why}"):
        check_engine(SglangConfig(device="cpu"), checkpoint=path, capture_routing=True)
    check_engine(SglangConfig(device="cuda"), checkpoint=path, capture_routing=True)


def test_forcing_is_refused_where_it_is_not_proven(tmp_path: Path):
    config = SglangConfig(device="cuda")
    path = checkpoint(tmp_path, {**QWEN, "model_type": "olmoe"})
    with pytest.raises(ValueError, match=r"rollout\.resume_routing is 'force'.*qwen3_moe, mixtral, glm4_moe.*olmoe"):
        check_engine(config, checkpoint=path, capture_routing=True, force_routing=True)
    path = checkpoint(tmp_path, QWEN)
    with pytest.raises(ValueError, match=r"resume_routing is 'force' without routing capture"):
        check_engine(config, checkpoint=path, capture_routing=False, force_routing=True)
    check_engine(config, checkpoint=path, capture_routing=True, force_routing=True)


def arguments(folder: Path, **fields: Any) -> list[str]:
    config = SglangConfig(**fields)
    model = check_engine(config, checkpoint=checkpoint(folder, QWEN), capture_routing=True)
    return server_arguments(config, model, port=1, served_name="n", label="first", capture_routing=True)


def test_the_server_is_asked_for_exact_versions_and_rows(tmp_path: Path):
    given = arguments(tmp_path, device="cpu", max_model_len=100, extra_args={"page_size": 1, "log_requests": False})
    for flag in ("--disable-overlap-schedule", "--enable-return-routed-experts", "--skip-tokenizer-init"):
        assert flag in given
    pairs = dict(itertools.pairwise(given))
    assert (pairs["--context-length"], pairs["--max-total-tokens"]) == ("108", "864")
    assert (pairs["--host"], pairs["--page-size"]) == ("127.0.0.1", "1")
    assert "--log-requests" not in given


def test_a_gpu_server_is_stock(tmp_path: Path):
    given = arguments(tmp_path, device="cuda", enforce_eager=False)
    assert not {"--device", "--attention-backend", "--sampling-backend", "--max-total-tokens"} & set(given)
    assert "--disable-cuda-graph" not in given
    assert "--disable-prefill-cuda-graph" in given, "a graph would go around the hook that forces experts"
    variables = server_environment(SglangConfig(device="cuda"), owner=1, folder=tmp_path)
    assert variables["PYTHONPATH"] == str(PLUGIN_PATH), "no shim on a GPU"
    assert "SGLANG_USE_CPU_ENGINE" not in variables


def test_the_server_inherits_nothing_of_this_virtualenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/elsewhere")
    variables = server_environment(SglangConfig(device="cpu", threads=2), owner=7, folder=tmp_path)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(PLUGIN_PATH), str(CPU_PATH)]
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & set(variables)
    assert (variables["OMP_NUM_THREADS"], variables["ASYNC_RL_OWNER_PID"]) == ("2", "7")
    assert variables["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_variable_that_a_replica_sets_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any):
    for name in OWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = SglangConfig(device=device, tensor_parallel=2)
    assert set(server_environment(config, owner=7, folder=tmp_path)) - set(os.environ) <= OWN_VARIABLES


async def test_without_its_virtualenv_the_replica_says_how_to_make_it(tmp_path: Path):
    (checkpoint(tmp_path, QWEN) / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    config = SglangConfig(device="cpu", python=tmp_path / "none")
    with pytest.raises(EngineError, match=r"replica-3: .*none; .*`make setup-sglang`.*engine\.python"):
        await start_sglang(config, name="replica-3", checkpoint=tmp_path)


async def test_an_interpreter_with_another_sglang_or_none_is_refused(tmp_path: Path):
    fake = tmp_path / "python"
    for script, found in (("#!/bin/sh\necho 0.5.19\n", "0.5.19"), ("#!/bin/sh\nexit 1\n", "no sglang")):
        fake.write_text(script)
        fake.chmod(0o755)
        assert interpreter(SglangConfig(python=fake)) == fake
        with pytest.raises(EngineError, match=rf"has {found}.*sglang 0\.5\.23"):
            await check_version(fake)


def ranks_with(*digests, checksums=({"w": "12"}, {"w": "34"})):
    return [{"digest": digest, "checksums": checksums[rank]} for rank, digest in enumerate(digests)]


def test_the_first_load_needs_the_plugin_its_hooks_and_one_digest():
    hooks = [f"sglang.srt.{hook}" for hook in HOOKS]
    assert first_load({"hooks": hooks, "ranks": ranks_with("ab")}) == EngineLoad("ab", [{"w": "12"}])
    with pytest.raises(ContractError, match="SGLANG_PLUGINS"):
        first_load({})
    with pytest.raises(ContractError, match=r"hooks.*Scheduler\.send_abort_output"):
        first_load({"hooks": [h for h in hooks if "abort" not in h], "ranks": ranks_with("ab")})
    with pytest.raises(ContractError, match="with the digests ab, cd"):
        first_load({"hooks": hooks, "ranks": ranks_with("ab", "cd")})


def test_a_reported_load_has_one_digest_and_the_checksums_of_each_rank():
    def message(ranks):
        return f"Succeeded. {REPORTED}{json.dumps(ranks)} Weight version updated to 1-ab."

    both = ranks_with("ab", "ab")
    found = reported_load({"success": True, "message": message(both)})
    assert found == EngineLoad("ab", [{"w": "12"}, {"w": "34"}])
    for answer in (
        {"success": False, "message": message(both)},
        {"success": True, "message": "Succeeded."},
        {"success": True, "message": None},
        {"success": True, "message": message(ranks_with("ab", "cd"))},
        {"success": True, "message": message(ranks_with("", ""))},
        {"success": True, "message": message(ranks_with("ab", "ab", checksums=({"w": "12"}, {})))},
        {"success": True, "message": message([])},
    ):
        with pytest.raises(ContractError):
            reported_load(answer)


def test_the_plugin_is_found_by_its_path_alone_and_names_the_hooks_that_are_required():
    script = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(entry,) = entry_points(group='sglang.srt.plugins')\n"
        "assert entry.load().__module__ == 'async_rl_sglang'\n"
        "assert not {'torch', 'sglang', 'async_rl'} & set(sys.modules), 'costs every process'\n"
        "from async_rl_sglang import STOP_TOKENS, loading, routing, sampling\n"
        "print('\\n'.join([*loading.HOOKS, *routing.HOOKS, *sampling.HOOKS, STOP_TOKENS]))\n"
        "assert loading._weights_module('digest').WeightsDigest and loading._weights_module('checksum').checksum\n"
        f"assert loading.LOADED == {REPORTED!r}\n"
        "assert 'async_rl' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PLUGIN_PATH)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    targets = done.stdout.split()
    assert len(targets) == len(HOOKS)
    assert all(any(hook in target for target in targets) for hook in HOOKS)


def test_importing_the_replica_imports_no_engine():
    script = "import sys, async_rl.inference.sglang.engine; assert not {'sglang', 'vllm', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_pin_of_the_lock_is_complete():
    pins = (Path(__file__).parents[3] / "requirements" / "sglang.lock").read_text().split()
    assert all("==" in pin for pin in pins)
    assert {"sglang==0.5.23", "torch==2.13.0+cpu"} <= set(pins)
