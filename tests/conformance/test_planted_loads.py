"""An engine that reads a version whole and serves something else is found at that load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_loop.engine import EngineError
from async_rl.engines.sglang import SglangReplica
from async_rl.engines.vllm import VllmReplica
from async_rl.weights.transport import WeightUpdate
from tests.conformance import sglang_support
from tests.conformance.conftest import Models
from tests.conformance.planted import FAULT

pytestmark = [pytest.mark.asyncio(loop_scope="package")]

Plant = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """A replica, updates 0 and 1, and a call that plants a fault into its later loads."""

    replica: Any
    updates: Sequence[WeightUpdate]
    plant: Plant


@pytest.fixture(params=["vllm", "sglang"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "vllm":
        engine: VllmReplica = request.getfixturevalue("engine")
        models: Models = request.getfixturevalue("models")

        async def plant_vllm(fault: str) -> None:
            await engine._engine.collective_rpc("plant", args=(fault,))  # pyright: ignore[reportPrivateUsage]

        return Target(engine, (models.update_first, models.update_second), plant_vllm)
    server: SglangReplica = request.getfixturevalue("sglang_server")
    folder: Path = request.getfixturevalue("sglang_plugins")
    sglang_models: sglang_support.Models = request.getfixturevalue("sglang_models")

    async def plant_sglang(fault: str) -> None:
        (folder / FAULT).write_text(fault)

    return Target(server, sglang_models.updates, plant_sglang)


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
