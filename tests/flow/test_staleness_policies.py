"""The whole pipeline under each staleness policy, with rollouts that are too slow for the bound.

Runs are in virtual time, so that the same rollouts are too slow on every machine.
"""

import pytest

from async_rl.run import causes
from async_rl.simulator.virtual_time import run_in_virtual_time
from tests.flow.harness import FakeTrainer, Harness

SLOW = {"token_s": 0.01, "mean_length": 25, "batch_groups": 2, "steps": 12}


def slow(directory, **options):
    return Harness(directory, **{**SLOW, "trainer": FakeTrainer(step_s=0.02), **options})


def run(directory, **options):
    harness = slow(directory, **options)
    assert run_in_virtual_time(harness.run())
    harness.check_ledger()
    harness.check_staleness(options.get("max_staleness", 1))
    return harness


def lags_of(batch):
    """Staleness of every token in the loss."""
    return [lag for number in range(len(batch)) for lag in batch.loss_tokens(number).lag.tolist()]


def test_mask_counts_masked_tokens_by_the_sign_of_their_advantage(tmp_path):
    harness = run(tmp_path, policy="mask")
    steps = harness.lines("metrics.jsonl")
    masked = [s["staleness/masked_tokens"] for s in steps]
    assert sum(masked), "nothing was too old"
    total = harness.lines("ledger.jsonl")[-1]
    assert total["masked_tokens"] == sum(masked)
    assert total["trained_tokens"] == sum(len(lags_of(b)) for b in harness.trainer.batches)
    for step, batch in zip(steps, harness.trainer.batches, strict=True):
        sampled = len(lags_of(batch)) + step["staleness/masked_tokens"]
        assert step["staleness/masked_fraction"] == pytest.approx(step["staleness/masked_tokens"] / float(sampled))
        assert sum(step["staleness/tokens"].values()) == len(lags_of(batch))
    assert max(s["staleness/masked_fraction_positive"] for s in steps) > 0
    assert not harness.groups("dropped")


def test_length_of_trained_tokens_is_biased_by_every_policy_but_wait(tmp_path):
    last = {}
    for policy in ("wait", "drop", "recycle", "mask"):
        (tmp_path / policy).mkdir()
        last[policy] = run(tmp_path / policy, policy=policy, steps=24, publish_every=1).lines("metrics.jsonl")[-1]
    for quantile in ("p50", "p90"):
        offered, trained = (last["wait"][f"length/{kind}_{quantile}"] for kind in ("offered", "trained"))
        assert trained == pytest.approx(offered, abs=2)
    true = last["wait"]["length/offered_p90"]
    for policy in ("drop", "recycle", "mask"):
        assert last[policy]["length/trained_p90"] < 0.8 * true
    assert last["mask"]["length/offered_p90"] == pytest.approx(true, abs=2), "everything is finished, and parts trained"
    assert last["wait"]["length/given_up_fraction"] == last["mask"]["length/given_up_fraction"] == 0
    assert min(last[policy]["length/given_up_fraction"] for policy in ("drop", "recycle")) > 0.1


def test_run_ends_if_queue_and_rollouts_count_different_tokens(tmp_path):
    harness = slow(tmp_path)
    harness.rollouts.tokens.add(1, 1)
    with pytest.raises(ExceptionGroup) as caught:
        run_in_virtual_time(harness.run())
    assert any("group 1 ended with" in line and "ledger/token_error" in line for line in causes(caught.value))
