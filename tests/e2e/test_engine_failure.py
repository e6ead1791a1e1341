"""An engine that dies or does not start: every caller is notified in time, and no process is left behind.

The scenario runs in a separate process (this module as a script): that the process can end is part of the test.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from agent_loop.engine import GenerateRequest
from async_rl.cluster.placement import start_ray
from async_rl.cluster.replica import ReplicaClient
from async_rl.config import ClusterConfig, load_config
from async_rl.inference.sglang.engine import start_sglang
from async_rl.inference.vllm.engine import VllmConfig, engine_environment, start_vllm
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import EngineError
from message_queue.tokens import WeightVersion
from tests.conformance.sglang_support import config as sglang_config
from tests.conformance.sglang_support import mixtral, require_sglang
from tests.helpers.lanes import OWN_ENGINE
from tests.helpers.tiny_models import qwen3_dense_config, qwen3_moe_config, save_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore")]

VLLM = VllmConfig(
    device="cpu",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_bytes=8 << 20,
    load_timeout_s=20,
)
CONFIGS = {"vllm": VLLM, "vllm-dp2": replace(VLLM, data_parallel=2)}
SGLANG = sglang_config(load_timeout_s=20)
SAID = "said: "
PATIENCE_S = 30.0  # far below any time-out of the configuration but the load's
CALLS = ("running", "held", "later", "pause", "freeze", "resume", "load")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(qwen3_dense_config(), tmp_path_factory.mktemp("dense"), seed=0)


def command(engine, *arguments):
    """Command and environment of the scenario."""
    if engine == "sglang":
        require_sglang()
    environment = engine_environment(VLLM) if engine in CONFIGS else {}
    return [sys.executable, "-m", __name__, engine, *map(str, arguments)], {**os.environ, **environment}


@OWN_ENGINE
@pytest.mark.parametrize(
    ("engine", "victim", "close"),
    [("vllm", "engine", True), ("vllm", "engine", False), ("sglang", "server", True), ("sglang", "scheduler", True)],
)
def test_a_killed_engine_fails_every_call_and_lets_its_owner_exit(checkpoint, engine, victim, close):
    arguments, environment = command(engine, checkpoint, victim, "close" if close else "leave")
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(heard(done.stdout.splitlines()))
    assert said["dense"] == [20, None]
    for call in CALLS:
        assert said[call].startswith("ReplicaLostError: replica-0: "), said
    assert re.search(r"process \d+ died, exit code (-9|unknown)", said["held"]), said
    assert said["seconds"] < PATIENCE_S
    assert said["left"] == [], "no process of the engine is left"
    assert not said["folder"] or not Path(said["folder"]).exists()


@OWN_ENGINE
@pytest.mark.parametrize("engine", ["vllm-dp2", "sglang"])
def test_no_process_of_an_engine_outlives_its_owner(checkpoint, engine, tmp_path):
    served = save_checkpoint(qwen3_moe_config(), tmp_path, seed=0) if engine == "vllm-dp2" else checkpoint
    arguments, environment = command(engine, served, "wait", "leave")
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        try:
            folder, pids = json.loads(heard(owner.stdout))
            processes = [psutil.Process(pid) for pid in pids]
        finally:
            owner.kill()
    assert processes
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert not folder or not Path(folder).exists()


@OWN_ENGINE
@pytest.mark.parametrize(
    ("engine", "config", "cause"),
    [
        ("vllm", replace(VLLM, extra_args={"num_gpu_blocks_override": 1}), "No available memory for the cache blocks"),
        ("sglang", replace(SGLANG, extra_args={"schedule_policy": "no_such_policy"}), "no_such_policy"),
    ],
    ids=["vllm", "sglang"],
)
async def test_an_engine_that_does_not_start_shows_the_end_of_its_log(checkpoint, tmp_path, engine, config, cause):
    if engine == "sglang":
        require_sglang()
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    try:
        with pytest.raises(EngineError, match="replica-0") as raised:
            await ReplicaClient.start(
                replace(load_config(["trainer.router_replay=none"]), engine=config).replica_settings,
                name="replica-0",
                checkpoint=checkpoint,
                places=[{"num_cpus": 1}],
                log=tmp_path / "replica-0.log",
            )
    finally:
        ray.shutdown()
    (note,) = raised.value.__notes__
    assert note.startswith(f"the end of {tmp_path}/replica-0.log:") and cause in note


async def test_a_start_of_sglang_that_takes_too_long_is_ended(checkpoint):
    require_sglang()
    before = set(descendants(os.getpid()))
    with pytest.raises(EngineError, match="start_timeout_s"):
        await start_sglang(
            replace(SGLANG, start_timeout_s=1), name="replica-0", checkpoint=checkpoint, capture_routing=False
        )
    assert set(descendants(os.getpid())) <= before, "its processes are gone"


async def test_a_checkpoint_with_names_that_sglang_does_not_know_is_refused(tmp_path, capfd):
    require_sglang()
    path = save_checkpoint(mixtral(num_hidden_layers=2), tmp_path, seed=0) / "model.safetensors"
    tensors = load_file(path)
    expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors["model.layers.1.experts.fused"] = torch.clone(tensors.pop(expert))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="replica-0"):
        await start_sglang(SGLANG, name="replica-0", checkpoint=tmp_path)
    assert "1 parameters of the model (model.layers.1" in capfd.readouterr().err


# ---- the scenario, in a separate process


async def scenario(engine, checkpoint, victim, ending):
    """Kill a process under running and held requests, and write the outcome of each call."""
    options = {"name": "replica-0", "checkpoint": checkpoint, "capture_routing": False}
    on_vllm = engine in CONFIGS
    replica = await (start_vllm(CONFIGS[engine], **options) if on_vllm else start_sglang(SGLANG, **options))
    processes = [process for process in descendants(os.getpid()) if not on_vllm or "VLLM" in process.name()]
    main = replica.backend.processes[0].pid if on_vllm else replica.backend.server.pid
    folder = "" if on_vllm else str(replica.backend.server.folder)
    if victim == "wait":
        pids = [process.pid for process in processes]
        say([folder, pids])
        await asyncio.Event().wait()
    [segment] = await replica.generate(request("dense", 20))
    said = {"dense": [len(segment), segment.routed_experts], "folder": folder}
    running = asyncio.create_task(outcome(replica.generate(request("running", 400))))
    await asyncio.sleep(0.05 if engine == "sglang" else 0)
    await replica.pause()
    held = asyncio.create_task(outcome(replica.generate(request("held", 4))))
    await asyncio.sleep(0)
    started = time.monotonic()
    schedulers = [process.pid for process in processes if process.name().endswith("scheduler")]
    os.kill(schedulers[0] if victim == "scheduler" else main, signal.SIGKILL)
    said |= {"running": await running, "held": await held}
    update = WeightUpdate(checkpoint, WeightVersion(1, ""))
    said |= {"later": await outcome(replica.generate(request("later", 4))), "load": await outcome(replica.load(update))}
    said |= {call: await outcome(getattr(replica, call)()) for call in ("resume", "pause", "freeze")}
    said["seconds"] = time.monotonic() - started
    if ending == "close":
        await replica.close()
        await replica.close()
    left = psutil.wait_procs(processes if engine == "sglang" else [], timeout=5)[1]
    said["left"] = [process.name() for process in left]
    say(said)


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def request(request_id, tokens):
    return GenerateRequest(request_id=request_id, token_ids=np.arange(3, 13, dtype=np.int32), max_new_tokens=tokens)


async def outcome(call):
    try:
        return f"no error but {await call!r}"
    except EngineError as error:
        return f"{type(error).__name__}: {error}"


def say(message):
    sys.stdout.write(f"{SAID}{json.dumps(message)}\n")
    sys.stdout.flush()


def heard(lines):
    """The first message; vLLM writes to the same stream."""
    return next(line.removeprefix(SAID) for line in lines if line.startswith(SAID))


if __name__ == "__main__":
    engine, folder, victim, ending = sys.argv[1:]
    asyncio.run(scenario(engine, Path(folder), victim, ending))
