"""The replica inside a Ray actor, with control calls next to its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

from agent_loop.engine import GenerateRequest
from async_rl.cluster.placement import Placement, PlacementError, start_ray
from async_rl.cluster.replica import ReplicaClient
from async_rl.config import ClusterConfig, load_config
from async_rl.inference.replica import EngineReplica
from async_rl.inference.vllm.engine import VllmConfig, engine_environment
from async_rl.weights.transport import read_tensors
from message_queue.errors import ReplicaLostError
from message_queue.tokens import StopReason, TokenOutput
from tests.conformance.engines import tokens
from tests.conformance.reference import gap_with_rows, reference
from tests.helpers import numerics
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model
from tests.helpers.updates import write_update

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

CONFIG = VllmConfig(
    device="auto",
    threads=numerics.THREADS,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=128,
    kv_cache_bytes=16 << 20,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of another cluster, not joined
        start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def generate(replica: ReplicaClient, name: str, *, max_new_tokens: int = 24) -> TokenOutput:
    ask = GenerateRequest(request_id=name, token_ids=tokens(30), max_new_tokens=max_new_tokens)
    return (await replica.call(EngineReplica.generate, ask))[0]


async def test_a_replica_in_an_actor_generates_aborts_loads_and_ends(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [save_checkpoint(qwen3_moe_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_tensors(paths[1] / "model.safetensors"))
    config = load_config(["trainer.router_replay=R3"])
    cluster_config = replace(config.cluster, replica_env={"NCCL_DEBUG": "WARN"})
    with monkeypatch.context() as driver:
        driver.setattr(torch.cuda, "is_available", lambda: True)  # as on a node that is not the replica's
        replica = await ReplicaClient.start(
            replace(config, engine=CONFIG, cluster=cluster_config),
            name="replica-0",
            checkpoint=paths[0],
            places=[{"num_cpus": 1}],
            log=tmp_path / "replica-0.log",
        )
    tasks = [asyncio.create_task(generate(replica, f"r{i}", max_new_tokens=400)) for i in range(24)]
    while (await replica.call(EngineReplica.stats)).in_flight < 24:  # noqa: ASYNC110 - an actor has no event to wait on
        await asyncio.sleep(0.01)
    await replica.call(EngineReplica.pause)
    assert await replica.call(EngineReplica.abort) == 24
    assert {(await task).stop_reason for task in tasks} == {StopReason.ABORT}
    held = asyncio.create_task(generate(replica, "held"))
    assert await replica.call(EngineReplica.load, update) == update.weights
    await replica.call(EngineReplica.resume)
    segment = await held
    assert segment.weights == update.weights
    assert segment.routed_experts is not None
    both = np.concatenate([tokens(30), segment.token_ids])
    expected = reference(spread_model(qwen3_moe_config(), seed=1), both)
    rows = segment.routed_experts.experts
    assert gap_with_rows(expected, both, segment.logprobs, rows, start=30, first_row=0) <= 1

    actor = psutil.Process(await replica.pid(timeout_s=60))
    processes = [actor, *actor.children(recursive=True)]
    assert len(processes) >= 2, "the engine has a process of its own"
    expected_variables = {"NCCL_DEBUG": "WARN", **engine_environment(replace(CONFIG, device="cpu"))}
    for process in processes[1:]:
        assert expected_variables.items() <= process.environ().items()
        assert "VLLM_USE_V2_MODEL_RUNNER" not in process.environ()
    lost = asyncio.create_task(generate(replica, "lost", max_new_tokens=400))
    await replica.call(EngineReplica.stats)
    engine = next(process for process in processes if "EngineCore" in process.name())
    engine.kill()
    with pytest.raises(ReplicaLostError, match="replica-0") as raised:
        await lost
    assert f"the end of {tmp_path}/replica-0.log:" in raised.value.__notes__[0]
    actor.kill()
    with pytest.raises(ReplicaLostError, match="replica-0"):
        await replica.call(EngineReplica.stats)
    assert (await asyncio.to_thread(psutil.wait_procs, processes, timeout=30))[1] == []


@pytest.mark.parametrize("wanted", [{"cpus_per_replica": 5.0}, {"cpus_per_rank": 5.0}, {"gpus_per_rank": 1.0}])
def test_an_actor_that_no_node_can_hold_is_refused_by_field(cluster: None, wanted: dict[str, float]):
    with pytest.raises(PlacementError, match=next(iter(wanted))):
        Placement(ClusterConfig(**wanted), ranks=1, replicas=1, workers=1, gpus_per_replica=0)


def test_placement_tells_what_all_nodes_together_lack(cluster: None):
    def short(workers: int):
        return Placement(ClusterConfig(), ranks=1, replicas=1, workers=workers, gpus_per_replica=0).shortage()

    have = int(ray.cluster_resources()["CPU"])
    assert short(have - 3) is None  # a rank, a replica and the queue have one each
    assert f"{have + 1} CPU" in short(have - 2) and f"have {have}" in short(have - 2)
