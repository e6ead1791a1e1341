"""Runs with parts, policies and sampling that the default run does not use, each with resumed and late rollouts."""

import pytest

from tests.e2e.runs import check_records, check_rollouts, complete, k3_bound, pids
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.traces import check_trace

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]
STEPS = 6
UNEVEN = (
    "task.factory=tests.e2e.tasks:uneven_task",
    "rollout.groups_per_batch=2",
    "rollout.limits.max_tokens=960",
    "engine.max_model_len=1024",
    "rollout.sampling.top_p=0.9",
    "rollout.sampling.top_k=20",
    "rollout.sampling.min_p=0.01",
    f"total_train_steps={STEPS}",
    "validation.prompts=0",
)


def run(directory, *overrides):
    """Train steps and groups of a run that ended by itself, with late groups."""
    complete(directory, directory / "warm_start", *UNEVEN, f"+task.options.run_directory={directory}", *overrides)
    steps, groups = check_records(directory, steps=STEPS, staleness=1, k3=k3_bound(directory / "warm_start"))
    assert steps[-1]["mismatch/k3_probe"] is not None, "no probe was answered before the publish after it"
    check_rollouts(directory, steps, groups)
    assert max(s["partial/resumed_fraction"] for s in steps) > 0, "no publish met a rollout in the engine"
    kinds = check_trace(directory, trained=[g["group"] for g in groups if g["outcome"] == "trained"])
    assert kinds.keys() - {"controller"} == pids(directory).keys() - {"queue"}
    assert all("load" in kinds[part] for part in kinds if part.startswith("replica"))
    return steps, groups


def test_staged_publishes_to_two_groups_of_vllm_and_two_trainer_ranks_under_drop(tmp_path):
    _, groups = run(tmp_path, "engine.data_parallel=2", "trainer.ranks=2", "sync.mode=staged", "staleness=drop")
    expired = [g for g in groups if g["kind"] in ("expired", "requeued")]
    assert expired and all(g["tokens"] > 0 for g in expired)


def test_rolling_direct_publishes_to_two_vllm_replicas_with_drafts_from_two_pipeline_stages_under_recycle(tmp_path):
    trainer = ("trainer.ranks=2", "trainer.parallel.pipeline=2")
    parts = (*trainer, "engine.replicas=2", "sync.mode=rolling", "sync.route=direct", "engine.speculation.method=ngram")
    steps, groups = run(tmp_path, *parts, "staleness=recycle", "rollout.on_update=keep")
    requeued = [g for g in groups if g["kind"] == "requeued"]
    assert requeued and steps[-1]["ledger/requeued"] >= 1
    assert steps[-1]["draft/proposed"] > 0 and 0 < steps[-1]["draft/accepted_fraction"] < 1


def test_staged_publishes_to_sglang_from_two_tensor_parallel_ranks_under_mask(tmp_path):
    ranks = ("trainer.ranks=2", "trainer.parallel.tensor=2", "task.options.dense_first_layer=false")
    steps, groups = run(
        tmp_path, "engine=sglang", "engine.kv_cache_tokens=16384", *ranks, "sync.mode=staged", "staleness=mask"
    )
    assert max(s["staleness/masked_tokens"] for s in steps) > 0
    masked = [g for g in groups if g["outcome"] == "trained" and g["masked_tokens"] > 0]
    assert masked and all(g["masked_tokens"] < g["tokens"] for g in masked)
