"""Freezes, loads, refusals and cancellations of vLLM and SGLang; tests/async_rl/inference has those of the gate."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from async_rl.weights.transport import WeightUpdate, read_tensors, update_files
from message_queue.errors import EngineError
from message_queue.tokens import StopReason, WeightVersion
from tests.conformance.checks import assert_serves, assert_whole, sampled_of, versions_of
from tests.conformance.engines import MARKS, WITH_KV, prompts, tokens
from tests.conformance.probes import SglangProbe
from tests.helpers.updates import read_update, write_update

pytestmark = [*MARKS, WITH_KV]
GATE = "model.layers.1.mlp.gate.weight"


async def frozen(tested, count=4):
    """Trajectories that have all sampled something and are frozen."""
    rollouts, tasks = tested.start_rollouts(prompts(count, step=17), max_new_tokens=80, cache_salt="v0")
    await tested.until_sampled(40)
    for refused in (tested.replica.freeze(), tested.load(1)):  # while serving
        with pytest.raises(EngineError):
            await refused
    await tested.replica.pause()
    with pytest.raises(EngineError, match="version 1"):
        await tested.load(1)  # while requests run
    assert await tested.freeze() == await tested.replica.freeze() == count
    return rollouts, tasks


async def test_frozen_requests_wait_and_continue_as_one_segment(tested):
    rollouts, tasks = await frozen(tested)
    with pytest.raises(EngineError):
        await tested.replica.drain()
    held, [last] = tested.start_rollouts([tokens(10)], name="held", max_new_tokens=3)
    done, _ = await asyncio.wait([*tasks, last], timeout=0.3)
    assert not done
    await tested.resume()
    await asyncio.gather(*tasks, last)
    assert [versions_of(exchange) for exchange in tested.exchanges] == [[0]] * 5
    assert_whole(tested, *rollouts, *held)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_the_last_of_two_loads_during_a_freeze_samples(tested, kv):
    rollouts, tasks = await frozen(tested)
    await tested.load(2, kv=kv)
    await tested.load(1, kv=kv)
    await tested.resume()
    await asyncio.gather(*tasks)
    assert [versions_of(exchange) for exchange in tested.exchanges] == [[0, 1]] * 4
    assert_whole(tested, *rollouts)


@pytest.mark.parametrize(("loads", "kv"), [(0, "keep"), (1, "keep"), (1, "recompute"), (2, "recompute")])
async def test_an_abort_during_a_freeze_returns_the_tokens_so_far(tested, loads, kv):
    rollouts, tasks = await frozen(tested)
    for version in (1, 2)[:loads]:
        await tested.load(version, kv=kv)
    assert await tested.replica.abort() == 4
    while len(tested.exchanges) < 4:  # noqa: ASYNC110 - an answer sets no event
        await asyncio.sleep(0)
    assert [versions_of(exchange) for exchange in tested.exchanges] == [[0]] * 4
    assert {exchange.answer[-1].stop_reason for exchange in tested.exchanges} == {StopReason.ABORT}
    assert (await tested.replica.stats()).in_flight == 0
    await tested.load(3)
    await tested.resume()
    await asyncio.gather(*tasks)
    assert {rollout.trajectory.num_sampled for rollout in rollouts} == {80}
    assert_whole(tested, *rollouts)


@pytest.mark.parametrize("moment", ["running", "frozen", "loaded"])
async def test_a_cancelled_caller_frees_its_place_and_disturbs_no_other(tested, moment):
    if moment == "running":
        rollouts, tasks = tested.start_rollouts(prompts(4, step=17), max_new_tokens=80)
        await tested.until_sampled(12)
    else:
        rollouts, tasks = await frozen(tested)
    if moment == "loaded":
        await tested.load(1)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert all(task.cancelled() for task in tasks[:2])
    assert (await tested.replica.stats()).in_flight == 2
    if moment == "frozen":
        await tested.load(1)
    if moment != "running":
        await tested.resume()
    await asyncio.gather(*tasks[2:])
    assert_whole(tested, *rollouts[2:])
    _, [last] = tested.start_rollouts([tokens(20)], name="last", max_new_tokens=400)
    await tested.until_sampled(1)
    last.cancel()
    await asyncio.wait([last])
    assert await tested.probe.idle(), "long before 400 tokens"


async def test_an_abort_ends_requests_that_the_engine_does_not_know_yet(tested, monkeypatch):
    sent, backend = asyncio.Event(), tested.replica.backend
    on_sglang = isinstance(tested.probe, SglangProbe)
    target, name = (backend.server, "post") if on_sglang else (backend.engine, "add_request")
    call = getattr(target, name)

    async def late(*args):
        if not on_sglang or args[0] == "/generate":
            await sent.wait()
        return await call(*args)

    monkeypatch.setattr(target, name, late)
    rollouts, tasks = tested.start_rollouts(prompts(4), max_new_tokens=40)
    while (await tested.replica.stats()).in_flight < 4:  # noqa: ASYNC110 - a replica has no event for it
        await asyncio.sleep(0)
    aborted = asyncio.create_task(tested.replica.abort())
    await asyncio.sleep(0.1)
    sent.set()
    assert await aborted == 4
    assert {exchange.answer[-1].stop_reason for exchange in tested.exchanges[:4]} == {StopReason.ABORT}
    await asyncio.gather(*tasks)
    assert_whole(tested, *rollouts)


async def test_another_digest_than_the_published_one_is_refused_until_a_good_load(tested):
    rollouts, tasks = await frozen(tested)
    good = tested.update(1)
    other = replace(good, weights=WeightVersion(7, "0" * 32), buckets=(*good.buckets[:-1], "0" * 32))
    with pytest.raises(EngineError) as caught:
        await tested.replica.load(other, kv="keep")
    assert "0" * 32 in str(caught.value) and good.buckets[-1] in str(caught.value)
    with pytest.raises(EngineError):
        await tested.replica.resume()
    assert tested.replica.weights == tested.update(0).weights
    await tested.load(1, kv="keep")
    await tested.resume()
    await asyncio.gather(*tasks)
    assert [versions_of(exchange) for exchange in tested.exchanges] == [[0, 1]] * 4
    assert_whole(tested, *rollouts)


async def test_an_update_without_the_tensors_of_the_checkpoint_changes_nothing(tested, tmp_path):
    tensors = dict(read_update(tested.update(1).path))
    bad = {GATE: {name: tensor for name, tensor in tensors.items() if name != GATE}}
    if isinstance(tested.probe, SglangProbe):  # vLLM takes further tensors, and checks shapes as it loads
        bad |= {
            "fused": {**tensors, "fused": tensors[GATE].clone()},
            r"\[8, 64\]": tensors | {GATE: tensors[GATE][:, :64]},
        }
    await tested.replica.pause()
    for version, (named, given) in enumerate(bad.items(), start=3):
        with pytest.raises(EngineError, match=rf"version {version} .*{named}"):
            await tested.replica.load(write_update(tmp_path, version=version, tensors=given.items()))
    with pytest.raises(EngineError, match="version 9"):
        await tested.replica.load(WeightUpdate(tmp_path / "absent.safetensors", WeightVersion(9, "")))
    await tested.replica.resume()
    await assert_serves(tested, 0)


def two_swapped(tensors):
    first, second = next((a, b) for a, b in itertools.combinations(tensors, 2) if tensors[a].shape == tensors[b].shape)
    return tensors | {first: tensors[second], second: tensors[first]}


FAULTS = {
    "truncated": lambda file, tensors, other: file.write_bytes(file.read_bytes()[:-1]),
    "stale": lambda file, tensors, other: file.write_bytes((other / file.name).read_bytes()),
    "other_dtype": lambda file, tensors, other: save_file({name: t.bfloat16() for name, t in tensors.items()}, file),
    "two_swapped": lambda file, tensors, other: save_file(two_swapped(tensors), file),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_damaged_bucket_is_named_and_no_token_is_served_by_it(tested, tmp_path, fault):
    versions = [
        write_update(tmp_path, version=v, tensors=read_update(tested.update(v % 2).path), bucket_bytes=256 << 10)
        for v in (2, 3)
    ]
    file = update_files(versions[1].path)[1]
    FAULTS[fault](file, dict(read_tensors(file)), versions[0].path)
    await tested.replica.pause()
    with pytest.raises(EngineError, match=file.stem):
        await tested.replica.load(versions[1])
    if fault != "truncated":  # seen before the load
        with pytest.raises(EngineError):
            await tested.replica.resume()
    await tested.load(1)
    await tested.resume()
    await assert_serves(tested, 1)


async def test_requests_that_cannot_be_served_name_replica_and_request(tested):
    with pytest.raises(EngineError, match=r"replica-0: request held\..*existing_rows"):
        await tested.ask("held", tokens(4), existing_rows=4)
    with pytest.raises(EngineError, match=r"replica-0: request long\..*512"):
        await tested.ask("long", tokens(512), max_new_tokens=1)
    assert sampled_of(await tested.ask("full", tokens(500), max_new_tokens=12)) == 12
    running = tested.start(tested.ask("same", tokens(10), max_new_tokens=60))
    await tested.until_sampled(1)
    with pytest.raises(EngineError, match="same"):
        await tested.ask("same", tokens(10))
    await running
