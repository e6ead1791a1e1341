"""Publishes that pause a part of the replicas at a time, in the whole pipeline."""

import pytest

from async_rl.config import MismatchConfig
from tests.flow.harness import FakeTrainer, Harness
from tests.flow.test_faulty_engines import record_groups
from tests.helpers.dense import param_versions

REPLICAS = [{"load_s": 0.004}, {"load_s": 0.008}, {"load_s": 0.006}]


def rolling(tmp_path, **options):
    options = {"replica_options": REPLICAS, "max_paused": 1, "token_s": 0.001, "mean_length": 25, **options}
    return Harness(tmp_path, trainer=FakeTrainer(step_s=0.01), **options)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_rolling_run_holds_the_bound_and_loses_nothing(tmp_path, on_update, max_staleness):
    harness = rolling(tmp_path, steps=12, on_update=on_update, max_staleness=max_staleness)
    groups = record_groups(harness)
    assert await harness.run()
    harness.check_staleness(max_staleness)
    total = harness.check_ledger()
    assert total["trained"] == 12 * 4 and not total["dropped"]
    if max_staleness == 3 and on_update == "resume":
        trajectories = [trajectory for group in groups.values() for trajectory in group.trajectories]
        versions = [v[v >= 0].tolist() for v in map(param_versions, trajectories)]
        assert any(len(set(v)) > 1 for v in versions)
        moved = [t for t in trajectories if len({s.replica for s in t.segments}) > 1]
        assert moved, "an aborted rollout continues at another replica"


async def test_probe_of_a_rolling_publish_compares_the_new_version_of_each_replica(tmp_path):
    harness = rolling(tmp_path, steps=6, max_staleness=1, probe=MismatchConfig(prompts=2, tokens=4))
    assert await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert all(s["mismatch/k3_probe"] < 1e-9 for s in steps)
    assert harness.trainer.scored == [0, 1, 2, 3, 4, 5, 6]
