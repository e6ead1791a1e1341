"""vLLM alone: one trajectory with all its interruptions, seeded sampling, and models whose routers cannot be forced."""

import dataclasses

import pytest

from message_queue.errors import EngineError
from tests.conformance.checks import assert_true, assert_whole, versions_of
from tests.conformance.engines import MARKS, ON_VLLM, tokens

pytestmark = [*MARKS, ON_VLLM]


async def test_only_rows_that_are_not_held_leave_the_engine_process(tested, monkeypatch):
    """Ten turns with four aborts under forced routing: T - 1 rows in all, each position once."""
    crossed = []
    replica = tested.replica
    processor = replica.backend.engine.output_processor
    process, known = processor.process_outputs, processor.request_states  # an abort drops a late token with its row

    def spy(outputs, *args, **kwargs):
        crossed.extend(len(o.routed_experts) for o in outputs if o.routed_experts is not None and o.request_id in known)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", spy)
    rollout = tested.rollout("one", resume_routing="force")
    for turn in range(10):
        work = tested.start(rollout.turn(tokens(5 if turn else 50, seed=turn), max_new_tokens=10 if turn % 3 else 40))
        if turn % 3 == 0:
            await tested.until_sampled(8)
            await replica.abort()
        await work
    assert rollout.decoder.num_aborts == 4
    assert sum(crossed) == len(rollout.trajectory) - 1
    assert max(crossed) < 60, "no prefill sends held rows"
    assert_whole(tested, rollout)


async def test_a_seeded_request_survives_a_chunked_prefill_and_repeats(tested):
    from vllm import SamplingParams

    async def sample(name):
        params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, detokenize=False)
        replica, last = tested.replica, None
        async for output in replica.backend.engine.generate(
            {"prompt_token_ids": tokens(250).tolist()}, params, request_id=name
        ):
            last = output
        return list(last.outputs[0].token_ids), last.num_cached_tokens

    chunked, none_cached = await sample("seed-0")  # three chunks, so two samples are discarded
    whole, all_cached = await sample("seed-1")
    assert (none_cached, all_cached) == (0, 224)
    assert chunked == whole, "discarded samples do not advance the seed"


async def test_kv_is_kept_but_not_recomputed_if_no_router_can_be_forced(tested, monkeypatch):
    backend = tested.replica.backend
    task = tested.start(tested.ask("unforcible", tokens(20), max_new_tokens=60))
    await tested.until_sampled(10)
    assert await tested.freeze() == 1
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_model", dataclasses.replace(backend._model, unforcible="the family is granitemoe"))
        with pytest.raises(EngineError, match=r"granitemoe.*rollout\.kv"):
            await tested.load(1, kv="recompute")
        await tested.load(1, kv="keep")
    await tested.resume()
    exchange = await task
    assert versions_of(exchange) == [0, 1]
    assert_true(tested, [exchange])
