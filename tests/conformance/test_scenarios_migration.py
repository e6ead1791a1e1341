"""A trajectory moves between replicas, also of different engines: tokens, versions and rows are preserved.

vLLM and SGLang both serve the architecture without a dense layer here.
"""

import asyncio
import contextlib

import pytest
import pytest_asyncio

from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.stub import InProcess
from message_queue.errors import ReplicaLostError
from tests.conformance.checks import assert_sent_once, assert_true, sampled_of
from tests.conformance.engines import MARKS, tokens
from tests.conformance.served import VLLM, fake_under_test, start_vllm, under_test
from tests.helpers.stored import stored

pytestmark = MARKS


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def vllm_beside_sglang(sglang_models, environment):
    replica = await start_vllm(VLLM, name="replica-2", checkpoint=sglang_models.paths[0])
    yield replica
    await replica.close()


def nightly(pair):
    return pytest.param(pair, marks=pytest.mark.nightly)


@pytest.fixture(params=["fake-fake", "vllm-vllm", nightly("vllm-sglang"), nightly("sglang-vllm")])
def two_engines(request, monkeypatch):
    """Two replicas that serve the same weights and record their answers in one list."""
    exchanges = []
    fixtures = {
        "vllm-vllm": ("models", "engine", "second_vllm"),
        "vllm-sglang": ("sglang_models", "vllm_beside_sglang", "sglang_server"),
        "sglang-vllm": ("sglang_models", "sglang_server", "vllm_beside_sglang"),
    }
    if request.param == "fake-fake":
        return fake_under_test("fake-0", exchanges=exchanges), fake_under_test("fake-1", exchanges=exchanges)
    models, first, second = map(request.getfixturevalue, fixtures[request.param])
    options = {"patch": monkeypatch, "exchanges": exchanges}
    return under_test(first, models, **options), under_test(second, models, **options)


@pytest_asyncio.fixture(loop_scope="package")
async def pair(two_engines):
    """Both serve version 0 with an empty prefix cache."""
    for tested in two_engines:
        await tested.publish(version=0)
    yield two_engines
    for tested in two_engines:
        await tested.end()


class MortalReplica(InProcess):
    """A replica as a router sees it, until it dies: requests in flight then return nothing."""

    def __init__(self, tested):
        self.name = tested.name
        self._tested = tested
        self._death = asyncio.Event()

    def die(self):
        self._death.set()

    async def generate(self, request):
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


def owners(exchanges):
    """Replica that answered each request."""
    return [exchange.answer[-1].replica for exchange in exchanges]


@pytest.mark.parametrize("resume_routing", ["append", "force"])
async def test_a_replica_that_dies_during_a_decode_costs_no_returned_token(pair, resume_routing):
    first, second = pair
    await second.publish("resume")
    mortal, other = MortalReplica(first), MortalReplica(second)
    replicas = [mortal, other]
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
    assert_sent_once(first, "orphan", rollout.trajectory)


@pytest.mark.parametrize("resume_routing", ["append", "force"])
async def test_a_stored_trajectory_continues_on_another_replica(pair, resume_routing):
    first, second = pair
    rollout = first.rollout("journal", resume_routing=resume_routing, cache_salt="v0")
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
    assert (exchanges[1].request.forced_experts is not None) == (resume_routing == "force")
    assert [sampled_of(exchange) for exchange in exchanges] == [sampled, 200 - sampled]
    assert_true(second, exchanges)
    assert_sent_once(first, "journal", rollout.trajectory)
