"""Pause, abort, drain, load, resume, cancel and time-outs of a real vLLM replica."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_loop.engine import EngineError
from async_rl.inference.vllm.engine import VllmReplica
from async_rl.weights.transport import WeightUpdate, read_update, write_update
from message_queue.tokens import StopReason, WeightVersion
from tests.conformance.conftest import Models, generate, prompt, publish, request, slowly, until_sampled

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]


def submit(replica: VllmReplica, count: int, *, name: str, max_new_tokens: int = 400) -> list[asyncio.Task[Any]]:
    """Start `count` long requests."""
    ask = [request(f"{name}-{i}", prompt(20, seed=i), max_new_tokens=max_new_tokens) for i in range(count)]
    return slowly(replica, [generate(replica, r) for r in ask])


async def test_a_paused_replica_holds_new_requests_and_lets_running_ones_end(replica: VllmReplica):
    running = submit(replica, 2, name="running", max_new_tokens=40)
    await until_sampled(replica, 1)
    await replica.pause()
    held = submit(replica, 3, name="held", max_new_tokens=5)
    await replica.drain()
    assert [len(await task) for task in running] == [40, 40]
    done, _ = await asyncio.wait(held, timeout=0.3)
    assert not done
    assert (await replica.stats()).in_flight == 0
    await replica.resume()
    assert [len(await task) for task in held] == [5, 5, 5]


async def test_an_abort_before_the_engine_knows_a_request_still_ends_it(
    replica: VllmReplica, monkeypatch: pytest.MonkeyPatch
):
    admitted = asyncio.Event()
    add_request = replica.backend.engine.add_request

    async def add_late(*args: Any) -> Any:
        await admitted.wait()
        return await add_request(*args)

    monkeypatch.setattr(replica.backend.engine, "add_request", add_late)
    tasks = [asyncio.create_task(generate(replica, request(f"early-{i}", prompt(20, seed=i)))) for i in range(4)]
    await asyncio.sleep(0)
    aborted = asyncio.create_task(replica.abort())
    await asyncio.sleep(0)
    admitted.set()
    assert await aborted == 4
    assert all(s.stop_reason is StopReason.ABORT for s in await asyncio.gather(*tasks))


async def test_a_load_is_refused_while_serving_or_with_requests_in_flight(replica: VllmReplica, models: Models):
    with pytest.raises(EngineError, match="replica-0: load of version 1 while serving; call pause"):
        await replica.load(models.update_second)
    tasks = submit(replica, 2, name="busy")
    await until_sampled(replica, 1)
    await replica.pause()
    with pytest.raises(EngineError, match="load of version 1 with 2 requests in flight"):
        await replica.load(models.update_second)
    await replica.abort()
    await asyncio.gather(*tasks)
    assert await replica.load(models.update_second) == models.update_second.weights
    await replica.resume()


async def test_a_digest_that_is_not_the_published_one_is_refused_until_a_good_load(
    replica: VllmReplica, models: Models
):
    wrong = WeightUpdate(models.update_second.path, WeightVersion(7, "0" * 32))
    await replica.pause()
    with pytest.raises(EngineError) as caught:
        await replica.load(wrong)
    assert "0" * 32 in str(caught.value)
    assert models.update_second.weights.digest in str(caught.value)
    with pytest.raises(EngineError, match="cannot resume, its weights have digest"):
        await replica.resume()
    assert replica.weights == models.update_first.weights
    await replica.load(models.update_second)
    await replica.resume()
    assert replica.weights == models.update_second.weights


async def test_an_update_without_some_tensor_is_refused_and_changes_nothing(
    replica: VllmReplica, models: Models, tmp_path: Path
):
    tensors = [(name, t) for name, t in read_update(models.update_second.path) if "gate.weight" not in name]
    partial = write_update(tmp_path, version=9, tensors=tensors)
    await replica.pause()
    with pytest.raises(EngineError, match=r"lacks 3 tensors of the checkpoint \(model.layers.1.mlp.gate.weight"):
        await replica.load(partial)
    with pytest.raises(EngineError, match="cannot read version 3"):
        await replica.load(WeightUpdate(tmp_path / "absent.safetensors", WeightVersion(3, "")))
    await replica.resume()
    assert len(await generate(replica, request("still", prompt(10), max_new_tokens=3))) == 3


async def test_a_cancelled_caller_frees_its_place_and_disturbs_nobody(replica: VllmReplica):
    tasks = submit(replica, 6, name="cancel", max_new_tokens=60)
    await until_sampled(replica, 12)
    for task in tasks[:2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results[:2]] == [True, True]
    assert [len(r) for r in results[2:] if not isinstance(r, BaseException)] == [60] * 4
    assert (await replica.stats()).in_flight == 0
    assert replica.backend.engine.output_processor.get_num_unfinished_requests() == 0


async def test_a_caller_that_is_cancelled_at_the_gate_leaves_nothing_behind(replica: VllmReplica):
    await replica.pause()
    (held,) = submit(replica, 1, name="gate")
    await asyncio.sleep(0)
    held.cancel()
    await asyncio.wait([held])
    assert held.cancelled()
    await replica.resume()
    assert (await replica.stats()).in_flight == 0


async def test_a_request_that_takes_too_long_for_its_caller_is_aborted(replica: VllmReplica):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await submit(replica, 1, name="slow")[0]
    assert replica.backend.engine.output_processor.get_num_unfinished_requests() == 0
    assert len(await generate(replica, request("next", prompt(10), max_new_tokens=3))) == 3


async def test_a_request_that_cannot_be_served_names_what_is_wrong(replica: VllmReplica):
    bad = {
        r"max_new_tokens is 0": request("none", prompt(4), max_new_tokens=0),
        r"token_ids is empty": request("empty", prompt(0)),
        r"token_ids spans .*; the vocabulary has 117": request("vocabulary", prompt(4) + 200),
        r"existing_rows is 4 for 4 tokens": request("rows", prompt(4), existing_rows=4),
        r"failed: .*512": request("long", prompt(512)),
    }
    for message, ask in bad.items():
        with pytest.raises(EngineError, match=f"replica-0: request {ask.request_id}.*{message}"):
            await generate(replica, ask)
    running = submit(replica, 1, name="same")
    await until_sampled(replica, 1)
    with pytest.raises(EngineError, match="request same-0 is already in flight"):
        await submit(replica, 1, name="same")[0]
    await replica.abort()
    await running[0]


async def test_stats_count_partial_segments_and_busy_time(replica: VllmReplica, models: Models):
    before = await replica.stats()
    tasks = submit(replica, 3, name="stats")
    await until_sampled(replica, 9)
    assert (await replica.stats()).in_flight == 3
    await publish(replica, models.update_first)
    segments = [await task for task in tasks]
    after = await replica.stats()
    assert after.tokens_sampled - before.tokens_sampled == sum(len(s) for s in segments)
    assert after.busy_seconds > before.busy_seconds
    assert (await replica.stats()).busy_seconds == after.busy_seconds, "idle time is not busy time"


async def test_a_seeded_request_survives_a_chunked_prefill_and_repeats(replica: VllmReplica):
    from vllm import SamplingParams

    async def sample(name: str) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, detokenize=False)
        ask: Any = {"prompt_token_ids": prompt(250).tolist()}
        async for output in replica.backend.engine.generate(ask, params, request_id=name):
            last = output
        return list(last.outputs[0].token_ids), last.num_cached_tokens

    chunked, none_cached = await sample("seed-0")  # three chunks, so two samples are thrown away
    whole, all_cached = await sample("seed-1")
    assert (none_cached, all_cached) == (0, 224)
    assert chunked == whole, "samples that are thrown away do not advance the seed"
