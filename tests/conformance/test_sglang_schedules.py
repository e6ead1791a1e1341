"""Random schedules of decode, abort, retraction and update on a real SGLang server: rows stay what they were."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from async_rl.inference.sglang.engine import SglangReplica, start_sglang
from message_queue.tokens import StopReason, TokenOutput
from tests.conformance.reference import Reference, logprob_gap, reference, routing_mismatches
from tests.conformance.sglang_support import (
    Models,
    config,
    load_frozen,
    make_models,
    mixtral,
    prompt,
    publish,
    request,
    require_sglang,
)
from tests.helpers import numerics

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]

LENGTH = 150  # tokens that every trajectory samples
Answer = tuple[Any, int, list[TokenOutput]]  # tokens before it, rows held, segments


async def trajectory(replica: SglangReplica, number: int) -> list[Answer]:
    """Decode, resuming after every abort."""
    tokens, rows, left = prompt(15 + 9 * number, seed=number), 0, LENGTH
    answers: list[Answer] = []
    while left:
        ask = request(f"t{number}#{len(answers)}", tokens, max_new_tokens=left, existing_rows=rows)
        segments = await replica.generate(ask)
        sampled = [segment.token_ids for segment in segments]
        answers.append((tokens, rows, segments))
        tokens = np.concatenate([tokens, *sampled])
        left -= sum(map(len, sampled))
        rows = len(tokens) - 1 if any(map(len, sampled)) else rows
        assert left == 0 or segments[-1].stop_reason is StopReason.ABORT
    return answers


def agreeing(model: Any, tokens: Any, rows: Any, *, forced: Any) -> Reference:
    """The reference for `tokens` after the positions in `forced`; where its router is undecided it follows `rows`.

    Among 10,000 rows some scores are closer than two float32 implementations agree.
    """
    plan = np.full((len(rows), *rows.shape[1:]), -1, np.int64)
    plan[: len(forced)] = forced
    while True:
        expected = reference(model, tokens, forced=plan)
        differs = (np.sort(rows, -1) != expected.experts[: len(rows)]).any(-1)
        undecided = 2 * numerics.FACTOR * expected.score_errors.max()
        ties = differs & (expected.margins[: len(rows)] <= undecided)
        if not ties.any():
            return expected
        plan[ties] = rows[ties]


def check(models: Models, answer: Answer) -> int:
    """Every segment against the weights that sampled it; returns how many updates reached it in flight."""
    before, held, segments = answer
    tokens, forced = before, None
    for segment in filter(len, segments):
        start, tokens = len(tokens), np.concatenate([tokens, segment.token_ids])
        assert segment.routed_experts is not None
        model, given = models.models[segment.weights.version], segment.routed_experts
        if forced is None:  # rows that the caller held are those of the router, too
            forced = reference(model, tokens).experts[:held]
            rows = np.concatenate([forced, given.experts]).astype(np.int64)
            forced = forced[:0]
        else:
            rows = np.concatenate([forced, given.experts]).astype(np.int64)
        assert len(rows) == len(tokens) - 1
        expected = agreeing(model, tokens, rows, forced=forced)
        gap = logprob_gap(expected, tokens, segment.logprobs, start=start)
        assert gap <= 1
        assert routing_mismatches(expected, given.experts, start=given.first_position) == 0
        forced = rows
    return len(segments) - 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    require_sglang()
    return make_models(tmp_path_factory.mktemp("models"), mixtral())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(models: Models) -> AsyncIterator[SglangReplica]:
    started = await start_sglang(config(kv_cache_tokens=700), name="replica-0", checkpoint=models.paths[0])
    yield started
    await started.close()


@pytest.mark.parametrize("seed", [0, 1])
async def test_rows_and_logprobs_are_those_of_the_weights_that_sampled(
    replica: SglangReplica, models: Models, monkeypatch: pytest.MonkeyPatch, seed: int
):
    retractions: list[int] = []
    post = replica.backend.server.post

    async def spy(path: str, body: Any) -> Any:
        answer = await post(path, body)
        if path == "/generate":
            retractions.append(answer["meta_info"].get("num_retractions", 0))
        return answer

    monkeypatch.setattr(replica.backend.server, "post", spy)
    chance, version = random.Random(seed), 0
    await publish(replica, models.updates[0])
    tasks = [asyncio.create_task(trajectory(replica, i)) for i in range(10)]
    updates = 0
    while (await asyncio.wait(tasks, timeout=chance.uniform(0.1, 0.5)))[1]:
        updates += 1
        if chance.random() < 0.3:
            await replica.abort()
            continue
        version = 1 - version
        if chance.random() < 0.3:
            await publish(replica, models.updates[version])
        else:
            await load_frozen(replica, models.updates[version], "recompute")
    answers = [answer for task in tasks for answer in await task]
    reached = sum(check(models, answer) for answer in answers)
    assert sum(len(s) for _, _, segments in answers for s in segments) == 10 * LENGTH
    assert updates > 2
    assert reached + sum(retractions) > 0, "some were reached by an update or retracted in flight"
