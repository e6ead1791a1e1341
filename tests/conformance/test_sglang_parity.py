"""An SGLang replica says what transformers says of the same weights: logprobs up to rounding, routing exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import AnswerError, SamplingConfig
from async_rl.inference.sglang.engine import SglangReplica
from async_rl.inference.sglang.server import CallError
from async_rl.inference.sglang.update import first_load
from message_queue.tokens import RoutedExperts, StopReason
from tests.conformance.reference import reference, routing_mismatches
from tests.conformance.sglang_support import (
    Models,
    assert_agrees,
    generate,
    idle,
    load_frozen,
    prompt,
    request,
    until_used,
)

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def answers(sglang_replica: SglangReplica, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What SGLang says beside its tokens, in order of completion."""
    found: list[dict[str, Any]] = []
    post = sglang_replica.backend.server.post

    async def spy(path: str, body: Any) -> Any:
        answer = await post(path, body)
        if path == "/generate":
            found.append(answer["meta_info"])
        return answer

    monkeypatch.setattr(sglang_replica.backend.server, "post", spy)
    return found


def cached(answers: list[dict[str, Any]]) -> list[int]:
    """Prompt tokens that each request found in the prefix cache."""
    return [answer["cached_tokens"] for answer in answers]


async def test_the_first_weights_have_the_digest_of_what_was_loaded(
    sglang_models: Models, sglang_server: SglangReplica
):
    assert first_load(sglang_server.backend.server.report).digest == sglang_models.updates[0].weights.digest


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.7}, {"top_k": 5}])
async def test_logprobs_are_of_the_distribution_that_was_sampled(
    sglang_replica: SglangReplica, sglang_models: Models, cut: Any
):
    tokens = prompt(20)
    sampling = SamplingConfig(temperature=2.0, **cut)
    segment = await generate(sglang_replica, request("warm", tokens, sampling=sampling))
    both = np.concatenate([tokens, segment.token_ids])
    expected = reference(sglang_models.models[0], both)
    scaled = expected.logprobs[19:43] / 2.0
    order = np.argsort(-scaled, axis=-1)
    ranked = np.take_along_axis(scaled, order, -1)
    probabilities = np.exp(ranked) / np.exp(ranked).sum(-1, keepdims=True)
    out = np.cumsum(probabilities, -1) - probabilities > sampling.top_p
    out |= np.arange(scaled.shape[1]) >= (sampling.top_k if sampling.top_k > 0 else np.inf)
    np.put_along_axis(scaled, order, np.where(out, -np.inf, ranked), -1)
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    assert np.abs(scaled[np.arange(24), segment.token_ids] - segment.logprobs).max() <= expected.logprob_bound


async def test_a_stop_token_ends_the_decode_and_is_part_of_it(sglang_replica: SglangReplica):
    greedy = SamplingConfig(temperature=0.0)
    free = await generate(sglang_replica, request("free", prompt(20), sampling=greedy))
    stop = int(free.token_ids[5])
    segment = await generate(sglang_replica, request("stop", prompt(20), sampling=greedy, stop_token_ids=(stop,)))
    assert segment.stop_reason is StopReason.STOP
    assert segment.token_ids[-1] == stop
    assert stop not in segment.token_ids[:-1]


async def test_the_end_token_of_the_checkpoint_stops_nothing(sglang_replica: SglangReplica):
    every = await asyncio.gather(*(generate(sglang_replica, request(f"e{i}", prompt(8, seed=i))) for i in range(24)))
    assert any(2 in segment.token_ids for segment in every), "token 2 ends a sequence by the checkpoint's config"
    assert {len(segment) for segment in every} == {24}


async def test_a_kept_request_that_is_retracted_later_keeps_the_rows_it_sampled_with(
    sglang_replica: SglangReplica, sglang_models: Models, answers: list[dict[str, Any]]
):
    prompts = [prompt(20, seed=i) for i in range(16)]
    tasks = [
        asyncio.create_task(sglang_replica.generate(request(f"later{i}", t, max_new_tokens=110)))
        for i, t in enumerate(prompts)
    ]
    await until_used(sglang_replica, 500, tasks)
    await load_frozen(sglang_replica, sglang_models.updates[1], "keep")
    results = await asyncio.gather(*tasks)
    retracted = {answer["id"] for answer in answers if answer["num_retractions"]}
    split = [(t, r) for i, (t, r) in enumerate(zip(prompts, results, strict=True)) if f"later{i}." in retracted]
    assert any(len(segments) == 2 for _, segments in split), "some were retracted after the update"
    for tokens, (before, *_) in split:
        assert_agrees(sglang_models.models[before.weights.version], tokens, before)


