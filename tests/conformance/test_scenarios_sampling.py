"""Top-p, top-k and min-p: every engine keeps the same tokens, returns them, and gives logprobs over them."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import SamplingConfig
from tests.conformance.checks import assert_cut, assert_merged, assert_true, k3, sampled_of, versions_of
from tests.conformance.engines import MARKS, WITH_KV, tokens
from tests.helpers.dense import loss_mask
from tests.helpers.groups import sets_of

pytestmark = [*MARKS, WITH_KV]

CUTS = {
    "top-p": SamplingConfig(top_p=0.9),
    "top-k": SamplingConfig(top_k=20),
    "min-p": SamplingConfig(min_p=0.05),
    "top-p of top-k": SamplingConfig(top_p=0.8, top_k=20),
    "all": SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05),
    "top-p of min-p": SamplingConfig(temperature=2.0, top_p=0.9, min_p=0.1),
}


async def test_every_cut_keeps_the_tokens_of_the_definition(tested, report):
    """All in one batch, with a greedy request and one of the whole distribution."""
    plain = [SamplingConfig(), SamplingConfig(temperature=0.0)]
    asked = [
        tested.ask(f"cut-{i}", tokens(20 + i, seed=i), max_new_tokens=60, sampling=sampling)
        for i, sampling in enumerate([*CUTS.values(), *plain])
    ]
    *cut, whole, greedy = await asyncio.gather(*asked)
    gaps = assert_cut(tested, cut)
    assert gaps.settled > 0.5 * len(gaps.over_sets), "with most borders within rounding this shows nothing"
    assert whole.answer[0].support is None
    assert greedy.answer[0].support is None
    assert_true(tested, [whole])
    over_sets, over_all = k3(gaps.over_sets), k3(gaps.over_all)
    report(
        f"{type(tested.replica).__name__}: k3 of cut tokens {over_sets:.1e} over the kept ones, {over_all:.1e} over all"
    )
    assert over_all > 1e6 * over_sets


async def test_kept_tokens_through_turns_aborts_and_an_update(tested):
    rollouts = [tested.rollout(name, cache_salt="v0", sampling=cut) for name, cut in CUTS.items()]
    await asyncio.gather(*(each.turn(tokens(20, seed=i), max_new_tokens=8) for i, each in enumerate(rollouts)))
    tasks = [tested.start(each.turn(tokens(9, seed=i), max_new_tokens=150)) for i, each in enumerate(rollouts)]
    await tested.until_sampled(30)
    assert await tested.replica.abort() == len(CUTS)
    await tested.until_more(30)
    assert (await tested.publish("resume")).aborted == len(CUTS)
    await asyncio.gather(*tasks)
    assert_cut(tested, tested.exchanges)
    for rollout in rollouts:
        assert_kept(tested, rollout)
        assert rollout.trajectory.num_sampled == 158


@pytest.mark.parametrize("mode", ["keep-recompute", "keep-keep"])
async def test_kept_tokens_of_requests_that_are_updated_in_flight(tested, mode):
    rollouts = [tested.rollout(name, cache_salt="v0", sampling=cut) for name, cut in CUTS.items()]
    tasks = [tested.start(each.turn(tokens(20, seed=i), max_new_tokens=150)) for i, each in enumerate(rollouts)]
    await tested.until_sampled(30)
    await tested.publish(mode)
    await asyncio.gather(*tasks)
    assert_cut(tested, tested.exchanges)
    for rollout in rollouts:
        assert versions_of(tested.of_session(rollout.name)[-1]) == [0, 1]
        assert_kept(tested, rollout)


def assert_kept(tested, rollout):
    """The trajectory has the kept set of each answered token at its position, and no other set."""
    exchanges = [exchange for exchange in tested.of_session(rollout.name) if sampled_of(exchange)]
    assert_merged(rollout.trajectory, exchanges)
    answered = [kept for each in exchanges for segment in each.answer for kept in sets_of(segment.support)]
    held = sets_of(rollout.trajectory.sequences()[-1].support)
    assert all(answered)
    assert [held[position] for position in np.flatnonzero(loss_mask(rollout.trajectory))] == answered
    assert sum(map(bool, held)) == len(answered)
