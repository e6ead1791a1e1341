"""An engine that reads a version whole and serves something else is found at that load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from agent_loop.engine import EngineError
from async_rl.config import FLOAT32_MAX_K3, MismatchConfig
from async_rl.controller.probe import MismatchError, Probe
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.sglang.engine import SglangReplica
from async_rl.inference.vllm.engine import VllmReplica
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.model_info import read_model_info
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import SampledRun, TrainingSequence
from tests.conformance import sglang_support
from tests.conformance.conftest import Models, prompt
from tests.conformance.planted import FAULT
from tests.conformance.reference import reference_of_parts

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

Plant = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """A replica, updates 0 and 1, a call that plants a fault into its later loads, and update 1 in transformers."""

    replica: Any
    updates: Sequence[WeightUpdate]
    plant: Plant
    model: Any
    routing: RoutingSpec | None


@pytest.fixture(params=["vllm", "sglang"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "vllm":
        engine: VllmReplica = request.getfixturevalue("engine")
        models: Models = request.getfixturevalue("models")

        async def plant_vllm(fault: str) -> None:
            await engine.backend.engine.collective_rpc("plant", args=(fault,))

        updates = (models.update_first, models.update_second)
        return Target(engine, updates, plant_vllm, models.reference_second, read_model_info(models.first).routing)
    server: SglangReplica = request.getfixturevalue("sglang_server")
    folder: Path = request.getfixturevalue("sglang_plugins")
    sglang_models: sglang_support.Models = request.getfixturevalue("sglang_models")

    async def plant_sglang(fault: str) -> None:
        (folder / FAULT).write_text(fault)

    routing = read_model_info(sglang_models.paths[0]).routing
    return Target(server, sglang_models.updates, plant_sglang, sglang_models.models[1], routing)


@pytest_asyncio.fixture(loop_scope="package")
async def planted(target: Target) -> AsyncIterator[Target]:
    """It serves update 0, which was loaded after update 1."""
    for update in reversed(target.updates):
        await publish(target.replica, update)
    yield target
    await target.plant("")
    await publish(target.replica, target.updates[0])


async def publish(replica: Any, update: Any) -> None:
    await replica.pause()
    await replica.abort()
    await replica.load(update)
    await replica.resume()


@pytest.mark.parametrize("fault", ["none", "half", "stale"])
async def test_a_load_that_left_parameters_as_they_were_is_refused(planted: Target, fault: str):
    replica, updates, plant = planted.replica, planted.updates, planted.plant
    await plant(fault)
    with pytest.raises(EngineError) as caught:
        await publish(replica, updates[1])
    assert all(text in str(caught.value) for text in ("replica-0", "version 1"))
    with pytest.raises(EngineError):
        await replica.resume()


async def test_swapped_tensors_change_the_checksum_that_replicas_share(planted: Target):
    replica, updates, plant = planted.replica, planted.updates, planted.plant
    await publish(replica, updates[1])
    good = await replica.checksum()
    await plant("swapped")
    await publish(replica, updates[1])
    assert await replica.checksum() != good


async def test_the_checksum_is_of_the_weights_however_they_came(planted: Target):
    replica, updates = planted.replica, planted.updates
    first = await replica.checksum()
    await publish(replica, updates[1])
    assert await replica.checksum() != first
    await publish(replica, updates[0])
    assert await replica.checksum() == first


class Truth:
    """Scores by transformers, over the rows of the engine. None of the engine's weights is used."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def score(self, batch: TrainingBatch) -> list[torch.Tensor]:
        scored: list[torch.Tensor] = []
        for number in range(len(batch)):
            sequence, at = batch.sequence(number), batch.loss_tokens(number).positions
            assert sequence.routed_experts is not None
            ids, forced = sequence.token_ids, sequence.routed_experts[:-1]
            found = reference_of_parts([(self._model, len(ids))], ids, forced=forced).logprobs
            scored.append(torch.from_numpy(found[at - 1, ids[at]].astype(np.float32)))
        return scored


def probe_of(target: Target) -> Probe:
    probe = Probe(
        ReplicaPool([target.replica]),
        config=MismatchConfig(),
        max_k3=FLOAT32_MAX_K3,
        temperature=1.0,
        max_tokens=256,
        timeout_s=60.0,
        routing=target.routing,
    )
    prompts = [prompt(21, seed=number) for number in range(4)]  # the last token stands for a sampled one
    run, logprobs = SampledRun(20, 1, 0), np.zeros(1, np.float32)
    sequences = [
        TrainingSequence(token_ids=ids, runs=(run,), logprobs=logprobs, rows=None, row_runs=()) for ids in prompts
    ]
    probe.take_prompts([((sequence,),) for sequence in sequences])
    return probe


async def test_the_probe_finds_swapped_tensors_and_nothing_in_a_good_load(planted: Target):
    probe, truth = probe_of(planted), Truth(planted.model)
    await publish(planted.replica, planted.updates[1])
    probe.ask_all(version=1)
    assert await probe.compare(1, truth) <= FLOAT32_MAX_K3
    await publish(planted.replica, planted.updates[0])
    await planted.plant("swapped")
    await publish(planted.replica, planted.updates[1])
    probe.ask_all(version=1)
    with pytest.raises(MismatchError) as caught:
        await probe.compare(1, truth)
    assert "replica-0" in str(caught.value) and "version 1" in str(caught.value)
