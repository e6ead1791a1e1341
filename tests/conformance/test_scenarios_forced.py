"""Forced routing on vLLM and SGLang: answers are those of transformers under the same forcing, on every schedule."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import SamplingConfig
from message_queue.errors import EngineError
from message_queue.tokens import RoutedExperts
from tests.conformance.checks import assert_forced, assert_true, odd_rows, sampled_of, versions_of, whole
from tests.conformance.engines import MARKS, WITH_KV, tokens
from tests.conformance.probes import SglangProbe

pytestmark = [*MARKS, WITH_KV]


async def test_a_prefix_under_the_experts_of_other_weights(tested):
    before = await tested.ask("before", tokens(60), max_new_tokens=40)
    [segment] = before.answer
    await tested.publish("resume")
    for held in (0, 50, 99):
        forced = segment.routed_experts
        after = await tested.ask(f"forced-{held}", whole(before), existing_rows=held, forced_experts=forced)
        assert_forced(tested, after)


@pytest.mark.parametrize(("length", "forced"), [(40, 39), (40, 17), (40, 1), (40, 0), (300, 299), (300, 150)])
async def test_any_number_of_forced_rows_and_chunks(tested, length, forced):
    rows = odd_rows(tested, forced)
    assert_true(tested, [await tested.ask("odd", tokens(length), forced_experts=rows)])


async def test_forced_and_free_requests_in_one_batch_that_does_not_fit_the_cache(tested):
    """Preempted requests are prefilled once more, with some of their own tokens, under the same forcing.

    Some prompts are prefilled in chunks, next to running decodes.
    """
    lengths = [20 + 7 * (i % 13) for i in range(40)]
    asked = [
        tested.ask(
            f"mixed-{i}.",
            tokens(length, seed=i),
            max_new_tokens=90,
            forced_experts=odd_rows(tested, length - 1, seed=i) if i % 2 else None,
        )
        for i, length in enumerate(lengths)
    ]
    assert sum(length + 90 for length in lengths) > 1.5 * tested.probe.kv_tokens, "they do not fit at once"
    exchanges = await asyncio.gather(*asked)
    assert {sampled_of(exchange) for exchange in exchanges} == {90}
    assert_forced(tested, *exchanges)
    if isinstance(tested.probe, SglangProbe):
        assert sum(tested.probe.retractions) > 0


async def test_forcing_the_choice_of_the_router_changes_nothing(tested):
    greedy = SamplingConfig(temperature=0.0)
    [free] = (await tested.ask("free", tokens(60), sampling=greedy)).answer
    rows = RoutedExperts(first_position=0, experts=free.routed_experts.experts[:59])
    [forced] = (await tested.ask("same", tokens(60), sampling=greedy, forced_experts=rows)).answer
    assert forced.token_ids.tolist() == free.token_ids.tolist()
    assert (forced.routed_experts.experts == free.routed_experts.experts).all()
    if not isinstance(tested.probe, SglangProbe):
        assert forced.logprobs.tolist() == free.logprobs.tolist(), "the same weights to the last bit"


async def test_forced_requests_share_their_prefix_cache_with_their_session_alone(tested):
    ids, rows = tokens(80), odd_rows(tested, 79)
    sessions = [("a", None), ("a", rows), ("a", rows), ("b", rows), ("b", None), ("", rows), ("", rows)]
    for session, forced in sessions:
        asked = tested.ask(session, ids, cache_salt="group", forced_experts=forced)
        assert_forced(tested, await asked)
    hit = [count >= 64 for count in tested.probe.cached_tokens]
    assert hit[:5] == [False, False, True, False, True]
    assert set(tested.probe.cached_tokens) <= {0, 64, 79}


@pytest.mark.parametrize("forced", [39, 10])
async def test_a_frozen_request_continues_under_forced_and_recorded_experts(tested, forced):
    rows = odd_rows(tested, forced)
    running = tested.start(tested.ask("frozen", tokens(40), max_new_tokens=80, forced_experts=rows))
    await tested.until_sampled(20)
    assert (await tested.publish("keep-recompute")).frozen == 1
    exchange = await running
    assert versions_of(exchange) == [0, 1]
    assert_true(tested, [exchange])


async def test_rows_that_cannot_be_forced_are_refused(tested):
    good = odd_rows(tested, 4).experts
    bad = [
        RoutedExperts(first_position=0, experts=np.tile(np.arange(3, dtype=np.uint8), (4, *good.shape[1:2], 1))),
        RoutedExperts(first_position=0, experts=good + np.uint8(8)),
        RoutedExperts(first_position=2, experts=good, unavailable=2),
        odd_rows(tested, 10),
    ]
    for number, rows in enumerate(bad):
        with pytest.raises(EngineError, match=rf"request bad-{number}\."):
            await tested.ask(f"bad-{number}", tokens(10), forced_experts=rows)
    assert_true(tested, [await tested.ask("good", tokens(10), forced_experts=odd_rows(tested, 9))])
