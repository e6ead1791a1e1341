"""A trajectory moves from one replica to another, also between engines: tokens, versions and rows stay what they are.

vLLM and SGLang both serve the architecture without a dense layer here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from agent_loop.engine import GenerateRequest, ReplicaLostError
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.vllm.engine import VllmReplica
from message_queue.tokens import TokenOutput
from tests.conformance import sglang_support
from tests.conformance.checks import assert_merged, assert_true, rows_sent, sampled_of
from tests.conformance.conftest import CONFIG, Models, fake_under_test, sglang_under_test, start_vllm, vllm_under_test
from tests.conformance.engines import EngineUnderTest, Exchange, tokens
from tests.helpers.stored import stored

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),
]

Pair = tuple[EngineUnderTest, EngineUnderTest]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def second_vllm(models: Models, environment: None) -> AsyncIterator[VllmReplica]:
    replica = await start_vllm(CONFIG, name="replica-1", checkpoint=models.first)
    yield replica
    await replica.close()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def vllm_beside_sglang(sglang_models: sglang_support.Models, environment: None) -> AsyncIterator[VllmReplica]:
    replica = await start_vllm(CONFIG, name="replica-2", checkpoint=sglang_models.paths[0])
    yield replica
    await replica.close()


@pytest.fixture(params=["fake-fake", "vllm-vllm", "vllm-sglang", "sglang-vllm"])
def two_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Two replicas that serve the same weights and note what they are asked in one list."""
    exchanges: list[Exchange] = []
    get, noted = request.getfixturevalue, {"exchanges": exchanges}
    match request.param:
        case "fake-fake":
            return fake_under_test("fake-0", **noted), fake_under_test("fake-1", **noted)
        case "vllm-vllm":
            first, second = (
                vllm_under_test(get(name), get("models"), patch=monkeypatch, **noted)
                for name in ("engine", "second_vllm")
            )
            return first, second
        case order:
            served = get("sglang_models")
            vllm = vllm_under_test(get("vllm_beside_sglang"), served, patch=monkeypatch, **noted)
            sglang = sglang_under_test(get("sglang_server"), served, patch=monkeypatch, **noted)
            return (vllm, sglang) if order == "vllm-sglang" else (sglang, vllm)


@pytest_asyncio.fixture(loop_scope="package")
async def pair(two_engines: Pair) -> AsyncIterator[Pair]:
    """Both serve version 0 with an empty prefix cache."""
    for tested in two_engines:
        await tested.publish(version=0)
    yield two_engines
    for tested in two_engines:
        await tested.end()


class MortalReplica:
    """A replica as a router sees it, until it dies: what is in flight then returns nothing."""

    def __init__(self, tested: EngineUnderTest) -> None:
        self.name = tested.name
        self._tested = tested
        self._death = asyncio.Event()

    def die(self) -> None:
        self._death.set()

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        work = asyncio.create_task(self._tested.generate(request))
        death = asyncio.create_task(self._death.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ReplicaLostError(f"{self.name}: killed")
            return await work
        finally:
            work.cancel()
            death.cancel()
            await asyncio.wait({work, death})


def owners(exchanges: list[Exchange]) -> list[str]:
    """Replica that answered each request."""
    return [exchange.answer[-1].replica for exchange in exchanges]


@pytest.mark.parametrize("resume_routing", ["append", "force"])
async def test_a_replica_that_dies_while_it_decodes_loses_nothing_that_it_returned(pair: Pair, resume_routing: Any):
    first, second = pair
    await second.publish("resume")
    mortal, other = MortalReplica(first), MortalReplica(second)
    replicas: Any = [mortal, other]
    pool = ReplicaPool(replicas)
    rollout = first.rollout("orphan", resume_routing=resume_routing, cache_salt="v0")
    rollout.move(ReplicaRouter(pool), trajectory=rollout.trajectory)
    task = first.start(rollout.turn(tokens(50), max_new_tokens=200))
    await first.until_sampled(10)
    await first.replica.abort()
    await first.until_sampled(10)
    mortal.die()
    await task
    await rollout.turn(tokens(9, seed=1), max_new_tokens=20)
    assert list(pool.lost) == [first.name]
    exchanges = first.of_session("orphan")
    assert owners(exchanges) == [first.name, second.name, second.name]
    assert [s.weights.version for s in rollout.trajectory.segments] == [0, 1, 1]
    assert rollout.trajectory.num_sampled == 220
    assert exchanges[1].request.existing_rows == len(exchanges[1].request.token_ids) - 1
    assert_true(second, exchanges)
    assert_merged(rollout.trajectory, exchanges)
    assert rows_sent(exchanges) == list(range(len(rollout.trajectory) - 1))


async def test_a_trajectory_from_the_journal_goes_on_elsewhere(pair: Pair):
    first, second = pair
    rollout = first.rollout("journal", cache_salt="v0")
    task = first.start(rollout.turn(tokens(50), max_new_tokens=200))
    await first.until_sampled(10)
    await first.replica.pause()
    await first.replica.abort()
    while not rollout.trajectory.num_sampled:  # noqa: ASYNC110 - the decoder has no event for it
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await first.replica.resume()

    rollout.move(second, trajectory=await stored(rollout.trajectory))
    sampled = rollout.trajectory.num_sampled
    assert 10 <= sampled < 200
    await second.publish("resume")
    await rollout.resume(max_new_tokens=200 - sampled)
    exchanges = first.of_session("journal")
    assert owners(exchanges) == [first.name, second.name]
    assert [sampled_of(exchange) for exchange in exchanges] == [sampled, 200 - sampled]
    assert_true(second, exchanges)
    assert_merged(rollout.trajectory, exchanges)
    assert rows_sent(exchanges) == list(range(len(rollout.trajectory) - 1))


async def test_a_trajectory_that_moves_after_every_turn(pair: Pair):
    rollout = pair[0].rollout("nomad", cache_salt="v0")
    for turn in range(6):
        rollout.move(pair[turn % 2], trajectory=rollout.trajectory)
        await rollout.turn(tokens(30 if not turn else 7, seed=turn), max_new_tokens=12)
    exchanges = pair[0].of_session("nomad")
    assert owners(exchanges) == [pair[turn % 2].name for turn in range(6)]
    assert_true(pair[0], exchanges)
    assert_merged(rollout.trajectory, exchanges)
    assert rows_sent(exchanges) == list(range(len(rollout.trajectory) - 1))
