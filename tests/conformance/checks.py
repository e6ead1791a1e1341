"""Whether answers of an engine are true, and whether a trajectory holds its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np

from agent_loop.engine import SamplingConfig
from async_rl.inference.spans import cut_into_segments
from message_queue.tokens import RoutedExperts
from message_queue.training_sequence import TrainingSequence
from message_queue.trajectory import Trajectory
from tests.conformance.engines import EngineUnderTest, Exchange, Rollout, tokens
from tests.conformance.reference import (
    Reference,
    differing_rows,
    gap_with_rows,
    logprob_differences,
    logprob_gap,
    settled_rows,
)
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions, row_versions
from tests.helpers.groups import sets_of


def gap_of(tested: EngineUnderTest, exchange: Exchange, *, strict: bool = False) -> float:
    """Largest |dlogp| of any token against its own version, over its bound; infinite if a row differs or is elsewhere.

    A numerical tie that was decided the other way ends the comparison; if `strict`, it differs too.
    """
    gaps = [gaps_of_segment(tested, exchange, at, strict=strict) for at in range(len(exchange.answer))]
    return float(np.concatenate(gaps).max())


def assert_true(tested: EngineUnderTest, exchanges: Sequence[Exchange]) -> float:
    """Each token and each row of the answers is of the version that its segment names; returns the largest |dlogp|."""
    assert exchanges, "nothing was asked"
    largest = 0.0
    for exchange in exchanges:
        for at in range(len(exchange.answer)):
            found, bound = differences_of_segment(tested, exchange, at)
            gap, largest = found.max() / bound, max(largest, found.max())
            what = f"{tested.name}: {exchange.request.request_id} of versions {versions_of(exchange)}"
            assert gap <= 1, f"{what} is off by {gap} bounds in segment {at}"
    return largest


async def assert_serves(tested: EngineUnderTest, version: int) -> None:
    """A new request is answered by a version alone."""
    exchange = await tested.ask(f"version-{version}", tokens(10))
    assert set(versions_of(exchange)) == {version}
    assert_true(tested, [exchange])


def assert_whole(tested: EngineUnderTest, *rollouts: Rollout) -> float:
    """Each trajectory holds its answers, all true, and each of its rows came once; returns the largest |dlogp|."""
    for rollout in rollouts:
        assert_sent_once(tested, rollout.name, rollout.trajectory)
    return assert_true(tested, tested.exchanges)


def assert_sent_once(tested: EngineUnderTest, name: str, trajectory: Trajectory) -> None:
    """A trajectory holds its answers, and each of its rows came once."""
    exchanges = tested.of_session(name)
    assert_merged(trajectory, [exchange for exchange in exchanges if sampled_of(exchange)])
    assert rows_sent(exchanges) == list(range(len(trajectory) - 1)), "each row once, in order"


@dataclass(frozen=True, slots=True)
class CutGaps:
    """Differences of the logprobs of cut answers from those of the same weights."""

    over_sets: list[float]
    """The engine's logprob of each token, less that over its kept set."""
    over_all: list[float]
    """The same, less that over the whole vocabulary."""
    settled: int
    """Tokens whose set does not depend on rounding."""


FAR = 10  # bounds: a prefix under other experts moves some logprob by more than this


def k3(differences: Sequence[float]) -> float:
    """Mean of exp(-d) - 1 + d."""
    d = np.asarray(differences)
    return float((np.expm1(-d) + d).mean())