async def test_an_abort_of_a_retracted_request_returns_its_tokens_with_their_rows(
    sglang_replica: SglangReplica, sglang_models: Models
):
    tokens = prompt(30)
    task = asyncio.create_task(generate(sglang_replica, request("waits", tokens, max_new_tokens=480)))
    await until_used(sglang_replica, 60, [task])
    await sglang_replica.pause()
    await sglang_replica.freeze()
    await sglang_replica.backend.pause_engine("retract")
    assert await sglang_replica.abort() == 1
    segment = await task
    assert segment.stop_reason is StopReason.ABORT
    assert len(segment) >= 30
    assert_agrees(sglang_models.models[0], tokens, segment)
    await sglang_replica.resume()


async def test_an_abort_of_a_retracted_request_returns_the_kept_tokens_too(sglang_replica: SglangReplica):
    ask = request("waits", prompt(30), max_new_tokens=480, sampling=SamplingConfig(top_p=0.9))
    task = asyncio.create_task(generate(sglang_replica, ask))
    await until_used(sglang_replica, 60, [task])
    await sglang_replica.pause()
    await sglang_replica.freeze()
    await sglang_replica.backend.pause_engine("retract")
    assert await sglang_replica.abort() == 1
    segment = await task
    await sglang_replica.resume()
    assert segment.stop_reason is StopReason.ABORT
    assert len(segment) >= 30
    assert segment.support is not None


async def test_more_kept_tokens_than_the_server_returns_are_a_refused_answer(
    sglang_replica: SglangReplica, monkeypatch: pytest.MonkeyPatch
):
    async def overflow(path: str, body: Any) -> Any:
        raise CallError("HTTP 400: Sampling support exceeds --sampling-mask-max-tokens=16384")

    with monkeypatch.context() as patch:
        patch.setattr(sglang_replica.backend.server, "post", overflow)
        with pytest.raises(AnswerError, match="sampling-mask-max-tokens"):
            await generate(sglang_replica, request("wide", prompt(10), sampling=SamplingConfig(top_p=0.9)))


async def test_forced_experts_are_used_wherever_their_positions_are_forwarded(
    sglang_replica: SglangReplica, sglang_models: Models, answers: list[dict[str, Any]]
):
    tokens = prompt(250)  # three chunks
    rows = np.random.default_rng(1).permuted(np.tile(np.arange(8, dtype=np.uint8), (200, 4, 1)), axis=-1)[..., :2]
    forced = RoutedExperts(first_position=0, experts=np.ascontiguousarray(rows))
    for name in ("cold", "hit"):
        ask = request(name, tokens, forced_experts=forced, session="s", existing_rows=100)
        segment = await generate(sglang_replica, ask)
        assert_agrees(sglang_models.models[0], tokens, segment, forced=rows)
    other = request("other", tokens, forced_experts=forced, session="t")
    assert_agrees(sglang_models.models[0], tokens, await generate(sglang_replica, other), forced=rows)
    assert_agrees(sglang_models.models[0], tokens, await generate(sglang_replica, request("free", tokens)))
    assert cached(answers) == [0, 249, 0, 0], "forced K/V is of use to its own session alone"
    free = reference(sglang_models.models[0], tokens)
    assert routing_mismatches(free, rows, start=0) > 100, "the forced experts are not those of the router"


async def test_a_forced_request_beside_free_ones_forces_only_itself(
    sglang_replica: SglangReplica, sglang_models: Models
):
    tokens = prompt(40)
    rows = np.zeros((30, 4, 2), np.uint8)
    rows[..., 1] = 7
    forced = RoutedExperts(first_position=0, experts=rows)
    asks = [request(f"free{i}", prompt(30, seed=i)) for i in range(2)]
    asks.insert(1, request("forced", tokens, forced_experts=forced))
    first, middle, last = await asyncio.gather(*(generate(sglang_replica, ask) for ask in asks))
    assert_agrees(sglang_models.models[0], tokens, middle, forced=rows)
    assert_agrees(sglang_models.models[0], prompt(30, seed=0), first)
    assert_agrees(sglang_models.models[0], prompt(30, seed=1), last)


async def test_an_answer_that_breaks_the_contract_is_refused_and_the_replica_serves_on(
    sglang_replica: SglangReplica, monkeypatch: pytest.MonkeyPatch
):
    post = sglang_replica.backend.server.post

    async def spoil(path: str, body: Any) -> Any:
        answer = await post(path, body)
        if path == "/generate":
            answer["meta_info"]["output_token_logprobs"][2][0] = float("nan")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(sglang_replica.backend.server, "post", spoil)
        with pytest.raises(AnswerError, match=r"replica-0: request bad\.: TokenOutput.logprobs\[2\] is nan"):
            await generate(sglang_replica, request("bad", prompt(10)))
    assert len(await generate(sglang_replica, request("bad", prompt(10)))) == 24
    assert await idle(sglang_replica)
