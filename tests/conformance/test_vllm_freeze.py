"""Aborts, cancels, further loads and refusals while requests are frozen inside a real vLLM replica."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from agent_loop.engine import EngineError
from async_rl.inference.replica import KVPolicy
from async_rl.inference.vllm.engine import VllmReplica
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import StopReason, WeightVersion
from tests.conformance.conftest import Models, generate, prompt, request, until_sampled
from tests.conformance.updates import KINDS, freeze, gap_of, several, start

pytestmark = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("loads", [0, 1, 2])
@pytest.mark.parametrize("kv", KINDS)
async def test_an_abort_during_a_freeze_ends_everything_as_it_is(
    replica: VllmReplica, models: Models, kv: KVPolicy, loads: int
):
    asks = several(f"abort-{kv}-{loads}", 4, tokens=200)
    tasks = start(replica, asks)
    await until_sampled(replica, 40, requests=len(asks))
    assert await freeze(replica) == 4
    for update in (models.update_second, models.update_first)[:loads]:
        await replica.load(update, kv=kv)
    assert await replica.abort() == 4
    for ask, task in zip(asks, tasks, strict=True):
        [segment] = await task
        assert segment.stop_reason is StopReason.ABORT
        assert segment.weights == models.update_first.weights
        assert gap_of(models, ask, [segment], []) <= 1
    assert (await replica.stats()).in_flight == 0
    await replica.load(models.update_second)
    await replica.resume()
    after = await generate(replica, request(f"after-{kv}-{loads}", prompt(30)))
    assert gap_of(models, request("", prompt(30)), [after], []) <= 1


@pytest.mark.parametrize("kv", KINDS)
async def test_a_second_load_during_one_freeze_is_the_one_that_samples(
    replica: VllmReplica, models: Models, kv: KVPolicy
):
    asks = several(f"twice-{kv}", 3)
    tasks = start(replica, asks)
    await until_sampled(replica, 30, requests=len(asks))
    assert await freeze(replica) == 3
    await replica.load(models.update_first, kv=kv)
    await replica.load(models.update_second, kv=kv)
    await replica.resume()
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert [s.weights.version for s in segments] == [0, 1]
        assert gap_of(models, ask, segments, [kv]) <= 1


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_caller_that_is_cancelled_during_a_freeze_leaves_nothing_behind(
    replica: VllmReplica, models: Models, loaded: bool
):
    asks = several(f"cancel-{loaded}", 4)
    tasks = start(replica, asks)
    await until_sampled(replica, 30, requests=len(asks))
    assert await freeze(replica) == 4
    if loaded:
        await replica.load(models.update_second)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert (await replica.stats()).in_flight == 2
    if not loaded:
        await replica.load(models.update_second)
    await replica.resume()
    for ask, task in zip(asks[2:], tasks[2:], strict=True):
        assert gap_of(models, ask, await task, ["recompute"]) <= 1
    assert all(task.cancelled() for task in tasks[:2])
    assert replica.backend.engine.output_processor.get_num_unfinished_requests() == 0


async def test_without_a_load_a_frozen_request_goes_on_as_one_segment(replica: VllmReplica, models: Models):
    asks = several("thaw", 3)
    tasks = start(replica, asks)
    await until_sampled(replica, 30, requests=len(asks))
    assert await freeze(replica) == 3
    assert await replica.freeze() == 3, "a freeze of what is frozen changes nothing"
    done, _ = await asyncio.wait(tasks, timeout=0.3)
    assert not done
    held = start(replica, [request("held", prompt(10), max_new_tokens=3)])
    await replica.resume()
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert len(segments) == 1
        assert gap_of(models, ask, segments, []) <= 1
    assert [len(s) for s in await held[0]] == [3]


async def test_control_calls_that_do_not_fit_a_freeze_are_refused(replica: VllmReplica, models: Models, tmp_path: Path):
    asks = several("refused", 2)
    tasks = start(replica, asks)
    await until_sampled(replica, 20, requests=len(asks))
    with pytest.raises(EngineError, match="replica-0: freeze while serving; call pause"):
        await replica.freeze()
    assert await freeze(replica) == 2
    with pytest.raises(EngineError, match="drain with 2 frozen requests; call resume or abort first"):
        await replica.drain()
    with pytest.raises(EngineError, match="cannot read version 3"):
        await replica.load(WeightUpdate(tmp_path / "absent.safetensors", WeightVersion(3, "")))
    with pytest.raises(EngineError, match="was published with digest"):
        await replica.load(WeightUpdate(models.update_second.path, WeightVersion(7, "0" * 32)), kv="keep")
    with pytest.raises(EngineError, match="cannot resume, its weights have digest"):
        await replica.resume()
    await replica.load(models.update_second, kv="keep")
    await replica.resume()
    for ask, task in zip(asks, tasks, strict=True):
        segments = await task
        assert [s.weights.version for s in segments] == [0, 1]
        assert gap_of(models, ask, segments, ["keep"]) <= 1


async def test_where_no_router_can_be_forced_kv_is_kept_but_not_computed_again(
    replica: VllmReplica, models: Models, monkeypatch: pytest.MonkeyPatch
):
    unforcible = dataclasses.replace(replica.backend._model, unforcible="the model family is granitemoe")
    asks = several("unforcible", 2)
    tasks = start(replica, asks)
    await until_sampled(replica, 20, requests=len(asks))
    assert await freeze(replica) == 2
    with monkeypatch.context() as patch:
        patch.setattr(replica.backend, "_model", unforcible)
        with pytest.raises(EngineError, match=r"recorded, because the model family is granitemoe; use rollout.kv=keep"):
            await replica.load(models.update_second, kv="recompute")
        await replica.load(models.update_second, kv="keep")
    await replica.resume()
    for ask, task in zip(asks, tasks, strict=True):
        assert gap_of(models, ask, await task, ["keep"]) <= 1