def assert_cut(tested: EngineUnderTest, exchanges: Sequence[Exchange]) -> CutGaps:
    """Kept sets are those of the definition, and logprobs are of the distribution over the sets."""
    over_sets: list[float] = []
    over_all: list[float] = []
    settled = 0
    for exchange in exchanges:
        starts = np.cumsum([len(exchange.request.token_ids), *map(len, exchange.answer)]).tolist()
        sampling = exchange.request.sampling
        for at, segment in enumerate(exchange.answer):
            if not len(segment):
                continue
            expected = _expected(tested, exchange, at)
            seen = [s.routed_experts.experts for s in exchange.answer[: at + 1] if s.routed_experts is not None]
            known = settled_rows(expected, np.concatenate(seen), start=exchange.request.existing_rows)
            bound = 2 * expected.logprob_bound / sampling.temperature
            rows = expected.logprobs[starts[at] - 1 : starts[at + 1] - 1] / sampling.temperature
            for position, row, token, logprob, kept in zip(
                count(starts[at]), rows, segment.token_ids, segment.logprobs, sets_of(segment.support)
            ):
                if position > known:  # a numerical tie of a router decided otherwise
                    break
                over_sets.append(logprob - (row[token] - _mass(row[kept])))
                over_all.append(logprob - (row[token] - _mass(row)))
                assert abs(over_sets[-1]) <= bound, f"{tested.name}: logprob of {token} over {kept}"
                due = _kept_by_definition(row, sampling, bound=bound)
                settled += due is not None
                assert due in (None, kept), f"{tested.name}: {sampling} kept {kept}, the definition {due}"
    return CutGaps(over_sets, over_all, settled)


def _kept_by_definition(row: Any, sampling: SamplingConfig, *, bound: float) -> list[int] | None:
    """Kept ids by `SamplingConfig`; None if one of its borders is within rounding.

    row: float64 [vocab], logprobs up to a constant, each known to `bound`.
    """
    order = np.argsort(-row, kind="stable")
    ranked = row[order]
    sizes = [len(row)]
    if sampling.min_p:
        border = ranked[0] + np.log(sampling.min_p)
        sizes.append(int((ranked >= border).sum()))
        if np.abs(ranked - border).min() <= bound:
            return None
    if sampling.top_k > 0:
        sizes.append(sampling.top_k)
    size = min(sizes)
    shares = np.exp(ranked[:size] - _mass(ranked[:size]))
    before = np.cumsum(shares) - shares
    if sampling.top_p < 1:
        if np.abs(before - sampling.top_p).min() <= 2 * bound:
            return None
        size = int((before < sampling.top_p).sum())
    if size < len(row) and ranked[size - 1] - ranked[size] <= 2 * bound:
        return None
    return sorted(order[:size].tolist())


def _mass(logprobs: Any) -> float:
    """log of the sum of exp."""
    return float(np.logaddexp.reduce(logprobs))


def versions_of(exchange: Exchange) -> list[int]:
    """Version of each segment."""
    return [segment.weights.version for segment in exchange.answer]


def sampled_of(exchange: Exchange) -> int:
    """Tokens of the answer."""
    return sum(map(len, exchange.answer))


def whole(exchange: Exchange) -> np.ndarray[Any, Any]:
    """int32 [T]: tokens of the request and sampled tokens."""
    return np.concatenate([exchange.request.token_ids, *(s.token_ids for s in exchange.answer)])


def gaps_of_segment(tested: EngineUnderTest, exchange: Exchange, at: int, *, strict: bool = False) -> Any:
    """float64 [tokens]: |dlogp| of each token of segment `at` over its bound; infinite after a row that differs.

    strict: see `gap_of`.
    """
    found, bound = differences_of_segment(tested, exchange, at, strict=strict)
    return found / bound


def differences_of_segment(
    tested: EngineUnderTest, exchange: Exchange, at: int, *, strict: bool = False
) -> tuple[np.ndarray[Any, Any], float]:
    """As `gaps_of_segment`, but |dlogp| and its bound."""
    request, answer = exchange.request, exchange.answer
    segment, rows = answer[at], answer[at].routed_experts
    starts = np.cumsum([len(request.token_ids), *map(len, answer)]).tolist()
    first_row = starts[at] - 1 if at else request.existing_rows
    if not len(segment):
        return np.array([0.0 if rows is None and len(answer) == 1 else np.inf]), 1.0
    if rows is None or (rows.first_position, rows.end_position) != (first_row, starts[at + 1] - 1):
        return np.full(len(segment), np.inf), 1.0
    if segment.weights != tested.update(segment.weights.version).weights:
        return np.full(len(segment), np.inf), 1.0
    expected = _expected(tested, exchange, at)
    seen = np.concatenate([s.routed_experts.experts for s in answer[: at + 1] if s.routed_experts is not None])
    settled = rows.end_position if strict else settled_rows(expected, seen, start=request.existing_rows)
    found = logprob_differences(expected, whole(exchange), segment.logprobs, start=starts[at])
    found[max(0, settled + 1 - starts[at]) :] = 0.0
    wrong = first_row + np.flatnonzero(differing_rows(expected, rows.experts, start=first_row).any(-1))
    found[np.maximum(0, wrong[wrong < settled] + 1 - starts[at])] = np.inf
    return found, expected.logprob_bound


