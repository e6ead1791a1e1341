"""A turn in several requests gives the result of one, and each request finds the ones before in the prefix cache."""

import asyncio

import pytest

from message_queue.heads import head_of
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup
from tests.conformance.checks import assert_whole, gaps_under_own_rows, sampled_of, versions_of
from tests.conformance.engines import MARKS, WITH_KV, prompts, tokens
from tests.conformance.probes import SglangProbe

pytestmark = MARKS
ROUTING = pytest.mark.parametrize("resume_routing", ["append", "force"])


def cacheable(tested, length):
    """Tokens of a prompt of `length` that a cache can have: all full blocks, without the token that samples next."""
    block = 1 if isinstance(tested.probe, SglangProbe) else 32
    return (length - 1) // block * block


@ROUTING
async def test_a_turn_in_strides_has_true_rows_and_uses_its_prefix_cache(tested, resume_routing):
    rollout = tested.rollout("strides", resume_routing=resume_routing, cache_salt="v0", segment_tokens=50)
    assert await rollout.turn(tokens(40), max_new_tokens=170) is StopReason.LENGTH
    exchanges = tested.of_session("strides")
    assert [sampled_of(exchange) for exchange in exchanges] == [50, 50, 50, 20]
    assert rollout.decoder.num_aborts == 0
    assert_whole(tested, rollout)
    [sequence] = rollout.trajectory.sequences()
    assert max(gaps_under_own_rows(tested, sequence).values()) <= 1, "training repeats the routing of the rollout"
    if tested.probe.kv_tokens is not None:
        found = [cacheable(tested, len(exchange.request.token_ids)) for exchange in exchanges[1:]]
        if resume_routing == "force":
            found[0] = 0  # K/V under forced experts is kept apart from the K/V of free ones
        assert tested.probe.cached_tokens == [0, *found]


@ROUTING
@pytest.mark.parametrize("mode", ["resume", "keep-recompute"])
async def test_updates_between_and_inside_strides(tested, resume_routing, mode):
    options = {"resume_routing": resume_routing, "cache_salt": "v0", "segment_tokens": 30}
    rollouts, tasks = tested.start_rollouts(prompts(3, step=15), max_new_tokens=130, **options)
    for more in (True, False):
        await tested.until_sampled(20)
        await tested.publish(mode, stays_slow=more)
    await asyncio.gather(*tasks)
    for rollout in rollouts:
        assert sum(map(bool, map(sampled_of, tested.of_session(rollout.name)))) > 4, "strides of 30"
        assert rollout.trajectory.num_sampled == 130
        if resume_routing == "force":
            [sequence] = rollout.trajectory.sequences()
            assert max(gaps_under_own_rows(tested, sequence).values()) <= 1
    assert len({version for exchange in tested.exchanges for version in versions_of(exchange)}) > 1
    assert_whole(tested, *rollouts)


@WITH_KV
async def test_strides_that_wait_for_a_place(tested):
    """32 requests run at once; an update between two strides is an abort, too."""
    rollouts, tasks = tested.start_rollouts(prompts(38), max_new_tokens=60, cache_salt="v0", segment_tokens=25)
    while not any(rollout.trajectory.segments for rollout in rollouts):  # noqa: ASYNC110 - no engine has an event for it
        await asyncio.sleep(0.004)
    await tested.publish("resume")
    await asyncio.gather(*tasks)
    assert_whole(tested, *rollouts)
    for trajectory in (rollout.trajectory for rollout in rollouts):
        trajectory.close(stop_reason=StopReason.LENGTH, reward=0.0)
        group = PromptGroup(group=0, prompt=0, admitted_version=0, admitted_update=0, trajectories=[trajectory])
        [head] = head_of(group).trajectories
        assert head.num_aborts == len({segment.weights.version for segment in trajectory.segments}) - 1
        assert sum(count for _, count in head.spans) == 60
