"""Answers of every engine without an interruption: each token and row is that of its weights."""

import asyncio

import numpy as np

from agent_loop.engine import SamplingConfig
from message_queue.tokens import StopReason
from tests.conformance.checks import assert_merged, assert_true, rows_sent, sampled_of, whole
from tests.conformance.engines import MARKS, ON_SGLANG, WITH_KV, prompts, tokens

pytestmark = MARKS


async def test_a_fresh_request_has_a_row_for_every_position_but_the_last(tested):
    exchange = await tested.ask("fresh", tokens(40))
    [segment] = exchange.answer
    assert (len(segment), segment.stop_reason, segment.replica) == (24, StopReason.LENGTH, tested.name)
    rows = segment.routed_experts.experts
    assert rows.shape == (63, *tested.routing.row_shape), "of MoE layers only"
    assert rows.dtype == np.uint8
    for layer in range(rows.shape[1]):
        assert len(np.unique(np.sort(rows[:, layer], -1), axis=0)) > 2, "a constant would show nothing"
    least = await tested.ask("least", tokens(1), max_new_tokens=1)
    assert rows_sent([least]) == [0]
    assert_true(tested, [exchange, least])


@WITH_KV
async def test_logprobs_are_of_the_distribution_after_temperature(tested):
    exchange = await tested.ask("warm", tokens(20), sampling=SamplingConfig(temperature=2.0))
    ids, [segment] = whole(exchange), exchange.answer
    expected = tested.truth([(0, len(ids))], ids, forced=None)
    scaled = expected.logprobs / 2.0
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    at = np.arange(20, len(ids))
    assert np.abs(scaled[at - 1, ids[at]] - segment.logprobs).max() <= expected.logprob_bound


async def test_a_stop_token_ends_the_decode_and_belongs_to_it(tested):
    greedy = SamplingConfig(temperature=0.0)
    free = await tested.ask("free", tokens(20), sampling=greedy)
    stop = int(free.answer[0].token_ids[5])
    [segment] = (await tested.ask("stop", tokens(20), sampling=greedy, stop_token_ids=(stop,))).answer
    assert segment.stop_reason is StopReason.STOP
    assert segment.token_ids[-1] == stop
    assert stop not in segment.token_ids[:-1]


@ON_SGLANG
async def test_the_end_token_of_the_checkpoint_stops_nothing(tested):
    every = await asyncio.gather(*(tested.ask(f"end-{i}", ids) for i, ids in enumerate(prompts(24, length=8))))
    assert any(2 in whole(exchange)[8:] for exchange in every), "token 2 ends a sequence by the checkpoint's config"
    assert {sampled_of(exchange) for exchange in every} == {24}


@WITH_KV
async def test_a_prefix_hit_returns_the_rows_of_a_miss(tested):
    for name, salt in (("miss", ""), ("hit", ""), ("salt", "v1")):
        await tested.ask(name, tokens(80), cache_salt=salt)
    assert_true(tested, tested.exchanges)
    missed, hit, salted = tested.probe.cached_tokens
    assert (missed, salted) == (0, 0)
    assert hit >= 64


async def test_several_trajectories_of_one_prompt_at_once(tested):
    rollouts = [tested.rollout(f"group-{i}", cache_salt="v0") for i in range(6)]
    await asyncio.gather(*(rollout.turn(tokens(70), max_new_tokens=30) for rollout in rollouts))
    for rollout in rollouts:
        assert_merged(rollout.trajectory, tested.of_session(rollout.name))
    assert_true(tested, tested.exchanges)
    if tested.probe.kv_tokens is not None:  # the fake writes the same after the same
        assert len({bytes(rollout.trajectory.token_ids()) for rollout in rollouts}) == 6
