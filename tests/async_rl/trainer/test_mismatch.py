"""Mismatch metrics and filter counts against numpy over the same tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.metrics.registry import LAGS, METRICS
from async_rl.trainer.loss.ratios import Trajectories
from async_rl.trainer.metrics import BINS, TokenSums, lag_buckets, quantile, token_sums

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def tokens(n, seed=0, *, spread=1.0):
    """Columns of n random tokens of 5 trajectories, among them advantages of zero and every lag."""
    g = torch.Generator().manual_seed(seed)
    current = -torch.rand(n, generator=g) * 4
    lag = torch.randint(0, 6, (n,), generator=g)
    return {
        "current": current,
        "behaviour": current + torch.randn(n, generator=g) * spread,
        "entropy": torch.rand(n, generator=g),
        "advantages": torch.randint(-1, 2, (n,), generator=g).float(),
        "lag_bucket": lag_buckets(lag, (lag == 0) & (torch.rand(n, generator=g) > 0.5)),
        "mask": torch.rand(n, generator=g) > 0.7,
        "trajectory": torch.randint(0, 5, (n,), generator=g),
    }


def tally(parts):
    """TokenSums of micro-batches, each of the columns that `tokens` gives."""
    sums = TokenSums(("mask",), trajectories=5)
    for part in parts:
        found = token_sums(
            **{name: part[name] for name in ("current", "behaviour", "entropy", "advantages", "lag_bucket")},
            extra={"mask": part["mask"]},
        )
        drift = Trajectories(index=part["trajectory"], count=5).sums(part["current"] - part["behaviour"])
        sums.add({**found, "loss": torch.tensor(0.5), "trajectory": drift}, trajectories=torch.arange(5))
    return sums


def by_numpy(part):
    """The same metrics, one formula after the other."""
    d = (part["current"] - part["behaviour"]).double().numpy()
    w, size, bucket = np.exp(d), np.abs(d), part["lag_bucket"].numpy()
    advantage, touched = part["advantages"].numpy(), part["mask"].numpy()
    out = {"tokens": len(d), "entropy": part["entropy"].double().mean().item()}
    for suffix, kept in [("", np.full(len(d), True)), *((f"_{lag}", bucket == i) for i, lag in enumerate(LAGS))]:
        out[f"mismatch/k1{suffix}"] = -d[kept].mean()
        out[f"mismatch/k3{suffix}"] = (w - 1 - d)[kept].mean()
        out[f"mismatch/abs_mean{suffix}"] = size[kept].mean()
        out[f"mismatch/abs_max{suffix}"] = size[kept].max()
        out[f"mismatch/f2{suffix}"] = (size[kept] > math.log(2)).mean()
        out[f"mismatch/f5{suffix}"] = (size[kept] > math.log(5)).mean()
        out[f"mismatch/chi2{suffix}"] = ((w[kept] - 1) ** 2).mean()
        out[f"ess/token{suffix}"] = w[kept].sum() ** 2 / (kept.sum() * (w[kept] ** 2).sum())
        out[f"mask/fraction{suffix}"] = touched[kept].mean()
    for i, lag in enumerate(LAGS):
        out[f"tokens/{lag}"] = (bucket == i).sum()
    for sign, kept in (("positive", advantage > 0), ("negative", advantage < 0)):
        out[f"tokens/{sign}"] = kept.sum()
        out[f"mask/fraction_{sign}"] = touched[kept].mean()
    products = np.array([np.exp(d[part["trajectory"].numpy() == i].sum()) for i in range(5)])
    out["ess/sequence"] = products.sum() ** 2 / (5 * (products**2).sum())
    return out


def test_every_metric_is_its_formula_and_is_registered():
    part = tokens(400)
    found = tally([part]).metrics(updates=1)
    expected = by_numpy(part)
    assert expected.keys() | {f"mismatch/abs_p99{s}" for s in ("", *(f"_{lag}" for lag in LAGS))} | {"loss"} == (
        found.keys()
    )
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9), key
    assert found.keys() <= METRICS.keys()


def test_micro_batches_and_ranks_add_up_to_the_batch():
    part = tokens(300)
    pieces = [{name: column[start : start + 70] for name, column in part.items()} for start in range(0, 300, 70)]
    here, there = tally(pieces[:2]), tally(pieces[2:])
    held = []

    def keep(vector):
        held.append(vector.clone())
        return vector

    there.reduce(keep, keep)
    here.reduce(lambda vector: vector + held[0], lambda vector: torch.maximum(vector, held[1]))
    expected = tally([part]).metrics(updates=1) | {"loss": 2.5}
    assert here.metrics(updates=1) == pytest.approx(expected, rel=1e-9)


def test_without_tokens_there_is_no_mismatch_and_no_error():
    found = TokenSums(("clip", "kl"), trajectories=0).metrics(updates=1)
    assert found["tokens"] == found["loss"] == 0
    assert all(math.isnan(found[key]) for key in ("mismatch/k3", "mismatch/abs_p99", "ess/sequence", "clip/fraction"))
    empty = {name: column[:0] for name, column in tokens(3).items()}
    assert tally([empty]).metrics(updates=1)["tokens"] == 0


def test_mismatch_of_equal_logprobs_is_zero_and_a_small_one_is_exact():
    part = tokens(50, spread=0.0)
    found = tally([part]).metrics(updates=1)
    assert found["mismatch/k3"] == found["mismatch/chi2"] == found["mismatch/abs_p99"] == found["mismatch/f2"] == 0
    assert found["ess/token"] == found["ess/sequence"] == 1
    part["current"] = torch.full((50,), -1.0, dtype=torch.float64)
    part["behaviour"] = part["current"] - 1e-6
    found = tally([part]).metrics(updates=1)
    assert found["mismatch/k3"] == pytest.approx(5e-13, rel=1e-3)
    assert found["mismatch/chi2"] == pytest.approx(1e-12, rel=1e-3)


def test_lag_zero_is_of_tokens_whose_context_has_the_current_weights():
    lag = torch.tensor([0, 0, 1, 2, 3, 40])
    pure = torch.tensor([True, False, False, False, False, False])
    assert [LAGS[i] for i in lag_buckets(lag, pure)] == ["lag0", "lag0_mixed", "lag1", "lag2", "lag3", "lag3"]


@given(st.lists(st.floats(1e-7, 50), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_at_most_nine_percent_above_the_true_one(values, share):
    size = torch.tensor(values, dtype=torch.float64)
    zeros = torch.zeros(len(values), dtype=torch.int64)
    histogram = token_sums(
        current=size,
        behaviour=torch.zeros_like(size),
        entropy=size,
        advantages=size,
        lag_bucket=zeros,
        extra={},
    )["histogram"]
    assert histogram[0].sum() == len(values) and not histogram[1:].any()
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile(histogram[0], share, largest=max(values))
    assert true * (1 - 1e-12) <= found <= true * 2 ** (1 / 8) * (1 + 1e-12)


def test_quantiles_beyond_the_histogram_are_the_largest_value():
    histogram = torch.zeros(BINS, dtype=torch.float64)
    histogram[-1] = 3
    assert quantile(histogram, 0.99, largest=81.5) == 81.5
    assert math.isnan(quantile(torch.zeros(BINS), 0.99, largest=0.0))
