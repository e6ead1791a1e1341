"""An SGLang server that dies or does not start: every caller hears of it in time, and nothing of it is left behind.

The scenario runs in a process of its own (this module as a script): that the process can end is part of the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from agent_loop.engine import EngineError, GenerateRequest
from async_rl.cluster.actors import start_ray
from async_rl.cluster.clients import ReplicaHandle
from async_rl.config import ClusterConfig
from async_rl.inference.sglang.engine import start_sglang
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion
from tests.conformance.sglang_support import config, mixtral, require_sglang

pytestmark = [pytest.mark.filterwarnings("ignore")]

CONFIG = config(load_timeout_s=20)
TOLD = "told: "
PATIENCE_S = 30.0  # far below any time-out of the configuration but the load's


@pytest.fixture(scope="module")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint

    require_sglang()
    return save_checkpoint(qwen3_dense_config(), tmp_path_factory.mktemp("dense"), seed=0)


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_killed_server_fails_every_call_and_lets_its_owner_exit(dense_checkpoint: Path, victim: str):
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_sglang_failure", str(dense_checkpoint), victim],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(heard(done.stdout.splitlines()))
    assert told["dense"] == "20 tokens without rows"
    for call in ("running", "held", "later", "pause", "freeze", "resume", "load"):
        assert told[call].startswith("ReplicaLostError: replica-0: "), told
    assert re.search(r"server process \d+ died, exit code -9", told["held"]), told
    assert told["seconds"] < PATIENCE_S
    assert told["left"] == [], "no process of the server is left"
    assert not Path(told["folder"]).exists()


def test_nothing_of_the_server_outlives_its_owner(dense_checkpoint: Path):
    command = [sys.executable, "-m", "tests.e2e.test_sglang_failure", str(dense_checkpoint), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            folder, pids = json.loads(heard(owner.stdout))
            processes = [psutil.Process(pid) for pid in pids]
        finally:
            owner.kill()
    assert len(processes) >= 2
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert not Path(folder).exists()


async def test_a_server_that_does_not_start_shows_the_end_of_its_log(dense_checkpoint: Path, tmp_path: Path):
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    try:
        with pytest.raises(EngineError, match=r"replica-0: the server ended with exit code") as raised:
            await ReplicaHandle.start(
                config(extra_args={"schedule_policy": "no_such_policy"}),
                name="replica-0",
                checkpoint=dense_checkpoint,
                capture_routing=False,
                options={"num_cpus": 1},
                log=tmp_path / "replica-0.log",
            )
    finally:
        ray.shutdown()
    (note,) = raised.value.__notes__
    assert note.startswith(f"the end of {tmp_path}/replica-0.log:") and "no_such_policy" in note


async def test_a_start_that_takes_too_long_is_ended(dense_checkpoint: Path):
    before = set(descendants(os.getpid()))
    with pytest.raises(EngineError, match=r"replica-0: the server did not start within engine.start_timeout_s=1"):
        await start_sglang(
            config(start_timeout_s=1), name="replica-0", checkpoint=dense_checkpoint, capture_routing=False
        )
    assert set(descendants(os.getpid())) <= before, "what was started is gone"


async def test_a_checkpoint_with_names_that_sglang_does_not_know_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    import torch
    from safetensors.torch import load_file, save_file

    from tests.helpers.tiny_models import save_checkpoint

    require_sglang()
    path = save_checkpoint(mixtral(num_hidden_layers=2), tmp_path, seed=0) / "model.safetensors"
    tensors = load_file(path)
    expert = r"model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors["model.layers.1.experts.fused"] = torch.clone(tensors.pop(expert))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="replica-0: the server ended with exit code"):
        await start_sglang(CONFIG, name="replica-0", checkpoint=tmp_path)
    assert "1 parameters of the model (model.layers.1" in capfd.readouterr().err


async def scenario(checkpoint: Path, victim: str) -> None:
    """Kill a process under running and held requests and tell what each caller got."""
    replica = await start_sglang(CONFIG, name="replica-0", checkpoint=checkpoint, capture_routing=False)
    processes = descendants(os.getpid())
    if victim == "wait":
        tell(json.dumps([str(replica.backend.server.folder), [process.pid for process in processes]]))
        await asyncio.Event().wait()
    [segment] = await replica.generate(request("dense", 20))
    told: dict[str, Any] = {
        "dense": f"{len(segment)} tokens with{'out' if segment.routed_experts is None else ''} rows",
        "folder": str(replica.backend.server.folder),
    }
    running = asyncio.create_task(outcome(replica.generate(request("running", 400))))
    await asyncio.sleep(0.05)
    await replica.pause()
    held = asyncio.create_task(outcome(replica.generate(request("held", 4))))
    await asyncio.sleep(0)
    started = time.monotonic()
    names = {process.name().rpartition("::")[2]: process for process in processes}
    os.kill(names["scheduler"].pid if victim == "scheduler" else replica.backend.server.pid, signal.SIGKILL)
    told |= {"running": await running, "held": await held}
    told |= {"later": await outcome(replica.generate(request("later", 4))), "resume": await outcome(replica.resume())}
    update = WeightUpdate(checkpoint / "model.safetensors", WeightVersion(1, ""))
    told |= {"pause": await outcome(replica.pause()), "load": await outcome(replica.load(update))}
    told |= {"freeze": await outcome(replica.freeze())}
    told["seconds"] = time.monotonic() - started
    await replica.close()
    await replica.close()
    told["left"] = [process.name() for process in psutil.wait_procs(processes, timeout=5)[1]]
    tell(json.dumps(told))


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def request(request_id: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, token_ids=np.arange(3, 13, dtype=np.int32), max_new_tokens=tokens)


async def outcome(call: Any) -> str:
    try:
        return f"no error but {await call!r}"
    except EngineError as error:
        return f"{type(error).__name__}: {error}"


def tell(message: object) -> None:
    sys.stdout.write(f"{TOLD}{message}\n")
    sys.stdout.flush()


def heard(lines: Iterable[str]) -> str:
    """First told message."""
    return next(line.removeprefix(TOLD) for line in lines if line.startswith(TOLD))


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1]), sys.argv[2]))
