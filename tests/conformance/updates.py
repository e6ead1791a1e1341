"""New weights under running requests, and what each token must then be, whatever became of the K/V.

Ground truth is transformers with the K/V that the engine really had: left by the weights before (kept), or computed
again by the new weights under the recorded experts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.inference.replica import KVPolicy
from async_rl.inference.vllm.engine import VllmReplica
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import RoutedExperts, TokenOutput
from tests.conformance.conftest import Models, prompt, request, slowly
from tests.conformance.reference import (
    gap_with_rows,
    logprob_gaps,
    reference,
    reference_of_parts,
    settled_rows,
)

KINDS: list[KVPolicy] = ["keep", "recompute"]


async def freeze(replica: VllmReplica) -> int:
    await replica.pause()
    return await replica.freeze()


async def update_frozen(replica: VllmReplica, update: WeightUpdate, kv: KVPolicy) -> int:
    """Pause, freeze, load, resume; returns how many requests were frozen."""
    frozen = await freeze(replica)
    await replica.load(update, kv=kv)
    await replica.resume()
    return frozen


def start(replica: VllmReplica, asks: Sequence[GenerateRequest]) -> list[asyncio.Task[list[TokenOutput]]]:
    """Tasks of requests to an engine that is slow until it resumes."""
    return slowly(replica, [replica.generate(ask) for ask in asks])


def several(name: str, count: int, *, length: int = 20, step: int = 17, tokens: int = 60) -> list[GenerateRequest]:
    return [request(f"{name}-{i}", prompt(length + step * i, seed=i), max_new_tokens=tokens) for i in range(count)]


def gap_of(
    models: Models,
    ask: GenerateRequest,
    segments: list[TokenOutput],
    kvs: Sequence[KVPolicy],
    *,
    old_prefill: int = 0,
    strict: bool = False,
) -> float:
    """Largest |dlogp| of any token against its own version, over its bound; infinite where a row differs.

    kvs: how the load before each further segment treated the K/V. old_prefill: positions that weights 0 forwarded
    before an update under the prefill of a request that weights 1 sampled alone. strict: a numerical tie that was
    decided the other way differs too, where it otherwise ends the comparison.
    """
    gaps = [
        gaps_of_segment(models, ask, segments, kvs, at=at, old_prefill=old_prefill, strict=strict)
        for at in range(len(segments))
    ]
    return float(np.concatenate(gaps).max())


def gaps_of_segment(
    models: Models,
    ask: GenerateRequest,
    segments: list[TokenOutput],
    kvs: Sequence[KVPolicy],
    *,
    at: int,
    old_prefill: int = 0,
    strict: bool = False,
) -> np.ndarray[Any, Any]:
    """|dlogp| of the tokens of segment `at` over its bound; infinite if the row of a token, or one before, differs."""
    by_version = [models.reference_first, models.reference_second]
    starts = np.cumsum([len(ask.token_ids), *(len(s) for s in segments)]).tolist()
    held = np.concatenate([ask.token_ids, *(s.token_ids for s in segments[: at + 1])])
    rows = np.concatenate([s.routed_experts.experts for s in segments[: at + 1] if s.routed_experts is not None])
    assert len(rows) == len(held) - 1
    first = max([j for j in range(1, at + 1) if kvs[j - 1] == "recompute"], default=0)
    ends = [starts[j + 1] - 1 for j in range(first, at)] + [starts[at + 1]]
    parts = [(by_version[s.weights.version], end) for s, end in zip(segments[first : at + 1], ends, strict=True)]
    forced = rows[: starts[first] - 1] if first else None
    expected = reference_of_parts([(by_version[0], old_prefill), *parts], held, forced=forced)
    gaps = logprob_gaps(expected, held, segments[at].logprobs, start=starts[at])
    settled = len(rows) if strict else settled_rows(expected, rows, start=0)
    gaps[max(0, settled + 1 - starts[at]) :] = 0.0
    differs = (np.sort(rows[:settled], -1) != expected.experts[:settled]).any((1, 2))
    row_start = starts[at] - 1 if at else 0
    for row in row_start + np.flatnonzero(differs[row_start:]):
        gaps[max(0, int(row) + 1 - starts[at])] = np.inf
    return gaps


def whole_gap(models: Models, ask: GenerateRequest, segments: list[TokenOutput]) -> tuple[float, int]:
    """`gap_of` a request that one version sampled alone, and how many of its rows are of weights 0 nevertheless.

    A chunk of a prefill ends where the budget of a step does, and other requests take from it: the rows tell where.
    """
    [segment] = segments
    if segment.weights.version == 0:
        return gap_of(models, ask, segments, []), 0
    assert segment.routed_experts is not None
    old = reference(models.reference_first, ask.token_ids).experts
    differs = (np.sort(segment.routed_experts.experts[: len(old)], -1) != old).any((1, 2))
    last = int(np.argmax(differs)) if differs.any() else len(old) - 1
    for old_prefill in range(last, -1, -1):
        gap = gap_of(models, ask, segments, [], old_prefill=old_prefill)
        if gap <= 1:
            return gap, old_prefill
    return np.inf, 0


def gap_after_preemption(models: Models, ask: GenerateRequest, segments: list[TokenOutput], lost: int) -> float:
    """|dlogp| over its bound of the second segment from its token `lost` on, if some blocks of K/V were left.

    The K/V was then computed again by the second weights, and all rows recorded until then were forced.
    """
    tokens = np.concatenate([ask.token_ids, *(s.token_ids for s in segments)])
    rows = np.concatenate([s.routed_experts.experts for s in segments if s.routed_experts is not None])
    second = len(tokens) - len(segments[1])
    gaps: list[float] = []
    for cached in range(0, second + lost, 32):
        old = min(cached, second - 1)
        parts = [(models.reference_first, old), (models.reference_second, len(tokens))]
        expected = reference_of_parts(parts, tokens, forced=rows[: second + lost - 1])
        start = second + lost
        rest, logprobs = rows[start - 1 :], segments[1].logprobs[lost:]
        gaps.append(gap_with_rows(expected, tokens, logprobs, rest, start=start, first_row=start - 1))
    return min(gaps)


def moved_boundary(segments: list[TokenOutput], by: int) -> list[TokenOutput]:
    """The same two segments with `by` more tokens said to be of the first version."""
    first, second = segments
    cut = len(first) + by
    ids = np.concatenate([s.token_ids for s in segments])
    logprobs = np.concatenate([s.logprobs for s in segments])
    rows = np.concatenate([s.routed_experts.experts for s in segments if s.routed_experts is not None])
    assert first.routed_experts is not None
    start = first.routed_experts.first_position
    at = first.routed_experts.end_position + by
    return [
        dataclasses.replace(
            first,
            token_ids=ids[:cut],
            logprobs=logprobs[:cut],
            routed_experts=RoutedExperts(first_position=start, experts=rows[: at - start]),
        ),
        dataclasses.replace(
            second,
            token_ids=ids[cut:],
            logprobs=logprobs[cut:],
            routed_experts=RoutedExperts(first_position=at, experts=rows[at - start :]),
        ),
    ]
