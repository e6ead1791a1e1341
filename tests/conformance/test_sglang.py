"""SGLang alone: its first weights, requests that it retracts, and sets that it does not return."""

import asyncio

import pytest

from agent_loop.engine import SamplingConfig
from async_rl.inference.sglang.server import CallError
from async_rl.inference.sglang.update import first_load
from message_queue.errors import AnswerError
from message_queue.tokens import StopReason
from tests.conformance.checks import assert_cut, assert_true, sampled_of, versions_of
from tests.conformance.engines import MARKS, ON_SGLANG, Exchange, prompts, tokens

pytestmark = MARKS


async def test_the_first_weights_have_the_digest_of_the_checkpoint(sglang_models, sglang_server):
    digest, _ = first_load(sglang_server.backend.server.report)
    assert digest == sglang_models.updates[0].weights.digest


@ON_SGLANG
async def test_a_kept_request_that_is_retracted_later_keeps_its_rows(tested):
    asked = enumerate(prompts(16))
    tasks = [tested.start(tested.ask(f"later-{i}", ids, max_new_tokens=110)) for i, ids in asked]
    await tested.until_sampled(180)
    await tested.publish("keep-keep")
    exchanges = await asyncio.gather(*tasks)
    assert sum(tested.probe.retractions) > 0
    split = [exchange for exchange in exchanges if len(exchange.answer) == 2]
    assert split, "some were updated in flight"
    assert_true(tested, [Exchange(exchange.request, exchange.answer[:1]) for exchange in exchanges])


@ON_SGLANG
@pytest.mark.parametrize("cut", [SamplingConfig(), SamplingConfig(top_p=0.9)], ids=["whole", "cut"])
async def test_an_abort_of_a_retracted_request_returns_tokens_rows_and_sets(tested, cut):
    task = tested.start(tested.ask("waits", tokens(30), max_new_tokens=400, sampling=cut))
    await tested.until_sampled(30)
    await tested.freeze()
    await tested.replica.backend.pause_engine("retract")
    assert await tested.replica.abort() == 1
    exchange = await task
    await tested.resume()
    assert (versions_of(exchange), exchange.answer[0].stop_reason) == ([0], StopReason.ABORT)
    assert sampled_of(exchange) >= 30
    if cut.is_cut:
        assert_cut(tested, [exchange])
    else:
        assert_true(tested, [exchange])


@ON_SGLANG
async def test_more_kept_tokens_than_the_server_returns_are_a_refused_answer(tested, monkeypatch):
    async def overflow(path, body):
        raise CallError("HTTP 400: Sampling support exceeds --sampling-mask-max-tokens=16384")

    with monkeypatch.context() as patch:
        patch.setattr(tested.replica.backend.server, "post", overflow)
        with pytest.raises(AnswerError, match="sampling-mask-max-tokens"):
            await tested.ask("wide", tokens(10), sampling=SamplingConfig(top_p=0.9))
