"""The replica inside a Ray actor, with control calls beside its requests."""

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

from agent_loop.engine import EngineError, ReplicaLostError
from async_rl.cluster.actors import Placement, PlacementError, start_ray
from async_rl.cluster.clients import ReplicaHandle
from async_rl.config import ClusterConfig
from async_rl.inference.vllm.engine import VllmConfig, engine_environment
from async_rl.weights.transport import read_update, write_update
from message_queue.tokens import StopReason
from tests.conformance.conftest import generate, prompt, request
from tests.conformance.reference import gap_with_rows, reference
from tests.helpers import numerics

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
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of another cluster, which is not joined
        start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def test_a_replica_in_an_actor_generates_aborts_loads_and_leaves_nothing_behind(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

    paths = [save_checkpoint(qwen3_moe_config(), tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    update = write_update(tmp_path / "updates", version=1, tensors=read_update(paths[1] / "model.safetensors"))
    with monkeypatch.context() as driver:
        driver.setattr(torch.cuda, "is_available", lambda: True)  # as on a node that is not the replica's
        replica = await ReplicaHandle.start(
            CONFIG,
            name="replica-0",
            checkpoint=paths[0],
            capture_routing=True,
            options={"num_cpus": 1},
            variables={"NCCL_DEBUG": "WARN"},
            log=tmp_path / "replica-0.log",
        )
    tokens = prompt(30)
    tasks = [asyncio.create_task(generate(replica, request(f"r{i}", tokens, max_new_tokens=400))) for i in range(24)]
    while (await replica.stats()).in_flight < 24:  # noqa: ASYNC110 - an actor has no event to wait on
        await asyncio.sleep(0.01)
    await replica.pause()
    assert await replica.abort() == 24
    assert {(await task).stop_reason for task in tasks} == {StopReason.ABORT}
    held = asyncio.create_task(generate(replica, request("held", tokens)))
    assert await replica.load(update) == update.weights
    await replica.resume()
    segment = await held
    assert segment.weights == update.weights
    assert segment.routed_experts is not None
    both = np.concatenate([tokens, segment.token_ids])
    expected = reference(spread_model(qwen3_moe_config(), seed=1), both)
    rows = segment.routed_experts.experts
    assert gap_with_rows(expected, both, segment.logprobs, rows, start=30, first_row=0) <= 1

    actor = psutil.Process(await replica.pid())
    processes = [actor, *actor.children(recursive=True)]
    assert len(processes) >= 2, "the engine has a process of its own"
    expected_variables = {"NCCL_DEBUG": "WARN", **engine_environment(replace(CONFIG, device="cpu"))}
    for process in processes[1:]:
        assert expected_variables.items() <= process.environ().items()
        assert "VLLM_USE_V2_MODEL_RUNNER" not in process.environ()
    lost = asyncio.create_task(generate(replica, request("lost", tokens, max_new_tokens=400)))
    await replica.stats()
    engine = next(process for process in processes if "EngineCore" in process.name())
    engine.kill()
    with pytest.raises(ReplicaLostError, match=r"replica-0: engine process \d+ died") as raised:
        await lost
    assert f"the end of {tmp_path}/replica-0.log:" in raised.value.__notes__[0]
    actor.kill()
    with pytest.raises(ReplicaLostError, match="replica-0 died"):
        await replica.stats()
    assert (await asyncio.to_thread(psutil.wait_procs, processes, timeout=30))[1] == []


@pytest.mark.parametrize("wanted", [{"cpus_per_replica": 5.0}, {"cpus_per_rank": 5.0}, {"gpus_per_rank": 1.0}])
def test_an_actor_that_no_node_can_hold_is_refused_by_field(cluster: None, wanted: dict[str, float]):
    with pytest.raises(PlacementError, match=rf"{next(iter(wanted))}.*no node has"):
        Placement(ClusterConfig(**wanted), ranks=1, replicas=1, workers=1, gpus_per_replica=0)


async def test_a_tensor_parallel_replica_serves_inside_the_placement_group_of_a_run(cluster: None, tmp_path: Path):
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint, spread_model

    placement = Placement(ClusterConfig(), ranks=0, replicas=1, workers=0, gpus_per_replica=0)
    await placement.ready()
    replica = await ReplicaHandle.start(
        replace(CONFIG, tensor_parallel=2),
        name="replica-0",
        checkpoint=save_checkpoint(qwen3_moe_config(), tmp_path / "model", seed=0),
        capture_routing=True,
        options=placement.replica(0),
    )
    try:
        tokens = prompt(30)
        segment = await generate(replica, request("layout", tokens))
        assert segment.routed_experts is not None
        both = np.concatenate([tokens, segment.token_ids])
        expected = reference(spread_model(qwen3_moe_config(), seed=0), both)
        rows = segment.routed_experts.experts
        assert gap_with_rows(expected, both, segment.logprobs, rows, start=30, first_row=0) <= 1
    finally:
        await replica.close(timeout_s=20)


async def test_an_engine_that_does_not_start_shows_the_root_cause_in_its_log(cluster: None, tmp_path: Path):
    from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint

    with pytest.raises(EngineError, match="replica-0: start failed") as raised:
        await ReplicaHandle.start(
            replace(CONFIG, kv_cache_bytes=1000),
            name="replica-0",
            checkpoint=save_checkpoint(qwen3_dense_config(), tmp_path / "model", seed=0),
            capture_routing=False,
            options={"num_cpus": 1},
            log=tmp_path / "replica-0.log",
        )
    (note,) = raised.value.__notes__
    assert note.startswith(f"the end of {tmp_path}/replica-0.log:")
    assert "No available memory for the cache blocks" in note
