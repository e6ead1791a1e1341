"""Updates of vLLM that meet requests between two prefills, at a border, in the queue, or without room for K/V."""

import asyncio

import numpy as np
import pytest

from tests.conformance.checks import gap_of, gap_of_late_start, gaps_of_segment, sampled_of, versions_of, whole
from tests.conformance.engines import MARKS, ON_VLLM, prompts
from tests.conformance.reference import gap_with_rows
from tests.conformance.served import VLLM

pytestmark = [*MARKS, ON_VLLM]
KEEP = pytest.mark.parametrize("kv", ["keep", "recompute"])


def start(tested, asked, *, budgets):
    asks = enumerate(zip(asked, budgets, strict=True))
    return [tested.start(tested.ask(f"r-{i}", ids, max_new_tokens=budget)) for i, (ids, budget) in asks]


def gap(tested, exchange):
    """Of an answer that an update split, or that started after chunks of its prefill."""
    return gap_of(tested, exchange) if len(exchange.answer) > 1 else gap_of_late_start(tested, exchange)[0]


@pytest.mark.parametrize("edge", ["first", "last"])
@KEEP
async def test_a_boundary_at_the_first_or_the_last_token(tested, kv, edge):
    """Prefills one after another, or budgets that end one after another: one request is at the edge.

    The machine decides when the update comes, so a round without one there is repeated.
    """
    for _ in range(5):
        if edge == "first":
            tasks = start(tested, prompts(16, length=90), budgets=[30] * 16)  # about one prefill per step
        else:
            tasks = start(tested, prompts(28, length=8), budgets=list(range(2, 30)))
        await tested.until_sampled(12 if edge == "first" else 150)
        await tested.publish(f"keep-{kv}")
        answered = await asyncio.gather(*tasks)
        assert max(gap(tested, exchange) for exchange in answered) <= 1
        at = 0 if edge == "first" else 1
        if 1 in {len(exchange.answer[at]) for exchange in answered if len(exchange.answer) == 2}:
            return
        await tested.publish(version=0)
    pytest.fail("no update came when a request was at the edge")


@KEEP
async def test_an_update_under_a_chunked_prefill(tested, kv):
    """Weights 1 sample every token; with kept K/V the chunks before the update are of weights 0."""
    tasks = start(tested, prompts(8, length=400, step=3), budgets=[60] * 8)
    await tested.until_sampled(2)
    assert (await tested.publish(f"keep-{kv}")).frozen == 8
    half_done = 0
    for exchange in await asyncio.gather(*tasks):
        if len(exchange.answer) == 2:
            assert gap_of(tested, exchange) <= 1
            continue
        assert versions_of(exchange) == [1]
        found, old_prefill = gap_of_late_start(tested, exchange)
        assert found <= 1
        half_done += old_prefill > 0
    assert half_done == (1 if kv == "keep" else 0)


@KEEP
async def test_requests_that_wait_for_a_place_start_under_the_new_weights(tested, kv):
    tasks = start(tested, prompts(VLLM.max_num_seqs + 8), budgets=[60] * (VLLM.max_num_seqs + 8))
    await tested.until_sampled(64)
    assert (await tested.publish(f"keep-{kv}")).frozen == len(tasks)
    fresh = [exchange for exchange in await asyncio.gather(*tasks) if len(exchange.answer) == 1]
    assert len(fresh) >= 8
    for exchange in fresh:
        assert versions_of(exchange) == [1]
        assert gap_of_late_start(tested, exchange)[0] <= 1


@KEEP
async def test_an_update_if_not_all_requests_fit_in_memory(tested, kv):
    """The engine preempts before and after the update."""
    tasks = start(tested, prompts(40, step=7), budgets=[80] * 40)
    await tested.until_sampled(600)
    await tested.publish(f"keep-{kv}")
    preempted = 0
    for exchange in await asyncio.gather(*tasks):
        assert sampled_of(exchange) == 80
        if len(exchange.answer) == 1:
            assert gap_of_late_start(tested, exchange)[0] <= 1
            continue
        assert versions_of(exchange) == [0, 1]
        assert gaps_of_segment(tested, exchange, 0).max() <= 1
        good = gaps_of_segment(tested, exchange, 1) <= 1
        since = len(good) if good.all() else int(np.argmin(good))
        assert since == len(good) or gap_after_preemption(tested, exchange, since) <= 1
        preempted += since < len(good)
    assert preempted >= 1 if kv == "keep" else preempted == 0


def gap_after_preemption(tested, exchange, since):
    """|dlogp| over its bound of the second segment from its token `since` on, if some blocks of K/V were left.

    The second weights then recomputed the K/V, under all rows recorded until then.
    """
    ids, second = whole(exchange), exchange.answer[1]
    rows = np.concatenate([s.routed_experts.experts for s in exchange.answer if s.routed_experts is not None])
    cut = len(ids) - len(second)
    start, logprobs = cut + since, second.logprobs[since:]
    gaps = []
    for cached in range(0, start, 32):
        parts = [(0, min(cached, cut - 1)), (1, len(ids))]
        expected = tested.truth(parts, ids, forced=rows[: start - 1])
        gaps.append(gap_with_rows(expected, ids, logprobs, rows[start - 1 :], start=start, first_row=start - 1))
    return min(gaps)
