"""A vLLM replica says what transformers says of the same weights: logprobs to 1e-4, routing exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import SamplingConfig
from async_rl.engines import vllm as vllm_replica
from async_rl.engines.vllm import VllmReplica
from async_rl.model_info import read_model_info
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Trajectory
from tests.conformance.conftest import Models, prompt, publish, request, until_sampled
from tests.conformance.reference import LOGPROB_TOLERANCE, logprob_gap, reference, routing_mismatches

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cached_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens that each request found in the prefix cache, in order of completion."""
    found: list[int] = []
    translate = vllm_replica.to_segment

    def spy(output: Any, **context: Any) -> TokenOutput:
        found.append(output.num_cached_tokens)
        return translate(output, **context)

    monkeypatch.setattr(vllm_replica, "to_segment", spy)
    return found


def assert_agrees(model: Any, before: Any, segment: TokenOutput) -> None:
    """Tokens, logprobs and all rows of one segment that followed `before`."""
    tokens = np.concatenate([before, segment.token_ids])
    expected = reference(model, tokens)
    assert segment.routed_experts is not None
    rows = segment.routed_experts
    assert rows.end_position == len(tokens) - 1
    assert logprob_gap(expected, tokens, segment.logprobs, start=len(before)) <= LOGPROB_TOLERANCE
    assert routing_mismatches(expected, rows.experts, start=rows.first_position) == 0


async def test_a_fresh_request_agrees_with_transformers(replica: VllmReplica, models: Models):
    tokens = prompt(40)
    segment = await replica.generate(request("fresh", tokens))
    assert (len(segment), segment.stop_reason, segment.replica) == (24, StopReason.LENGTH, "replica-0")
    assert segment.weights == models.update_first.weights
    assert segment.routed_experts is not None
    assert segment.routed_experts.experts.shape == (63, 3, 2), "the dense layer does not travel"
    assert_agrees(models.reference_first, tokens, segment)


async def test_routing_varies_from_token_to_token(replica: VllmReplica):
    segment = await replica.generate(request("varies", prompt(40)))
    assert segment.routed_experts is not None
    for layer in range(3):
        pairs = np.unique(np.sort(segment.routed_experts.experts[:, layer], -1), axis=0)
        assert len(pairs) > 4, "a test of routing would pass on a constant"


async def test_logprobs_are_of_the_distribution_after_temperature(replica: VllmReplica, models: Models):
    tokens = prompt(20)
    segment = await replica.generate(request("warm", tokens, sampling=SamplingConfig(temperature=2.0)))
    both = np.concatenate([tokens, segment.token_ids])
    scaled = reference(models.reference_first, both).logprobs / 2.0
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    at = np.arange(20, 44)
    assert np.abs(scaled[at - 1, both[at]] - segment.logprobs).max() <= LOGPROB_TOLERANCE


async def test_a_stop_token_ends_the_decode_and_is_part_of_it(replica: VllmReplica):
    greedy = SamplingConfig(temperature=0.0)
    free = await replica.generate(request("free", prompt(20), sampling=greedy))
    stop = int(free.token_ids[5])
    segment = await replica.generate(request("stop", prompt(20), sampling=greedy, stop_token_ids=(stop,)))
    assert segment.stop_reason is StopReason.STOP
    assert segment.token_ids[-1] == stop
    assert stop not in segment.token_ids[:-1]


async def test_a_prefix_cache_hit_returns_the_same_rows(replica: VllmReplica, models: Models, cached_tokens: list[int]):
    tokens = prompt(80)
    for name in ("cold", "hit"):
        assert_agrees(models.reference_first, tokens, await replica.generate(request(name, tokens)))
    salted = await replica.generate(request("salted", tokens, cache_salt="other"))
    assert_agrees(models.reference_first, tokens, salted)
    assert cached_tokens == [0, 64, 0]


async def test_a_chunked_prefill_agrees(replica: VllmReplica, models: Models):
    tokens = prompt(300)  # four chunks
    assert_agrees(models.reference_first, tokens, await replica.generate(request("long", tokens)))


async def test_only_rows_that_the_caller_lacks_are_returned(replica: VllmReplica, models: Models):
    tokens = prompt(50)
    segment = await replica.generate(request("tail", tokens, rows_held=30))
    assert segment.routed_experts is not None
    assert segment.routed_experts.first_position == 30
    assert_agrees(models.reference_first, tokens, segment)


async def test_many_requests_that_do_not_fit_the_cache_at_once_agree(replica: VllmReplica, models: Models):
    prompts = [prompt(20 + 7 * (i % 13), seed=i) for i in range(48)]
    segments = await asyncio.gather(
        *(replica.generate(request(f"many-{i}", tokens, max_new_tokens=90)) for i, tokens in enumerate(prompts))
    )
    for tokens, segment in zip(prompts, segments, strict=True):
        assert len(segment) == 90
        assert_agrees(models.reference_first, tokens, segment)


async def test_a_live_update_is_what_samples_next(replica: VllmReplica, models: Models, cached_tokens: list[int]):
    tokens = prompt(80)
    assert_agrees(models.reference_first, tokens, await replica.generate(request("before", tokens)))
    for update, model in (
        (models.update_second, models.reference_second),
        (models.update_first, models.reference_first),
    ):
        await publish(replica, update)
        segment = await replica.generate(request("after", tokens))
        assert segment.weights == update.weights
        assert_agrees(model, tokens, segment)
    assert cached_tokens == [0, 0, 0], "a load leaves no K/V of the weights before it"


async def test_a_trajectory_over_two_updates_is_right_segment_by_segment(replica: VllmReplica, models: Models):
    trajectory = Trajectory(routing=read_model_info(models.first).routing)
    trajectory.observe(prompt(60))
    after = (models.update_second, models.update_first, None)
    for i, update in enumerate(after):
        budget = 400 if update else 20
        ask = request(f"part-{i}", trajectory.token_ids(), max_new_tokens=budget, rows_held=trajectory.num_rows)
        running = asyncio.create_task(replica.generate(ask))
        if update:
            await until_sampled(replica, 15)
            assert await publish(replica, update) == 1
        trajectory.extend(await running)

    total, segments = len(trajectory), trajectory.segments
    assert [s.stop_reason for s in segments] == [StopReason.ABORT, StopReason.ABORT, StopReason.LENGTH]
    assert [s.weights.version for s in segments] == [0, 1, 0]
    assert trajectory.num_rows == total - 1
    rows, versions, row_versions = trajectory.routed_experts(), trajectory.param_versions(), trajectory.row_versions()
    assert rows is not None
    assert (rows[-1] == -1).all()
    assert (rows[:-1] >= 0).all()
    expected = {0: reference(models.reference_first, trajectory.token_ids())}
    expected[1] = reference(models.reference_second, trajectory.token_ids())
    at = 60
    for segment in segments:
        version = segment.weights.version
        assert (versions[at : at + len(segment)] == version).all()
        gap = logprob_gap(expected[version], trajectory.token_ids(), segment.logprobs, start=at)
        assert gap <= LOGPROB_TOLERANCE
        assert segment.routed_experts is not None
        held = segment.routed_experts
        assert routing_mismatches(expected[version], held.experts, start=held.first_position) == 0
        assert (row_versions[held.first_position : held.end_position] == version).all()
        at += len(segment)
    other = routing_mismatches(expected[1], rows[: len(segments[0])], start=0)
    assert other > 10, "the two weights must route differently, or this test shows nothing"
