"""What every engine answers when nothing interrupts it: each token and row is what its weights give."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from message_queue.tokens import StopReason
from tests.conformance.checks import assert_merged, assert_true, rows_sent, sampled_of
from tests.conformance.engines import EngineUnderTest, tokens
from tests.conformance.probes import SglangProbe

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),
]

# The fake has no K/V, so there is no prefix cache, no chunk of a prefill, and nothing to preempt.
WITH_KV = pytest.mark.parametrize("server", ["vllm", "sglang"], indirect=True)


async def test_a_fresh_request(tested: EngineUnderTest):
    exchange = await tested.ask("fresh", tokens(40))
    [segment] = exchange.answer
    assert (len(segment), segment.stop_reason, segment.replica) == (24, StopReason.LENGTH, tested.name)
    assert segment.routed_experts is not None
    rows = segment.routed_experts.experts
    assert rows.shape == (63, *tested.routing.row_shape), "every position but the last, MoE layers only"
    assert rows.dtype == np.uint8
    for layer in range(rows.shape[1]):
        assert len(np.unique(np.sort(rows[:, layer], -1), axis=0)) > 2, "a constant would show nothing"
    assert_true(tested, [exchange])


async def test_a_request_of_one_token_for_one_token(tested: EngineUnderTest):
    exchange = await tested.ask("least", tokens(1), max_new_tokens=1)
    assert rows_sent([exchange]) == [0]
    assert_true(tested, [exchange])


@WITH_KV
async def test_a_prefix_hit_returns_the_rows_of_a_miss(tested: EngineUnderTest):
    exchanges = [
        await tested.ask(name, tokens(80), cache_salt=salt)
        for name, salt in (("miss", ""), ("hit", ""), ("salt", "v1"))
    ]
    assert_true(tested, exchanges)
    missed, hit, salted = tested.probe.cached_tokens
    assert (missed, salted) == (0, 0)
    assert hit >= 64


@WITH_KV
async def test_a_prefill_in_chunks_beside_running_decodes(tested: EngineUnderTest):
    short = [tested.start(tested.ask(f"short-{i}", tokens(20, seed=i), max_new_tokens=60)) for i in range(3)]
    await tested.until_sampled(10)
    long = await tested.ask("long", tokens(300))  # four chunks of at most 96
    assert_true(tested, [long, *await asyncio.gather(*short)])


@WITH_KV
async def test_requests_that_are_preempted(tested: EngineUnderTest):
    prompts = [tokens(20 + 3 * i, seed=i) for i in range(32)]
    exchanges = await asyncio.gather(
        *(tested.ask(f"many-{i}", prompt, max_new_tokens=90) for i, prompt in enumerate(prompts))
    )
    needed = sum(len(prompt) + 90 for prompt in prompts)
    assert tested.probe.kv_tokens is not None
    assert needed > 1.5 * tested.probe.kv_tokens, "all run at once and do not fit at once"
    if isinstance(tested.probe, SglangProbe):  # vLLM does not say it
        assert sum(tested.probe.retractions) > 0
    assert {sampled_of(exchange) for exchange in exchanges} == {90}
    assert_true(tested, exchanges)


async def test_only_rows_that_are_not_held_are_sent(tested: EngineUnderTest):
    exchanges = [await tested.ask(f"held-{held}", tokens(50), existing_rows=held) for held in (0, 30, 49)]
    assert [rows_sent([exchange])[0] for exchange in exchanges] == [0, 30, 49]
    assert_true(tested, exchanges)


async def test_several_trajectories_of_one_prompt_at_once(tested: EngineUnderTest):
    rollouts = [tested.rollout(f"group-{i}", cache_salt="v0") for i in range(6)]
    await asyncio.gather(*(rollout.turn(tokens(70), max_new_tokens=30) for rollout in rollouts))
    for rollout in rollouts:
        assert_merged(rollout.trajectory, tested.of_session(rollout.name))
    assert_true(tested, tested.exchanges)
    if tested.probe.kv_tokens is not None:  # the fake writes the same after the same
        assert len({bytes(rollout.trajectory.token_ids()) for rollout in rollouts}) == 6