def gap_of_late_start(tested: EngineUnderTest, exchange: Exchange) -> tuple[float, int]:
    """`gap_of` an answer of one segment, and how many of its rows are of the weights before.

    A load that keeps K/V may come between two chunks of a prefill. A chunk ends at the token budget of a step, which
    other requests share, so the border is the one that fits.
    """
    [segment], ids = exchange.answer, whole(exchange)
    version, rows = segment.weights.version, segment.routed_experts
    if version == 0 or tested.kept[version] == "recompute":
        return gap_of(tested, exchange), 0
    assert rows is not None
    prompt = len(exchange.request.token_ids)
    before = tested.truth([(version - 1, len(ids))], ids, forced=None)
    differs = differing_rows(before, rows.experts[:prompt], start=0).any(-1)
    for border in range(int(np.argmax(differs)) if differs.any() else prompt - 1, -1, -1):
        expected = tested.truth([(version - 1, border), (version, len(ids))], ids, forced=None)
        gap = gap_with_rows(expected, ids, segment.logprobs, rows.experts, start=prompt, first_row=0)
        if gap <= 1:
            return gap, border
    return np.inf, 0


def _expected(tested: EngineUnderTest, exchange: Exchange, at: int) -> Reference:
    """A forward pass over the K/V of segment `at`.

    It starts with the request or with the last load that recomputed the K/V, under the rows recorded by then. K/V that
    later loads kept is of the weights before them: a segment's last token is forwarded by the next.
    """
    request, answer = exchange.request, exchange.answer
    starts = np.cumsum([len(request.token_ids), *map(len, answer)]).tolist()
    recomputed = [j for j in range(1, at + 1) if tested.kept[answer[j].weights.version] == "recompute"]
    first = max(recomputed, default=0)
    ends = [starts[j + 1] - 1 for j in range(first, at)] + [starts[at + 1]]
    parts = [(answer[j].weights.version, end) for j, end in zip(range(first, at + 1), ends, strict=True)]
    recorded = [s.routed_experts for s in answer[:first] if s.routed_experts is not None]
    given = [] if request.forced_experts is None else [request.forced_experts]
    return tested.truth(parts, whole(exchange)[: starts[at + 1]], forced=_table([*given, *recorded]))


def _table(blocks: Sequence[RoutedExperts]) -> Any:
    """int16 [T', moe_layers, top_k] of all blocks, -1 between them; None without any."""
    if not blocks:
        return None
    end = max(block.end_position for block in blocks)
    table = np.full((end, *blocks[0].experts.shape[1:]), -1, np.int16)
    for block in blocks:
        table[block.first_position : block.end_position] = block.experts
    return table


def odd_rows(tested: EngineUnderTest, count: int, *, seed: int = 0) -> RoutedExperts:
    """Rows that no router chose, in no order."""
    layers, top_k = tested.routing.row_shape
    ranks = np.random.default_rng(seed).random((count, layers, tested.routing.num_experts))
    return RoutedExperts(first_position=0, experts=np.argsort(ranks, axis=-1)[..., :top_k].astype(np.uint8))


def assert_forced(tested: EngineUnderTest, *exchanges: Exchange) -> None:
    """Rows are the forced ones, in their order, and answers are true under them, though not without them."""
    assert_true(tested, exchanges)
    sorted_by_engine = bool(tested.probe.retractions)  # SGLang
    for exchange in exchanges:
        forced, [segment] = exchange.request.forced_experts, exchange.answer
        if forced is None:
            continue
        rows, held, ids = segment.routed_experts, exchange.request.existing_rows, whole(exchange)
        assert rows is not None
        given = forced.experts[held:]
        assert (rows.experts[: len(given)] == given).all() or sorted_by_engine, "in their order"
        free = tested.truth([(segment.weights.version, len(ids))], ids, forced=None)
        assert logprob_gap(free, ids, segment.logprobs, start=len(exchange.request.token_ids)) > FAR


