"""The whole pipeline under each staleness policy, with rollouts that are too slow for the bound.

Runs without a journal are in virtual time, so that what is too slow is the same on every machine.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

from async_rl.controller.checkpoints import read_run_state
from async_rl.run import causes
from async_rl.simulator.virtual_time import run_in_virtual_time
from tests.flow.crashes import STEPS
from tests.flow.harness import FakeTrainer, Harness
from tests.flow.test_crashes import BATCH, check_batches, check_tokens, lives_of
from tests.flow.test_pipeline import check_ledger

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

    def dropped(self, reason):
        return [g for g in self.lines("ledger.jsonl")[:-1] if (g["reason"] or "").startswith(reason)]


def run(directory, **options):
    harness = Watched(directory, **options)
    assert run_in_virtual_time(harness.run())
    total = check_ledger(harness)
    assert total["token_error"] == 0
    steps = harness.lines("metrics.jsonl")
    assert all(s["staleness/max"] <= options.get("max_staleness", 1) and s["ledger/token_error"] == 0 for s in steps)
    assert [s["ledger/error"] for s in steps] == [0] * len(steps)
    return harness


def lags_of(batch):
    """Staleness of every token in the loss."""
    return [lag for number in range(len(batch)) for lag in batch.loss_tokens(number).lag.tolist()]


@pytest.mark.parametrize(("max_staleness", "publish_every"), [(0, 1), (2, 2)])
@pytest.mark.parametrize("policy", ["wait", "drop", "recycle", "mask"])
def test_every_policy_gets_to_its_end_within_the_bound(tmp_path, policy, max_staleness, publish_every):
    harness = run(tmp_path, policy=policy, max_staleness=max_staleness, publish_every=publish_every, steps=8)
    assert len(harness.trainer.batches) == 8
    assert len(harness.trained) == len(set(harness.trained)) == 16
    for batch in harness.trainer.batches:
        assert max(lags_of(batch)) <= max_staleness


def test_a_prompt_that_expired_is_admitted_again_before_any_new_one(tmp_path):
    harness = run(tmp_path, policy="recycle")
    recycled = harness.dropped("recycled")
    assert recycled, "nothing was too slow"
    times = Counter(harness.admitted.values())
    assert max(times.values()) > 1
    firsts = list(dict.fromkeys(harness.admitted[g] for g in sorted(harness.admitted)))
    assert firsts == list(range(len(firsts))), "prompts begin in their order"
    state = read_run_state(harness.checkpoints.latest())
    ended = {harness.admitted[g["group"]] for g in harness.dropped("expired")}
    assert sorted({*harness.trained, *state.unfinished_prompts, *ended}) == list(range(state.prompt_cursor))
    assert harness.lines("metrics.jsonl")[-1]["ledger/recycled"] <= len(recycled)


def test_prompts_that_wait_to_be_admitted_again_are_in_the_checkpoint(tmp_path):
    slow_loads = {"max_staleness": 1, "publish_every": 2, "replica_options": {"load_s": 0.2}}
    first = Watched(tmp_path, policy="recycle", checkpoint_every=1, **slow_loads)
    states, save = [], first.checkpoints.save

    async def saving(state, **of):
        states.append(state)
        return await save(state, **of)

    first.checkpoints.save = saving
    assert run_in_virtual_time(first.run())
    state = next(state for state in states if state.queue.waiting)
    assert set(state.queue.waiting) <= set(state.unfinished_prompts) and state.queue.recycles
    second = Watched(tmp_path / "again", policy="recycle", start=state, **slow_loads)
    assert run_in_virtual_time(second.run())
    assert second.lines("ledger.jsonl")[-1]["error"] == second.lines("ledger.jsonl")[-1]["token_error"] == 0
    trained = first.trained[: 2 * state.train_step] + second.trained
    assert len(trained) == len(set(trained)) == 24
    again = list(dict.fromkeys(second.admitted[g] for g in sorted(second.admitted)))
    assert again[: len(state.unfinished_prompts)] == list(state.unfinished_prompts)


def test_old_tokens_are_masked_in_the_batch_and_told_by_sign(tmp_path):
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
    assert not harness.dropped("recycled")


def test_dropping_what_is_slow_biases_the_length_of_what_is_trained_and_waiting_does_not(tmp_path):
    last = {}
    for policy in ("wait", "drop", "recycle", "mask"):
        (tmp_path / policy).mkdir()
        last[policy] = run(tmp_path / policy, policy=policy, steps=24, publish_every=1).lines("metrics.jsonl")[-1]
    for quantile in ("p50", "p90"):
        offered, trained = (last["wait"][f"length/{kind}_{quantile}"] for kind in ("offered", "trained"))
        assert trained == pytest.approx(offered, abs=2), "what was not trained yet is all that differs"
    true = last["wait"]["length/offered_p90"]
    for policy in ("drop", "recycle", "mask"):
        assert last[policy]["length/trained_p90"] < 0.8 * true
    assert last["mask"]["length/offered_p90"] == pytest.approx(true, abs=2), "everything is finished, and parts trained"
    assert last["wait"]["length/given_up_fraction"] == last["mask"]["length/given_up_fraction"] == 0
    assert min(last[policy]["length/given_up_fraction"] for policy in ("drop", "recycle")) > 0.1


def test_tokens_that_the_queue_and_the_rollouts_count_apart_end_the_run(tmp_path):
    harness = Watched(tmp_path)
    harness.rollouts.tokens.add(1, 1)
    with pytest.raises(ExceptionGroup) as caught:
        run_in_virtual_time(harness.run())
    assert any("group 1 ended with" in line and "ledger/token_error" in line for line in causes(caught.value))


# ---- with a journal, in real time


@pytest.mark.parametrize(("policy", "kills"), [("recycle", [30]), ("recycle", [14, 18]), ("mask", [30])])
async def test_a_run_that_is_killed_goes_on_under_its_policy(tmp_path, policy, kills):
    options = {"policy": policy, "mean_length": 30, "token_s": 0.002, "trainer": FakeTrainer(step_s=0.004)}
    lives = await lives_of(tmp_path, kills, **options)
    last = lives[-1].harness
    steps = last.lines("metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, STEPS + 1))
    assert all(s["staleness/max"] <= 1 and s["ledger/error"] == s["ledger/token_error"] == 0 for s in steps)
    assert check_ledger(last)["trained"] == STEPS * BATCH
    check_tokens(lives)
    for before, after in itertools.pairwise(lives):
        check_batches(before, after)
    prompts = {group: prompt for life in lives for group, (prompt, _, _) in life.rolled.items()}
    records = {g["group"]: g for g in last.lines("ledger.jsonl")[:-1]}
    trained = [prompts[g] for g, record in records.items() if record["outcome"] == "trained"]
    assert len(trained) == len(set(trained))
    seen = set(prompts.values()) | set(await awaiting_prompts(last))
    assert seen == set(range(len(seen))), "a prompt was skipped"
    if policy == "recycle":
        again = Counter(prompts[g] for g, r in records.items() if (r["reason"] or "").startswith("recycled"))
        starts = Counter(prompts.values())
        admitted = (await last.host.queue.snapshot()).unfinished
        not_begun = [admission.prompt for admission in admitted if admission.group not in prompts]
        waiting = Counter([*await awaiting_prompts(last), *not_begun])
        assert all(starts[p] + waiting[p] == 1 + count for p, count in again.items())


async def awaiting_prompts(harness):
    """Prompts that wait to be admitted again at the end."""
    return [*(await harness.host.queue.snapshot()).waiting, *harness.pipeline._prompts.unfinished]


def test_a_harness_in_virtual_time_is_the_same_twice(tmp_path):
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        harness = run(tmp_path / name, policy="recycle", steps=4)
        tokens = [[b.sequence(n).token_ids.tolist() for n in range(len(b))] for b in harness.trainer.batches]
        made.append((tokens, [lags_of(b) for b in harness.trainer.batches]))
    assert np.array_equal(*(np.array(str(m)) for m in made))


@pytest.mark.parametrize("policy", ["wait", "mask"])
def test_the_bound_holds_at_the_last_mini_batch_of_a_batch(tmp_path, policy):
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
