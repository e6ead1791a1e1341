"""The whole pipeline under each staleness policy, with rollouts that are too slow for the bound.

Runs are in virtual time, so that the same rollouts are too slow on every machine.
"""

from collections import Counter

import pytest

from async_rl.controller.checkpoints import read_run_state
from async_rl.run import causes
from async_rl.simulator.virtual_time import run_in_virtual_time
from tests.flow.harness import FakeTrainer, Harness

SLOW = {"token_s": 0.01, "mean_length": 25, "batch_groups": 2, "steps": 12}


class Watched(Harness):
    """admitted: group -> prompt. trained: prompts in the order they were trained."""

    def __init__(self, directory, **options):
        super().__init__(directory, **{**SLOW, "trainer": FakeTrainer(step_s=0.02), **options})
        self.admitted, self.trained = {}, []
        admit, take = self.queue.admit, self.queue.take

        async def admitting(prompt):
            admission = await admit(prompt)
            self.admitted[admission.group] = admission.prompt
            return admission

        async def taking():
            batch = await take()
            self.trained += [g.prompt for g in batch.groups]
            return batch

        self.queue.admit, self.queue.take = admitting, taking

    def dropped(self, kind):
        return [g for g in self.groups("dropped") if g["kind"] == kind]


def run(directory, **options):
    harness = Watched(directory, **options)
    assert run_in_virtual_time(harness.run())
    harness.check_ledger()
    harness.check_staleness(options.get("max_staleness", 1))
    return harness


def lags_of(batch):
    """Staleness of every token in the loss."""
    return [lag for number in range(len(batch)) for lag in batch.loss_tokens(number).lag.tolist()]


@pytest.mark.parametrize(("max_staleness", "publish_every"), [(0, 1), (2, 2)])
@pytest.mark.parametrize("policy", ["wait", "drop", "recycle", "mask"])
def test_run_of_every_policy_ends_within_the_bound(tmp_path, policy, max_staleness, publish_every):
    harness = run(tmp_path, policy=policy, max_staleness=max_staleness, publish_every=publish_every, steps=8)
    assert len(harness.trainer.batches) == 8
    assert len(harness.trained) == len(set(harness.trained)) == 16
    for batch in harness.trainer.batches:
        assert max(lags_of(batch)) <= max_staleness


def test_recycle_admits_expired_prompts_before_new_ones(tmp_path):
    harness = run(tmp_path, policy="recycle")
    requeued = harness.dropped("requeued")
    assert requeued, "nothing was too slow"
    times = Counter(harness.admitted.values())
    assert max(times.values()) > 1
    firsts = list(dict.fromkeys(harness.admitted[g] for g in sorted(harness.admitted)))
    assert firsts == list(range(len(firsts))), "prompts begin in their order"
    state = read_run_state(harness.checkpoints.latest())
    ended = {harness.admitted[g["group"]] for g in harness.dropped("expired")}
    assert sorted({*harness.trained, *state.unfinished_prompts, *ended}) == list(range(state.prompt_cursor))
    assert harness.lines("metrics.jsonl")[-1]["ledger/requeued"] <= len(requeued)


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
    assert not harness.dropped("requeued")


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
    harness = Watched(tmp_path)
    harness.rollouts.tokens.add(1, 1)
    with pytest.raises(ExceptionGroup) as caught:
        run_in_virtual_time(harness.run())
    assert any("group 1 ended with" in line and "ledger/token_error" in line for line in causes(caught.value))


@pytest.mark.parametrize("policy", ["wait", "mask"])
def test_staleness_bound_holds_at_the_last_mini_batch(tmp_path, policy):
    harness = run(
        tmp_path, policy=policy, max_staleness=7, publish_every=4, updates_per_batch=4, steps=32, batch_groups=4
    )
    steps = harness.lines("metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(4, 33, 4))
    assert all(s["optimizer_steps"] == 4 for s in steps)
    assert max(s["staleness/max"] for s in steps) <= 7
    assert [s["param_version"] for s in steps] == list(range(1, 9))
    for batch in harness.trainer.batches:
        groups = dict(zip(batch.index[:, 0].tolist(), batch.mini_batch.tolist(), strict=True))
        assert sorted(groups.values()) == [0, 1, 2, 3]
        assert all((batch.loss_tokens(n).lag >= m).all() for n, m in enumerate(batch.mini_batch.tolist()))
