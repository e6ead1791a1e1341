"""The plugin in SGLang cuts a distribution as SamplingConfig says, for each request of a batch by itself."""

import importlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_rl.inference.sglang.config import PLUGIN_PATH

LIMIT = 1 << 14
OFF = {"top_k": LIMIT, "top_p": 1.0, "min_p": 0.0}
ODD_SHARES = st.integers(1, 60).map(lambda count: (2 * count - 1) / 128)  # never a sum of multiples of 1 / 64
requests = st.fixed_dictionaries(
    {"top_k": st.sampled_from([1, 2, 3, 5, 8, LIMIT]), "top_p": ODD_SHARES | st.just(1.0), "min_p": ODD_SHARES}
)


@pytest.fixture
def sampling(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN_PATH))
    return importlib.import_module("async_rl_sglang.sampling")


def cut(sampling, rows, asked):
    columns = {name: torch.tensor([each[name] for each in asked]) for name in OFF}
    return sampling.cut(
        torch.tensor(rows), top_ks=columns["top_k"], top_ps=columns["top_p"], min_ps=columns["min_p"], limit=LIMIT
    )


def by_definition(probabilities, *, top_k, top_p, min_p):
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.permutations([25, 13, 9, 7, 5, 3, 2]), requests), min_size=1, max_size=5))
def test_cut_keeps_the_tokens_of_the_definition_in_each_row(sampling, drawn):
    rows = [[number / 64 for number in numbers] for numbers, _ in drawn]
    found = cut(sampling, rows, [asked for _, asked in drawn])
    for row, (_, asked), kept in zip(rows, drawn, found.tolist(), strict=True):
        assert {i for i, p in enumerate(kept) if p} == by_definition(row, **asked)
        assert all(p in (0, row[i]) for i, p in enumerate(kept))


def test_cut_keeps_tokens_as_likely_as_the_last_of_top_k(sampling):
    found = cut(sampling, [[0.4, 0.2, 0.2, 0.1, 0.1]] * 2, [{**OFF, "top_k": 2}, {**OFF, "top_k": 1}])
    assert [row.nonzero().flatten().tolist() for row in found] == [[0, 1, 2], [0]]


def test_cut_leaves_unlikely_tokens_to_a_request_without_limits(sampling):
    rare = [1 - 1e-12, 1e-12, 1e-30, 1e-38]
    found = cut(sampling, [rare, rare], [OFF, {**OFF, "top_p": 0.5}])
    assert [int(row.count_nonzero()) for row in found] == [4, 1]


def test_sample_cut_computes_nothing_without_a_limit(sampling):
    seen: list[Any] = []
    sampling.sample_cut(lambda *args: seen.append(args), "sampler", "probs", None, "positions", True)
    assert seen == [("sampler", "probs", None, "positions", True)]
