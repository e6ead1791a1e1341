"""Random schedules of aborts and updates under decodes that do not fit the cache."""

import asyncio
import random

import pytest

from tests.conformance.checks import assert_whole, versions_of
from tests.conformance.engines import MARKS, WITH_KV, prompts
from tests.conformance.probes import SglangProbe

pytestmark = [*MARKS, WITH_KV]

SLOW = 8  # interruptions of a slow engine; then it decodes until a request ends, and that needs more than the cache
# Without forcing, SGLang recomputes held rows otherwise than vLLM: test_kv_of_a_resumed_request_that_is_recomputed.
MODES = {"append": ["resume"], "force": ["resume", "keep-recompute", "keep-recompute"]}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("resume_routing", "seed"), [("append", 0), ("force", 1), ("force", 2)])
async def test_rows_are_true_under_random_aborts_and_updates(tested, resume_routing, seed):
    chance = random.Random(seed)
    rollouts, tasks = tested.start_rollouts(
        prompts(10, length=15, step=9), max_new_tokens=150, resume_routing=resume_routing, cache_salt="v0"
    )
    interruptions = 0
    while (await asyncio.wait(tasks, timeout=chance.uniform(0.1, 0.5)))[1]:
        interruptions += 1
        if chance.random() < 0.3:
            await tested.replica.abort()
        else:
            await tested.publish(chance.choice(MODES[resume_routing]), stays_slow=interruptions < SLOW)
        if interruptions == SLOW:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert {rollout.trajectory.num_sampled for rollout in rollouts} == {150}
    assert interruptions > 2
    assert len({version for exchange in tested.exchanges for version in versions_of(exchange)}) > 2
    if isinstance(tested.probe, SglangProbe):
        assert sum(tested.probe.retractions) > 0
    assert_whole(tested, *rollouts)
