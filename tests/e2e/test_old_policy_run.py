"""Whole runs whose every token is verified under the weights that sampled it, at each staleness up to the bound."""

import pytest

from tests.e2e.runs import check_records, check_rollouts, complete, k3_bound
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]
ENGINES = {
    "vllm": (),
    "sglang": ("engine=sglang", "engine.kv_cache_tokens=16384", "task.options.dense_first_layer=false"),
}
OLD = (
    "rollout.groups_per_batch=2",
    "rollout.resume_routing=force",
    "optimizer.lr=1e-3",
    "loss=ppo_clip",
    "loss.ratio=separated",
    "validation.prompts=0",
)


def run(directory, engine, *overrides, steps, bound):
    """Train steps of a run in which every token is exact and within the bound of rounding."""
    warm = directory / "warm_start"
    settings = (f"staleness.max_staleness={bound}", f"total_train_steps={steps}")
    complete(directory, warm, *OLD, *ENGINES[engine], *settings, *overrides)
    found, groups = check_records(directory, steps=steps, staleness=bound)
    check_rollouts(directory, found, groups)
    trained = [s for s in found if s["tokens"]]
    assert all(s["old/exact_fraction"] == 1 and s["old/missing_fraction"] == 0 for s in trained)
    assert max(s["old/k3_largest"] for s in trained) <= k3_bound(warm)
    assert max(s["old/movement_k3"] for s in trained) > 1e3 * max(s["old/k3"] for s in trained)
    assert all(s["mismatch/k3_probe"] is None for s in found), "the probe is not needed"
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_token_has_the_logprob_of_its_version_up_to_staleness_sixteen(tmp_path, engine):
    steps = run(tmp_path, engine, "sync.every=16", steps=20, bound=16)
    assert max(s["staleness/max"] for s in steps) >= 15


@pytest.mark.parametrize("engine", ENGINES)
def test_every_token_of_a_resumed_rollout_has_the_logprob_of_its_version(tmp_path, engine):
    uneven = ("task.factory=tests.e2e.tasks:uneven_task", f"+task.options.run_directory={tmp_path}")
    limits = ("rollout.limits.max_tokens=960", "engine.max_model_len=1024")
    steps = run(tmp_path, engine, *uneven, *limits, steps=8, bound=4)
    assert max(s["partial/resumed_fraction"] for s in steps) > 0, "no publish met a rollout in the engine"
