"""The plugin in SGLang cuts a distribution as SamplingConfig says, for each request of a batch by itself."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.inference.sglang.config import PLUGIN_PATH

LIMIT = 1 << 14
OFF = {"top_k": LIMIT, "top_p": 1.0, "min_p": 0.0}
EXAMPLE = [0.5, 0.2, 0.15, 0.1, 0.05]
ODD_SHARES = st.integers(1, 60).map(lambda count: (2 * count - 1) / 128)  # never a sum of multiples of 1 / 64
requests = st.fixed_dictionaries(
    {"top_k": st.sampled_from([1, 2, 3, 5, 8, LIMIT]), "top_p": ODD_SHARES | st.just(1.0), "min_p": ODD_SHARES}
)


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PLUGIN_PATH))
    return importlib.import_module("async_rl_sglang.sampling")


def cut(sampling: Any, rows: list[list[float]], asked: list[dict[str, Any]]) -> torch.Tensor:
    columns = {name: torch.tensor([each[name] for each in asked]) for name in OFF}
    return sampling.cut(
        torch.tensor(rows), top_ks=columns["top_k"], top_ps=columns["top_p"], min_ps=columns["min_p"], limit=LIMIT
    )


def by_definition(probabilities: list[float], *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that are kept of distinct probabilities."""
    ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    rest = [i for i in ranked if probabilities[i] >= min_p * probabilities[ranked[0]]][:top_k]
    kept, mass = set[int](), 0.0
    for token in rest:
        if mass >= top_p * sum(probabilities[i] for i in rest):
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.permutations([25, 13, 9, 7, 5, 3, 2]), requests), min_size=1, max_size=5))
def test_each_row_keeps_the_tokens_of_the_definition(sampling: Any, drawn: Any):
    rows = [[number / 64 for number in numbers] for numbers, _ in drawn]
    found = cut(sampling, rows, [asked for _, asked in drawn])
    for row, (_, asked), kept in zip(rows, drawn, found.tolist(), strict=True):
        assert {i for i, p in enumerate(kept) if p} == by_definition(row, **asked)
        assert all(p in (0, row[i]) for i, p in enumerate(kept))


def test_top_p_is_over_what_top_k_left(sampling: Any):
    found = cut(sampling, [EXAMPLE], [{**OFF, "top_k": 3, "top_p": 0.8}])
    assert found[0].nonzero().flatten().tolist() == [0, 1]


def test_tokens_as_likely_as_the_last_of_top_k_are_kept(sampling: Any):
    found = cut(sampling, [[0.4, 0.2, 0.2, 0.1, 0.1]] * 2, [{**OFF, "top_k": 2}, {**OFF, "top_k": 1}])
    assert [row.nonzero().flatten().tolist() for row in found] == [[0, 1, 2], [0]]


def test_a_request_that_is_not_cut_keeps_unlikely_tokens(sampling: Any):
    rare = [1 - 1e-12, 1e-12, 1e-30, 1e-38]
    found = cut(sampling, [rare, rare], [OFF, {**OFF, "top_p": 0.5}])
    assert [int(row.count_nonzero()) for row in found] == [4, 1]


def test_nothing_is_computed_if_no_request_is_cut(sampling: Any):
    seen: list[Any] = []
    sampling.sample_cut(lambda *args: seen.append(args), "sampler", "probs", None, "positions", True)
    assert seen == [("sampler", "probs", None, "positions", True)]
