"""Forced routing in a vLLM replica: it says what transformers says under the same forcing, whatever the schedule."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import EngineError, GenerateRequest, SamplingConfig
from async_rl.inference.vllm import engine as vllm_engine
from async_rl.inference.vllm.engine import VllmReplica
from message_queue.tokens import RoutedExperts, TokenOutput
from tests.conformance.conftest import Models, generate, prompt, publish, request, slowly, until_sampled
from tests.conformance.reference import gap_with_rows, logprob_gap, reference

pytestmark = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]

FAR = 10  # bounds: a prefix under other experts moves some logprob by more than this


def odd_rows(count: int, *, seed: int = 0) -> RoutedExperts:
    """Rows that no router chose, in no order."""
    ranks = np.random.default_rng(seed).random((count, 3, 8))
    return RoutedExperts(first_position=0, experts=np.argsort(ranks, axis=-1)[..., :2].astype(np.uint8))


def gap_of(model: Any, ask: GenerateRequest, segment: TokenOutput, *, forced: RoutedExperts | None) -> float:
    """Largest |dlogp| against transformers under `forced`, over its bound; infinite where a row differs.

    A numerical tie of a router that was decided the other way ends the comparison.
    """
    tokens = np.concatenate([ask.token_ids, segment.token_ids])
    expected = reference(model, tokens, forced=None if forced is None else forced.experts)
    rows = segment.routed_experts
    assert rows is not None
    assert (rows.first_position, rows.end_position) == (ask.existing_rows, len(tokens) - 1)
    if forced is not None:
        held = min(ask.existing_rows, len(forced.experts))
        same = rows.experts[: len(forced.experts) - held] == forced.experts[held:]
        assert same.all(), "what is recorded is what was used, in its order"
    start, first_row = len(ask.token_ids), rows.first_position
    return gap_with_rows(expected, tokens, segment.logprobs, rows.experts, start=start, first_row=first_row)


def assert_forced(model: Any, ask: GenerateRequest, segment: TokenOutput) -> None:
    assert gap_of(model, ask, segment, forced=ask.forced_experts) <= 1
    if ask.forced_experts is not None:
        tokens = np.concatenate([ask.token_ids, segment.token_ids])
        free = logprob_gap(reference(model, tokens), tokens, segment.logprobs, start=len(ask.token_ids))
        assert free > FAR, "without the forcing the logprobs are others, or this shows nothing"


async def test_a_prefix_under_the_experts_of_other_weights(replica: VllmReplica, models: Models):
    first = request("before", prompt(60), max_new_tokens=40)
    before = await generate(replica, first)
    tokens = np.concatenate([first.token_ids, before.token_ids])
    await publish(replica, models.update_second)
    for held in (0, 50, 99):
        ask = request(f"forced-{held}", tokens, existing_rows=held, forced_experts=before.routed_experts)
        assert_forced(models.reference_second, ask, await generate(replica, ask))


@pytest.mark.parametrize(("length", "forced"), [(40, 39), (40, 17), (40, 1), (40, 0), (300, 299), (300, 150)])
async def test_any_number_of_rows_and_chunks(replica: VllmReplica, models: Models, length: int, forced: int):
    rows = odd_rows(forced)
    ask = request(f"odd-{length}-{forced}", prompt(length), forced_experts=rows)
    segment = await generate(replica, ask)
    assert gap_of(models.reference_first, ask, segment, forced=rows) <= 1


async def test_forced_and_free_requests_in_one_batch_that_does_not_fit_the_cache(replica: VllmReplica, models: Models):
    """Preempted requests are prefilled again, with some of their own tokens, under the same forcing."""
    asks = [
        request(
            f"mixed-{i}",
            prompt(20 + 7 * (i % 13), seed=i),
            max_new_tokens=90,
            forced_experts=odd_rows(19 + 7 * (i % 13), seed=i) if i % 2 else None,
        )
        for i in range(40)
    ]
    segments = await asyncio.gather(*(generate(replica, ask) for ask in asks))
    for ask, segment in zip(asks, segments, strict=True):
        assert_forced(models.reference_first, ask, segment)


async def test_forcing_what_the_router_chooses_anyway_changes_nothing(replica: VllmReplica):
    greedy = SamplingConfig(temperature=0.0)
    free = await generate(replica, request("free", prompt(60), sampling=greedy))
    assert free.routed_experts is not None
    rows = RoutedExperts(first_position=0, experts=free.routed_experts.experts[:59])
    forced = await generate(replica, request("same", prompt(60), sampling=greedy, forced_experts=rows))
    assert forced.routed_experts is not None
    assert forced.token_ids.tolist() == free.token_ids.tolist()
    assert forced.logprobs.tolist() == free.logprobs.tolist(), "the same weights to the last bit"
    assert (forced.routed_experts.experts == free.routed_experts.experts).all()


async def test_forced_requests_share_their_prefix_cache_with_their_own_session_alone(
    replica: VllmReplica, models: Models, monkeypatch: pytest.MonkeyPatch
):
    found: list[int] = []
    translate = vllm_engine.to_segments

    def spy(output: Any, **context: Any) -> list[TokenOutput]:
        found.append(output.num_cached_tokens)
        return translate(output, **context)

    monkeypatch.setattr(vllm_engine, "to_segments", spy)
    tokens, rows = prompt(80), odd_rows(79)
    for name, session, forced in (
        ("plain", "a", None),
        ("other", "a", rows),
        ("again", "a", rows),
        ("alone", "b", rows),
        ("free", "b", None),
        ("no-session-1", "", rows),
        ("no-session-2", "", rows),
    ):
        ask = request(name, tokens, session=session, cache_salt="group", forced_experts=forced)
        assert_forced(models.reference_first, ask, await generate(replica, ask))
    assert found == [0, 0, 64, 0, 64, 0, 0]


@pytest.mark.parametrize("forced", [39, 10])
async def test_a_frozen_request_goes_on_under_forced_and_recorded_experts(
    replica: VllmReplica, models: Models, forced: int
):
    rows = odd_rows(forced)
    ask = request(f"frozen-{forced}", prompt(40), max_new_tokens=80, forced_experts=rows)
    (running,) = slowly(replica, [replica.generate(ask)])
    await until_sampled(replica, 20)
    await replica.pause()
    assert await replica.freeze() == 1
    await replica.load(models.update_second)
    await replica.resume()
    first, second = await running
    assert gap_of(models.reference_first, ask, first, forced=rows) <= 1
    so_far = np.concatenate([ask.token_ids, first.token_ids])
    rest = request("rest", so_far, existing_rows=len(so_far) - 1)
    assert gap_of(models.reference_second, rest, second, forced=first.routed_experts) <= 1


async def test_rows_that_cannot_be_forced_are_refused_by_field_and_value(replica: VllmReplica):
    wide = RoutedExperts(first_position=0, experts=np.tile(np.arange(3, dtype=np.uint8), (4, 3, 1)))
    high = RoutedExperts(first_position=0, experts=np.tile(np.array([1, 9], np.uint8), (4, 3, 1)))
    gone = RoutedExperts(first_position=2, experts=odd_rows(4).experts, unavailable=2)
    bad = {
        r"rows of shape \[3, 3\]": wide,
        r"expert id 9; the model has 8": high,
        r"forced_experts has rows 0..9 .* for 10 tokens; need available rows up to 8": odd_rows(10),
        r"forced_experts has rows 2..5 \(2 unavailable\)": gone,
    }
    for number, (message, rows) in enumerate(bad.items()):
        with pytest.raises(EngineError, match=f"replica-0: request bad-{number}: .*{message}"):
            await generate(replica, request(f"bad-{number}", prompt(10), forced_experts=rows))
    assert len(await generate(replica, request("good", prompt(10), forced_experts=odd_rows(9)))) == 24


async def test_only_rows_that_are_not_held_leave_the_engine_process(
    replica: VllmReplica, models: Models, monkeypatch: pytest.MonkeyPatch
):
    """Ten turns and five aborts of one trajectory: T - 1 rows in all, each position once."""
    crossed: list[int] = []
    processor = replica.backend.engine.output_processor
    process, known = processor.process_outputs, processor.request_states  # an abort drops a late token with its row

    def spy(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        crossed.extend(len(o.routed_experts) for o in outputs if o.routed_experts is not None and o.request_id in known)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", spy)
    rng = np.random.default_rng(0)
    tokens, rows = prompt(50), odd_rows(0)
    for turn, interrupted in itertools.product(range(10), (False, True)):
        if interrupted and turn % 2:
            continue
        forced = rows if turn % 3 else None
        budget = 300 if interrupted else 10
        ask = request(
            f"turn-{turn}-{interrupted}",
            tokens,
            max_new_tokens=budget,
            existing_rows=len(rows.experts),
            forced_experts=forced,
            session="one",
        )
        (running,) = slowly(replica, [generate(replica, ask)])
        if interrupted:
            await until_sampled(replica, 8)
            await replica.abort()
        segment = await running
        assert segment.routed_experts is not None
        assert segment.routed_experts.first_position == len(rows.experts)
        rows = RoutedExperts(first_position=0, experts=np.concatenate([rows.experts, segment.routed_experts.experts]))
        tokens = np.concatenate([tokens, segment.token_ids])
        if not interrupted:
            reply = rng.integers(3, 117, 5).astype(np.int32)  # its rows are of the forward that follows
            tokens = np.concatenate([tokens, reply])
    last = await generate(replica, request("last", tokens, max_new_tokens=1, existing_rows=len(rows.experts)))
    assert sum(crossed) == len(tokens) + len(last) - 1
    assert max(crossed) < 60, "no prefill sends what is held"
