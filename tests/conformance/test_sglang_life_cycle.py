"""Pause, abort, drain, freeze, load, resume, cancel and time-outs of a real SGLang replica."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from agent_loop.engine import EngineError
from async_rl.inference.sglang.engine import SglangReplica, start_sglang
from async_rl.weights.transport import WeightUpdate, read_update, write_update
from message_queue.tokens import StopReason, WeightVersion
from tests.conformance.sglang_support import (
    Models,
    assert_agrees,
    config,
    generate,
    idle,
    load_frozen,
    make_models,
    prompt,
    publish,
    qwen3_moe,
    request,
    require_sglang,
    until_used,
)

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    require_sglang()
    return make_models(tmp_path_factory.mktemp("models"), qwen3_moe())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(models: Models) -> AsyncIterator[SglangReplica]:
    replica = await start_sglang(
        config(kv_cache_tokens=4096, max_num_seqs=8), name="replica-0", checkpoint=models.paths[0]
    )
    yield replica
    await replica.close()


@pytest_asyncio.fixture(loop_scope="module")
async def replica(server: SglangReplica, models: Models) -> SglangReplica:
    """The server, serving the first weights with an empty prefix cache."""
    await publish(server, models.updates[0])
    return server


LONG = 480  # tokens: seconds of decoding, so that what is called in flight still is when the call arrives


def submit(replica: SglangReplica, count: int, *, name: str, max_new_tokens: int = LONG) -> list[asyncio.Task[Any]]:
    """Start `count` requests, long ones unless told otherwise."""
    asks = [request(f"{name}-{i}", prompt(20, seed=i), max_new_tokens=max_new_tokens) for i in range(count)]
    return [asyncio.create_task(generate(replica, ask)) for ask in asks]


async def test_a_paused_replica_holds_new_requests_and_lets_running_ones_end(replica: SglangReplica):
    running = submit(replica, 2, name="running")
    await until_used(replica, 40, running)
    await replica.pause()
    held = submit(replica, 3, name="held", max_new_tokens=5)
    await replica.drain()
    assert [len(await task) for task in running] == [LONG, LONG]
    done, _ = await asyncio.wait(held, timeout=0.3)
    assert not done
    assert (await replica.stats()).in_flight == 0
    await replica.resume()
    assert [len(await task) for task in held] == [5, 5, 5]


async def test_an_abort_returns_every_partial_segment_running_and_waiting(replica: SglangReplica, models: Models):
    tasks = submit(replica, 40, name="abort")  # more than the 8 that run at once
    await until_used(replica, 200, tasks)
    assert await replica.abort() == 40
    segments = await asyncio.gather(*tasks)
    assert {s.stop_reason for s in segments} == {StopReason.ABORT}
    started = [(i, s) for i, s in enumerate(segments) if len(s)]
    waiting = [s for s in segments if not len(s)]
    assert started
    assert waiting, "some were still waiting for a place in the batch"
    assert all(s.routed_experts is None and s.weights == models.updates[0].weights for s in waiting)
    for i, segment in started:
        assert_agrees(models.models[0], prompt(20, seed=i), segment)
    assert await replica.abort() == 0


async def test_an_abort_before_the_server_knows_a_request_still_ends_it(
    replica: SglangReplica, monkeypatch: pytest.MonkeyPatch
):
    send = asyncio.Event()
    post = replica.backend.server.post

    async def post_late(path: str, body: Any) -> Any:
        if path == "/generate":
            await send.wait()
        return await post(path, body)

    monkeypatch.setattr(replica.backend.server, "post", post_late)
    tasks = submit(replica, 4, name="early")
    await asyncio.sleep(0)
    aborted = asyncio.create_task(replica.abort())
    await asyncio.sleep(0.1)
    send.set()
    assert await aborted == 4
    assert all(s.stop_reason is StopReason.ABORT for s in await asyncio.gather(*tasks))


async def test_two_aborts_at_once_and_one_after_the_end_do_no_harm(replica: SglangReplica):
    tasks = submit(replica, 4, name="twice")
    await until_used(replica, 90, tasks)
    assert set(await asyncio.gather(replica.abort(), replica.abort())) == {4}
    assert all(len(s) for s in await asyncio.gather(*tasks))
    await asyncio.gather(*submit(replica, 2, name="ended", max_new_tokens=2))
    assert await replica.abort() == 0


async def test_a_resume_at_every_position_of_a_short_sequence_agrees(replica: SglangReplica, models: Models):
    whole = await generate(replica, request("whole", prompt(6), max_new_tokens=6))
    assert whole.routed_experts is not None
    tokens = [*prompt(6), *whole.token_ids]
    for length in range(1, 12):
        so_far = np.array(tokens[:length], np.int32)
        for held in {0, length // 2, length - 1}:
            ask = request(f"at-{length}-{held}", so_far, max_new_tokens=3, existing_rows=held)
            assert_agrees(models.models[0], so_far, await generate(replica, ask))


async def test_a_load_is_refused_while_serving_or_with_requests_in_flight(replica: SglangReplica, models: Models):
    with pytest.raises(EngineError, match="replica-0: load of version 1 while serving; call pause"):
        await replica.load(models.updates[1])
    tasks = submit(replica, 2, name="busy")
    await until_used(replica, 40, tasks)
    await replica.pause()
    with pytest.raises(EngineError, match="load of version 1 with 2 requests in flight"):
        await replica.load(models.updates[1])
    await replica.abort()
    await asyncio.gather(*tasks)
    assert await replica.load(models.updates[1]) == models.updates[1].weights
    await replica.resume()


async def test_a_freeze_needs_a_pause_and_what_is_frozen_neither_moves_nor_drains(
    replica: SglangReplica, models: Models
):
    with pytest.raises(EngineError, match="freeze while serving"):
        await replica.freeze()
    tasks = submit(replica, 12, name="frozen")
    await until_used(replica, 200, tasks)
    await replica.pause()
    assert await replica.freeze() == await replica.freeze() == 12
    with pytest.raises(EngineError, match="drain with 12 frozen requests"):
        await replica.drain()
    done, _ = await asyncio.wait(tasks, timeout=0.5)
    assert not done
    await replica.resume()
    assert [len(s) for s in await asyncio.gather(*tasks)] == [LONG] * 12


async def test_an_abort_of_frozen_requests_returns_what_they_have(replica: SglangReplica, models: Models):
    tasks = submit(replica, 12, name="thaw")
    await until_used(replica, 200, tasks)
    await replica.pause()
    await replica.freeze()
    assert await replica.abort() == 12
    segments = await asyncio.gather(*tasks)
    assert {s.stop_reason for s in segments} == {StopReason.ABORT}
    for i, segment in enumerate(segments):
        if len(segment):
            assert_agrees(models.models[0], prompt(20, seed=i), segment)
    await replica.load(models.updates[1])
    await replica.resume()
    after = await generate(replica, request("after", prompt(20)))
    assert_agrees(models.models[1], prompt(20), after)


async def test_a_frozen_load_with_nothing_in_flight_is_a_load(replica: SglangReplica, models: Models):
    for version, kv in ((1, "keep"), (0, "recompute")):
        assert await load_frozen(replica, models.updates[version], kv) == 0
        segment = await generate(replica, request(kv, prompt(30), cache_salt=kv))
        assert_agrees(models.models[version], prompt(30), segment)


async def test_a_digest_that_is_not_the_published_one_is_refused_until_a_good_load(
    replica: SglangReplica, models: Models
):
    frozen = submit(replica, 2, name="suspect")
    await until_used(replica, 60, frozen)
    await replica.pause()
    await replica.freeze()
    wrong = WeightUpdate(models.updates[1].path, WeightVersion(7, "0" * 32))
    with pytest.raises(EngineError) as caught:
        await replica.load(wrong, kv="keep")
    assert "0" * 32 in str(caught.value)
    assert models.updates[1].weights.digest in str(caught.value)
    with pytest.raises(EngineError, match="cannot resume, its weights have digest"):
        await replica.resume()
    assert replica.weights == models.updates[0].weights
    assert await replica.abort() == 2, "what was frozen is returned as it was before"
    for i, task in enumerate(frozen):
        assert_agrees(models.models[0], prompt(20, seed=i), await task)
    await replica.load(models.updates[1])
    await replica.resume()
    assert replica.weights == models.updates[1].weights


async def test_an_update_that_is_not_tensor_for_tensor_of_the_checkpoint_changes_nothing(
    replica: SglangReplica, models: Models, tmp_path: Path
):
    tensors = dict(read_update(models.updates[1].path))
    gate = "model.layers.1.mlp.gate.weight"
    bad = {
        rf"lacks 1 tensors of the checkpoint \({gate}": {k: v for k, v in tensors.items() if k != gate},
        r"1 tensors.*\(fused": {**tensors, "fused": tensors[gate].clone()},
        rf"has {gate} of shape \[8, 64\]; the checkpoint has \[8, 128\]": {**tensors, gate: tensors[gate][:, :64]},
    }
    await replica.pause()
    for version, (message, given) in enumerate(bad.items()):
        update = write_update(tmp_path, version=version + 3, tensors=given.items())
        with pytest.raises(EngineError, match=f"replica-0: version {version + 3} in .* {message}"):
            await replica.load(update)
    with pytest.raises(EngineError, match="cannot read version 9"):
        await replica.load(WeightUpdate(tmp_path / "absent.safetensors", WeightVersion(9, "")))
    await replica.resume()
    assert_agrees(models.models[0], prompt(10), await generate(replica, request("still", prompt(10))))


async def test_a_cancelled_caller_frees_its_place_and_disturbs_nobody(replica: SglangReplica):
    tasks = submit(replica, 6, name="cancel")
    await until_used(replica, 150, tasks)
    for task in tasks[:2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results[:2]] == [True, True]
    assert [len(r) for r in results[2:] if not isinstance(r, BaseException)] == [LONG] * 4
    assert (await replica.stats()).in_flight == 0
    assert await idle(replica)


async def test_a_request_that_takes_too_long_for_its_caller_is_aborted(replica: SglangReplica):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await submit(replica, 1, name="slow")[0]
    assert await idle(replica)
    assert len(await generate(replica, request("next", prompt(10), max_new_tokens=3))) == 3


async def test_a_request_that_cannot_be_served_is_refused_before_it_is_sent(replica: SglangReplica):
    bad = {
        r"max_new_tokens is 0": request("none", prompt(4), max_new_tokens=0),
        r"token_ids is empty": request("empty", prompt(0)),
        r"token_ids spans .*; the vocabulary has 117": request("vocabulary", prompt(4) + 200),
        r"existing_rows is 4 for 4 tokens": request("rows", prompt(4), existing_rows=4),
        r"together more than engine.max_model_len=512": request("long", prompt(500), max_new_tokens=13),
    }
    for message, ask in bad.items():
        with pytest.raises(EngineError, match=f"replica-0: request {ask.request_id}.*{message}"):
            await generate(replica, ask)
    full = await generate(replica, request("full", prompt(500), max_new_tokens=12))
    assert (len(full), full.stop_reason) == (12, StopReason.LENGTH)
    most = await generate(replica, request("most", prompt(511), max_new_tokens=1))
    assert len(most) == 1


async def test_an_id_that_is_in_flight_or_a_prefix_of_one_is_refused(replica: SglangReplica):
    running = submit(replica, 3, name="same")
    await until_used(replica, 60, running)
    with pytest.raises(EngineError, match=r"request same-0\. is already in flight"):
        await submit(replica, 1, name="same")[0]
    for name in ("same-1.more", "same-", "s"):
        ask = dataclasses.replace(request("x", prompt(4)), request_id=name)
        with pytest.raises(EngineError, match=r"request ids .* prefix of the other"):
            await generate(replica, ask)
    await replica.abort()
    await asyncio.gather(*running)


async def test_stats_count_partial_segments_and_busy_time(replica: SglangReplica, models: Models):
    before = await replica.stats()
    tasks = submit(replica, 3, name="stats")
    await until_used(replica, 80, tasks)
    assert (await replica.stats()).in_flight == 3
    await publish(replica, models.updates[0])
    segments = [await task for task in tasks]
    after = await replica.stats()
    assert after.tokens_sampled - before.tokens_sampled == sum(len(s) for s in segments)
    assert after.busy_seconds > before.busy_seconds
    assert (await replica.stats()).busy_seconds == after.busy_seconds, "idle time is not busy time"
