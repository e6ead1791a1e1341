"""bfloat16: distance of each engine from a float32 forward of the same rounded weights, reported and bounded.

Exact agreement is impossible: two orders of summation give other roundings, and near a tie other experts. The fake
computes nothing, so it is not here.
"""

import asyncio
import dataclasses
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
import torch

from async_rl.inference.sglang.engine import start_sglang
from tests.conformance import sglang_support
from tests.conformance.checks import assert_sent_once, versions_of, whole
from tests.conformance.conftest import sglang_environment
from tests.conformance.engines import prompts
from tests.conformance.served import VLLM, plant, start_vllm, under_test
from tests.conformance.test_planted_loads import accepted

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]

MEAN_GAP, SAME_EXPERTS = 0.1, 0.8  # a wrong row, token or model is beyond both


def rounded(model):
    """A copy with its parameters rounded to bfloat16, computed in float32."""
    copy = type(model)(model.config)
    copy.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    return copy.to(torch.float32).eval()


@pytest_asyncio.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)], loop_scope="package")
async def half(request, monkeypatch):
    """An engine in bfloat16, whose reference has the rounded weights."""
    models = request.getfixturevalue("models" if request.param == "vllm" else "sglang_models")
    start = {"name": "half-0", "checkpoint": models.paths[0]}
    if request.param == "vllm":
        request.getfixturevalue("environment")
        replica = await start_vllm(dataclasses.replace(VLLM, dtype="bfloat16"), **start)
    else:
        with sglang_environment(request.getfixturevalue("sglang_plugins")):
            replica = await start_sglang(sglang_support.config(dtype="bfloat16"), **start)
    rounded_models = dataclasses.replace(models, models=tuple(map(rounded, models.models)))
    tested = under_test(replica, rounded_models, patch=monkeypatch)
    await tested.publish(version=0)
    yield tested
    await tested.end()
    await replica.close()


async def test_bfloat16_agrees_nearly_over_an_update(half, report):
    """Prompts of one prefill step, so that all have sampled when the update comes."""
    rollouts, tasks = half.start_rollouts(prompts(4, step=2), max_new_tokens=120, cache_salt="v0")
    await half.until_sampled(80)
    assert (await half.publish("resume")).aborted == 4
    await asyncio.gather(*tasks)
    for rollout in rollouts:
        assert [versions_of(exchange) for exchange in half.of_session(rollout.name)] == [[0], [1]]
        assert_sent_once(half, rollout.name, rollout.trajectory)
    gaps, same = zip(*(differences(half, exchange) for exchange in half.exchanges), strict=True)
    gap, agreed = np.concatenate(gaps), float(np.concatenate(same).mean())
    report(
        f"{type(half.replica).__name__} in bfloat16, {len(gap)} tokens: |dlogp| mean {gap.mean():.2e}, max "
        f"{gap.max():.2e}; {agreed:.1%} of the expert sets agree"
    )
    assert gap.mean() <= MEAN_GAP
    assert agreed >= SAME_EXPERTS


async def test_a_load_that_left_or_misplaced_a_single_parameter_or_expert_is_refused(half, sglang_plugins, tmp_path):
    for version in (1, 0):
        await half.publish(version=version)
    assert await accepted(half, partial(plant, half, sglang_plugins), tmp_path) == []


def differences(half, exchange):
    """|dlogp| of each token, and whether each expert set is the same, of an answer of one segment."""
    [segment], ids = exchange.answer, whole(exchange)
    version, rows = segment.weights.version, segment.routed_experts
    free = half.truth([(version, len(ids))], ids, forced=None)
    at = np.arange(len(exchange.request.token_ids), len(ids))
    gaps = np.abs(free.logprobs[at - 1, ids[at]] - segment.logprobs)
    chosen = np.sort(rows.experts.astype(np.int64), -1)
    return gaps, (chosen == free.experts[rows.first_position : rows.end_position]).all(-1).ravel()
