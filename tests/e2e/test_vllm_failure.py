"""An engine process that is killed: every caller hears of it in time, and the replica's own process can end.

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

from agent_loop.engine import EngineError, GenerateRequest
from async_rl.inference.vllm.engine import VllmConfig, engine_environment, start_vllm
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion

pytestmark = [pytest.mark.filterwarnings("ignore")]

CONFIG = VllmConfig(
    device="cpu",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_bytes=8 << 20,
    load_timeout_s=20,
)
TOLD = "told: "
PATIENCE_S = 30.0  # far below any time-out of the configuration but the load's


@pytest.fixture(scope="module")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint

    return save_checkpoint(qwen3_dense_config(), tmp_path_factory.mktemp("dense"), seed=0)


@pytest.mark.parametrize("ending", ["close", "leave"])
def test_a_killed_engine_fails_every_call_and_lets_its_owner_exit(dense_checkpoint: Path, ending: str):
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_vllm_failure", str(dense_checkpoint), ending],
        env={**os.environ, **engine_environment(CONFIG)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(heard(done.stdout.splitlines()))
    assert told["dense"] == "20 tokens without rows"
    for call in ("running", "held", "later", "pause", "resume", "load"):
        assert told[call].startswith("ReplicaLostError: replica-0: "), told
    assert re.search(r"engine process \d+ died, exit code (-9|unknown)", told["held"]), told
    assert told["seconds"] < PATIENCE_S


def test_an_engine_process_ends_with_its_owner(dense_checkpoint: Path):
    command = [sys.executable, "-m", "tests.e2e.test_vllm_failure", str(dense_checkpoint), "wait"]
    environment = {**os.environ, **engine_environment(CONFIG)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            engine = psutil.Process(int(heard(owner.stdout)))
        finally:
            owner.kill()
    assert psutil.wait_procs([engine], timeout=PATIENCE_S)[1] == []


async def scenario(checkpoint: Path, ending: str) -> None:
    """Kill the engine under running and held requests and tell what each caller got."""
    replica = await start_vllm(CONFIG, name="replica-0", checkpoint=checkpoint, capture_routing=False)
    (engine,) = replica.backend.processes
    if ending == "wait":
        tell(engine.pid)
        await asyncio.Event().wait()
    [segment] = await replica.generate(request("dense", 20))
    told: dict[str, Any] = {
        "dense": f"{len(segment)} tokens with{'out' if segment.routed_experts is None else ''} rows"
    }
    running = asyncio.create_task(outcome(replica.generate(request("running", 400))))
    await asyncio.sleep(0)
    await replica.pause()
    held = asyncio.create_task(outcome(replica.generate(request("held", 4))))
    await asyncio.sleep(0)
    started = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    told |= {"running": await running, "held": await held}
    told |= {"later": await outcome(replica.generate(request("later", 4))), "resume": await outcome(replica.resume())}
    update = WeightUpdate(checkpoint / "model.safetensors", WeightVersion(1, ""))
    told |= {"pause": await outcome(replica.pause()), "load": await outcome(replica.load(update))}
    if ending == "close":
        await replica.close()
    tell(json.dumps({**told, "seconds": time.monotonic() - started}))


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
    """First told message; vLLM writes to the same stream."""
    return next(line.removeprefix(TOLD) for line in lines if line.startswith(TOLD))


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1]), sys.argv[2]))
