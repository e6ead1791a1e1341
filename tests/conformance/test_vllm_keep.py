"""New weights under running requests of a real vLLM replica: each token is of its own version, exactly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from async_rl.inference.replica import KVPolicy
from async_rl.inference.vllm.engine import VllmReplica
from async_rl.weights.model_info import read_model_info
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from tests.conformance.conftest import CONFIG, Models, generate, prompt, request, samples, until_sampled
from tests.conformance.updates import (
    KINDS,
    freeze,
    gap_after_preemption,
    gap_of,
    gaps_of_segment,
    moved_boundary,
    several,
    start,
    update_frozen,
    whole_gap,
)

pytestmark = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kv", KINDS)
async def test_tokens_and_rows_are_of_the_version_that_they_name(replica: VllmReplica, models: Models, kv: KVPolicy):
    asks = several(f"run-{kv}", 6, tokens=120)
    tasks = start(replica, asks)
    await until_sampled(replica, 60, requests=6)
    assert await update_frozen(replica, models.update_second, kv) == 6
    assert replica.weights == models.update_second.weights
    exact = 0
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert [s.weights for s in segments] == [models.update_first.weights, models.update_second.weights]
        assert [s.stop_reason for s in segments] == [StopReason.ABORT, StopReason.LENGTH]
        assert sum(map(len, segments)) == 120
        assert gap_of(models, ask, segments, [kv]) <= 1
        exact += gap_of(models, ask, segments, [kv], strict=True) <= 1
        for by in (-1, 1):
            moved = moved_boundary(segments, by)
            assert gap_of(models, ask, moved, [kv], strict=True) > 1, "exact at the token"
        other = KINDS[1 - KINDS.index(kv)]
        assert gap_of(models, ask, segments, [other], strict=True) > 1, "the two ways differ"
        trajectory = Trajectory(routing=read_model_info(models.first).routing)
        trajectory.observe(ask.token_ids)
        for segment in segments:
            trajectory.extend(segment)
        assert trajectory.num_rows == len(trajectory) - 1
    assert exact >= 4, "with a numerical tie in most requests this shows nothing"


@pytest.mark.parametrize("kvs", list(itertools.product(KINDS, repeat=3)), ids="-".join)
async def test_three_updates_in_one_flight(replica: VllmReplica, models: Models, kvs: Sequence[KVPolicy]):
    asks = several(f"three-{'-'.join(kvs)}", 3, tokens=150)
    tasks = start(replica, asks)
    for number, kv in enumerate(kvs):
        tokens = 40 if kvs[:number].count("recompute") else 40 * (number + 1)
        await until_sampled(replica, tokens, requests=len(asks))
        assert await update_frozen(replica, [models.update_second, models.update_first][number % 2], kv) == 3
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert sum(map(len, segments)) == 150
        assert [s.weights.version for s in segments] == [0, 1, 0, 1]
        assert gap_of(models, ask, segments, kvs) <= 1


@pytest.mark.parametrize("edge", ["first", "last"])
@pytest.mark.parametrize("kv", KINDS)
async def test_a_boundary_at_the_first_or_the_last_token(replica: VllmReplica, models: Models, kv: KVPolicy, edge: str):
    """Prefills one after another, or budgets that end one after another: one request is at the edge.

    When the update comes is up to the machine, so a round that happens to have none there is run again.
    """
    for attempt in range(5):
        if edge == "first":
            asks = several(f"first-{kv}-{attempt}", 16, length=90, step=0, tokens=30)  # about one prefill per step
        else:
            name = f"last-{kv}-{attempt}"
            asks = [request(f"{name}-{n}", prompt(8, seed=n), max_new_tokens=n) for n in range(2, 30)]
        await update_frozen(replica, models.update_first, kv)
        tasks = start(replica, asks)
        await samples(replica, 12 if edge == "first" else 150)  # if all ended before, no request is at the edge
        await update_frozen(replica, models.update_second, kv)
        answers = await asyncio.gather(*tasks)
        for ask, segments in zip(asks, answers, strict=True):
            assert sum(map(len, segments)) == ask.max_new_tokens
            if len(segments) == 2:
                assert gap_of(models, ask, segments, [kv]) <= 1
            else:
                assert whole_gap(models, ask, segments)[0] <= 1
        if 1 in {len(segments[0 if edge == "first" else 1]) for segments in answers if len(segments) == 2}:
            return
    pytest.fail("no update came when a request was at the edge")


@pytest.mark.parametrize("kv", KINDS)
async def test_an_update_under_a_chunked_prefill(replica: VllmReplica, models: Models, kv: KVPolicy):
    """Weights 1 sample every token; with kept K/V the chunks before the update are of weights 0."""
    asks = several(f"chunk-{kv}", 8, length=400, step=3, tokens=60)
    tasks = start(replica, asks)
    await until_sampled(replica, 2)
    assert await update_frozen(replica, models.update_second, kv) == 8
    half_done = 0
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        if len(segments) == 2:
            assert gap_of(models, ask, segments, [kv]) <= 1
            continue
        assert [s.weights.version for s in segments] == [1]
        gap, old_prefill = whole_gap(models, ask, segments)
        assert gap <= 1
        half_done += old_prefill > 0
    assert half_done == 0 if kv == "recompute" else half_done == 1


@pytest.mark.parametrize("kv", KINDS)
async def test_requests_that_wait_for_a_place_start_under_the_new_weights(
    replica: VllmReplica, models: Models, kv: KVPolicy
):
    for budget in (30, 120, 400):  # all must be in flight at the update; a busy machine may look too late
        await update_frozen(replica, models.update_first, kv)
        asks = several(f"wait-{kv}-{budget}", CONFIG.max_num_seqs + 8, step=0, tokens=budget)
        tasks = start(replica, asks)
        seen = await samples(replica, 64)
        frozen = await update_frozen(replica, models.update_second, kv)
        answers = await asyncio.gather(*tasks)
        if seen and frozen == len(asks):
            break
    else:
        pytest.fail(f"requests of {budget} tokens ended before the update")
    fresh = [(ask, a) for ask, a in zip(asks, answers, strict=True) if len(a) == 1]
    assert len(fresh) >= 8
    for ask, segments in fresh:
        assert segments[0].weights.version == 1
        assert whole_gap(models, ask, segments)[0] <= 1


@pytest.mark.parametrize("kv", KINDS)
async def test_an_update_when_not_all_fit_in_memory(replica: VllmReplica, models: Models, kv: KVPolicy):
    """Far more K/V than there is room for: the engine preempts before and after the update."""
    asks = several(f"tight-{kv}", 40, step=7, tokens=80)
    tasks = start(replica, asks)
    await until_sampled(replica, 600)
    await update_frozen(replica, models.update_second, kv)
    preempted = 0
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert sum(map(len, segments)) == 80
        versions = [s.weights.version for s in segments]
        if len(segments) == 1:
            assert whole_gap(models, ask, segments)[0] <= 1
            continue
        assert versions == [0, 1]
        assert gaps_of_segment(models, ask, segments, [kv], at=0).max() <= 1
        good = gaps_of_segment(models, ask, segments, [kv], at=1) <= 1
        lost = len(good) if good.all() else int(np.argmin(good))
        assert lost == len(good) or gap_after_preemption(models, ask, segments, lost) <= 1
        preempted += lost < len(good)
    assert preempted >= 1 if kv == "keep" else preempted == 0


async def test_a_load_that_keeps_keeps_the_prefix_cache_and_one_that_does_not_clears_it(
    replica: VllmReplica, models: Models
):
    tokens = prompt(80)
    old = await generate(replica, request("old", tokens))
    await freeze(replica)
    await replica.load(models.update_second, kv="keep")
    await replica.resume()
    hit = request("hit", tokens)
    segment = await generate(replica, hit)
    assert gap_of(models, hit, [segment], [], old_prefill=64) <= 1, "two blocks are of weights 0"
    assert old.routed_experts is not None
    assert segment.routed_experts is not None
    assert (segment.routed_experts.experts[:64] == old.routed_experts.experts[:64]).all()
    await freeze(replica)
    await replica.load(models.update_second, kv="recompute")
    await replica.resume()
    assert gap_of(models, hit, [await generate(replica, hit)], []) <= 1
