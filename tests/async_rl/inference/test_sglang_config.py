"""An SGLang replica: refusals before any process starts, and the arguments and environment of its server."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.inference.loads import RankLoad
from async_rl.inference.sglang.config import CPU_PATH, OWN_VARIABLES, PLUGIN_PATH, server_arguments, server_environment
from async_rl.inference.sglang.engine import SglangConfig, start_sglang
from async_rl.inference.sglang.server import check_version, interpreter
from async_rl.inference.sglang.update import NOT_STAGED, REPORTED, first_load, reported_load, staged_load
from message_queue.errors import ContractError, EngineError
from tests.async_rl.inference.test_serving import QWEN, check, checkpoint
from tests.helpers.live import without_equation


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dense_layers_that_sglang_would_ignore_are_refused(tmp_path, device):
    with pytest.raises(ValueError, match=r"mlp_only_layers=\[0\]"):
        check(SglangConfig(device=device), tmp_path, {**QWEN, "mlp_only_layers": [0]})


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("qwen2_moe", "Triton"),
        ("deepseek_v3", "latent attention"),
        ("gpt_oss", "sinks"),
        ("qwen3_5_moe_text", "Triton"),
        ("olmoe", "qwen3_moe"),
    ],
)
def test_family_that_sglang_does_not_run_on_the_cpu_is_refused_there(tmp_path, family, named):
    fields = {**QWEN, "model_type": family}
    with pytest.raises(ValueError, match=rf"{family} .*CPU.*{named}"):
        check(SglangConfig(device="cpu"), tmp_path, fields)
    check(SglangConfig(device="cuda"), tmp_path, fields)


def test_sglang_offers_forced_routing_for_the_tested_families(tmp_path):
    config = SglangConfig(device="cuda")
    with pytest.raises(ValueError, match=r"rollout\.resume_routing.*olmoe"):
        check(config, tmp_path, {**QWEN, "model_type": "olmoe"}, force_routing=True)
    with pytest.raises(ValueError, match=r"rollout\.resume_routing.*trainer\.router_replay"):
        check(config, tmp_path, QWEN, capture_routing=False, force_routing=True)
    check(config, tmp_path, QWEN, force_routing=True)


def arguments(folder, **fields):
    """Arguments of the server of a replica."""
    config = SglangConfig(**fields)
    check(config, folder, QWEN)
    return server_arguments(config, folder, port=1, served_name="n", label="first", capture_routing=True)


def test_a_vision_tower_is_refused_on_every_device(tmp_path):
    fields = {"text_config": {**QWEN, "model_type": "qwen3_5_moe_text"}, "vision_config": {"depth": 1}}
    with pytest.raises(ValueError, match=r"vision tower.*engine=vllm"):
        check(SglangConfig(device="cuda"), tmp_path, fields)


def test_server_arguments_ask_for_exact_versions_and_rows(tmp_path):
    given = arguments(tmp_path, device="cpu", max_model_len=100, extra_args={"page_size": 1, "log_requests": False})
    for flag in ("--disable-overlap-schedule", "--enable-return-routed-experts", "--skip-tokenizer-init"):
        assert flag in given
    pairs = dict(itertools.pairwise(given))
    assert (pairs["--context-length"], pairs["--max-total-tokens"]) == ("108", "6912")
    assert (pairs["--host"], pairs["--page-size"]) == ("127.0.0.1", "1")
    assert "--log-requests" not in given


def test_server_counts_the_requests_and_tokens_of_all_groups(tmp_path):
    fields = {"max_num_seqs": 10, "max_num_batched_tokens": 100}
    given = arguments(tmp_path, device="cpu", tensor_parallel=2, data_parallel=3, expert_parallel=1, **fields)
    pairs = dict(itertools.pairwise(given))
    assert [pairs[f"--{name}-size"] for name in ("tp", "attn-dp", "ep")] == ["6", "3", "1"]
    assert (pairs["--max-running-requests"], pairs["--chunked-prefill-size"]) == ("30", "300")
    assert "--sleep-on-idle" not in given
    assert "--sleep-on-idle" in arguments(tmp_path, device="cpu", tensor_parallel=2, expert_parallel=2)


def test_server_on_a_gpu_has_no_shim(tmp_path):
    given = arguments(tmp_path, device="cuda", enforce_eager=False)
    assert not {"--device", "--attention-backend", "--sampling-backend", "--max-total-tokens"} & set(given)
    assert "--disable-cuda-graph" not in given
    assert "--disable-prefill-cuda-graph" in given, "a graph would go around the hook that forces experts"


@pytest.mark.parametrize(
    ("device", "paths", "own"),
    [
        ("cpu", [PLUGIN_PATH, CPU_PATH], {"OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "1"}),
        ("cuda", [PLUGIN_PATH], {}),
    ],
)
def test_server_environment_has_own_variables_and_none_of_this_virtualenv(tmp_path, monkeypatch, device, paths, own):
    for name in OWN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/elsewhere")
    config = SglangConfig(device=device, threads=2, tensor_parallel=2)
    variables = server_environment(config, owner=7, folder=tmp_path)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(path) for path in paths]
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & set(variables)
    assert variables.items() >= (own | {"ASYNC_RL_OWNER_PID": "7"}).items()
    assert ("SGLANG_USE_CPU_ENGINE" in variables) == (device == "cpu")
    assert set(variables) - set(os.environ) <= OWN_VARIABLES


async def test_replica_without_its_virtualenv_is_an_error_with_the_way_out(tmp_path):
    (checkpoint(tmp_path, QWEN) / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    config = SglangConfig(device="cpu", python=tmp_path / "none")
    with pytest.raises(EngineError, match=r"replica-3: .*make setup-sglang.*engine\.python"):
        await start_sglang(config, name="replica-3", checkpoint=tmp_path)


async def test_interpreter_with_another_sglang_or_none_is_refused(tmp_path):
    fake = tmp_path / "python"
    for script, found in (("#!/bin/sh\necho 0.5.19\n", "0.5.19"), ("#!/bin/sh\nexit 1\n", "no sglang")):
        fake.write_text(script)
        fake.chmod(0o755)
        assert interpreter(SglangConfig(python=fake)) == fake
        with pytest.raises(EngineError, match=rf"{found}.* 0\.5\.23"):
            await check_version(fake)


def ranks_with(*digests):
    return [{"digest": digest, "published": {}, "parameters": {"w": ["12", [7]]}} for digest in digests]


def test_first_load_needs_the_plugin_its_hooks_and_one_digest():
    digest, live = first_load({"unapplied": [], "ranks": ranks_with("ab")})
    assert (digest, without_equation(live)) == ("ab", ["w"])
    for answer, named in (
        ({}, "SGLANG_PLUGINS"),
        ({"unapplied": ["a.Scheduler.send_abort_output"], "ranks": ranks_with("ab")}, "hooks.*send_abort_output"),
        ({"unapplied": [], "ranks": ranks_with("ab", "cd")}, "ab, cd"),
    ):
        with pytest.raises(ContractError, match=named):
            first_load(answer)


LOADS = [
    {"buckets": [[0, "ab"], [2, "cd"]], "names": "ef", "published": {"v": [[5]]}, "parameters": {"w": ["12", [7]]}},
    {"buckets": [[1, "gh"]], "names": "ef", "published": {}, "parameters": {"w": ["34", [8]]}},
]
REPORT = f"{REPORTED}{json.dumps(LOADS)}"
RANKS = [RankLoad(**load | {"buckets": dict(load["buckets"])}) for load in LOADS]


def test_reported_load_has_the_report_of_each_rank():
    found = reported_load({"success": True, "message": f"Succeeded. {REPORT} Weight version updated to 1-ab."})
    assert found == RANKS
    other_parameters = json.dumps([LOADS[0], LOADS[1] | {"parameters": {}}])
    with pytest.raises(ContractError):
        reported_load({"success": False, "message": REPORT})
    for message in ("Succeeded.", None, f"{REPORTED}{other_parameters}", f"{REPORTED}[]"):
        with pytest.raises(ContractError):
            reported_load({"success": True, "message": message})


def test_a_version_is_staged_when_a_scheduler_reports_all_ranks():
    for text, found in ((REPORT, RANKS), (NOT_STAGED, None)):
        for message in (text, f"{text} | {text}"):
            assert staged_load({"success": True, "message": message}) == found
    with pytest.raises(ContractError, match="rank 1: OSError"):
        staged_load({"success": False, "message": "RuntimeError: rank 1: OSError: no file"})


PLUGIN = f"""
import sys
from importlib.metadata import entry_points
(entry,) = entry_points(group="sglang.srt.plugins")
assert entry.load().__module__ == "async_rl_sglang"
assert not {{"torch", "sglang", "async_rl"}} & set(sys.modules), "costs every process"
from async_rl_sglang import STOP_TOKENS, loading, routing, sampling
print(*loading.HOOKS, *routing.HOOKS, *sampling.HOOKS, STOP_TOKENS)
assert loading._weights_module("digest").WeightsDigest and loading._weights_module("checksum").checksum
assert (loading.LOADED, loading.NOT_STAGED) == {(REPORTED, NOT_STAGED)!r}
assert "async_rl" not in sys.modules
"""


def test_sglang_plugin_is_found_by_its_path_and_names_the_hooks():
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN_PATH)}
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    targets = done.stdout.split()
    assert len(targets) == len(set(targets)) == 15
    assert all(target.startswith("sglang.srt.") for target in targets)


def test_lock_of_sglang_has_complete_pins():
    pins = (Path(__file__).parents[3] / "requirements" / "sglang.lock").read_text().split()
    assert all("==" in pin for pin in pins)
    assert {"sglang==0.5.23", "torch==2.13.0+cpu"} <= set(pins)