def with_boundary_moved(exchange: Exchange, *, by: int) -> Exchange:
    """The same answer with `by` more tokens attributed to its first version."""
    counts = [len(segment) for segment in exchange.answer]
    counts[0], counts[1] = counts[0] + by, counts[1] - by
    rows = [s.routed_experts for s in exchange.answer if s.routed_experts is not None]
    moved = cut_into_segments(
        exchange.request,
        token_ids=np.concatenate([s.token_ids for s in exchange.answer]),
        logprobs=np.concatenate([s.logprobs for s in exchange.answer]),
        routed_experts=replace(rows[0], experts=np.concatenate([block.experts for block in rows])),
        spans=[(s.weights, count) for s, count in zip(exchange.answer, counts, strict=True)],
        stop_reason=exchange.answer[-1].stop_reason,
        replica=exchange.answer[-1].replica,
    )
    return Exchange(exchange.request, tuple(moved))


def assert_merged(trajectory: Trajectory, exchanges: Sequence[Exchange]) -> None:
    """A trajectory that ends with an answer holds the content of its answers, by the slow and obvious rule.

    With append and force a row is of the first answer that covered its position, with replace of the last.
    """
    rows: dict[int, tuple[list[Any], int]] = {}
    sampled: dict[int, tuple[float, int]] = {}
    for before, after in pairwise(exchanges):
        held = whole(before)
        assert after.request.token_ids[: len(held)].tolist() == held.tolist(), "a request starts with all held tokens"
    for exchange in exchanges:
        at = len(exchange.request.token_ids)
        for segment in exchange.answer:
            version, block = segment.weights.version, segment.routed_experts
            sampled |= {at + i: (float(p), version) for i, p in enumerate(segment.logprobs)}
            at += len(segment)
            for position in range(0 if block is None else block.first_position, 0 if block is None else at - 1):
                assert block is not None
                row = block.experts[position - block.first_position].tolist(), version
                rows[position] = row if trajectory.resume_routing == "replace" else rows.get(position, row)
    total, table = len(whole(exchanges[-1])), trajectory.sequences()[-1].routed_experts
    assert table is not None
    assert trajectory.token_ids().tolist() == whole(exchanges[-1]).tolist()
    assert sorted(rows) == list(range(total - 1)), "every position but the last has a row"
    assert trajectory.num_rows == total - 1
    assert table[:-1].tolist() == [rows[p][0] for p in range(total - 1)]
    assert (table[-1] == -1).all(), "the last token was never forwarded"
    assert row_versions(trajectory.sequences()[-1]).tolist() == [*(rows[p][1] for p in range(total - 1)), -1]
    assert behaviour_logprobs(trajectory).tolist() == [sampled.get(p, (0.0, 0))[0] for p in range(total)]
    assert param_versions(trajectory).tolist() == [sampled.get(p, (0.0, -1))[1] for p in range(total)]


def rows_sent(exchanges: Sequence[Exchange]) -> list[int]:
    """Position of every row that an answer brought, in order of arrival."""
    blocks = [s.routed_experts for e in exchanges for s in e.answer if s.routed_experts is not None]
    return [p for block in blocks for p in range(block.first_position, block.end_position)]


def gaps_under_own_rows(tested: EngineUnderTest, sequence: TrainingSequence) -> dict[int, float]:
    """Version -> largest |dlogp| of its tokens over its bound if all its rows are forced, as in training."""
    gaps: dict[int, float] = {}
    for version in np.unique(param_versions(sequence)[loss_mask(sequence)]).tolist():
        expected = tested.truth([(version, len(sequence))], sequence.token_ids, forced=sequence.routed_experts)
        at = np.flatnonzero(param_versions(sequence) == version)
        logprobs = expected.logprobs[at - 1, sequence.token_ids[at]]
        gaps[version] = float(np.abs(logprobs - behaviour_logprobs(sequence)[at]).max() / expected.logprob_bound)
    return gaps
