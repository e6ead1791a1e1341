"""Publishes that pause a part of the replicas at a time, in the whole pipeline."""

import pytest

from async_rl.config import MismatchConfig
from async_rl.inference.supervisor import SupervisionConfig
from tests.flow.harness import FakeTrainer, Harness
from tests.helpers.dense import param_versions

REPLICAS = [{"load_s": 0.004}, {"load_s": 0.008}, {"load_s": 0.006}]


def rolling(tmp_path, **options):
    options = {"replica_options": REPLICAS, "max_paused": 1, "token_s": 0.001, "mean_length": 25, **options}
    return Harness(tmp_path, trainer=FakeTrainer(step_s=0.01), **options)


def watch_admissions(harness):
    """Version of each admission, with the oldest version that a live replica serves at that time."""
    admit, seen = harness.queue.admit, []

    async def watched(prompt):
        admission = await admit(prompt)
        oldest = min(member.replica.weights.version for member in harness.pool.live)
        seen.append((admission.admitted_version, oldest))
        return admission

    harness.queue.admit = watched
    return seen


def watch_trajectories(harness):
    """Finished trajectories of all groups."""
    seen = []

    def wrap(roll):
        async def watched(*args, **options):
            group = await roll(*args, **options)
            seen.extend(getattr(group, "trajectories", ()))
            return group

        return watched

    harness.wrap_roll = wrap
    return seen


def watch_pauses(harness):
    """Numbers of paused replicas, one for each pause."""
    paused, counts = set(), []

    def watch(replica):
        pause, resume = replica.pause, replica.resume

        async def watched_pause():
            paused.add(replica.name)
            counts.append(len(paused & {member.name for member in harness.pool.live}))
            await pause()

        async def watched_resume():
            await resume()
            paused.discard(replica.name)

        replica.pause, replica.resume = watched_pause, watched_resume

    for replica in harness.replicas:
        watch(replica)
    return counts


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_rolling_run_holds_the_bound_and_loses_nothing(tmp_path, on_update, max_staleness):
    harness = rolling(tmp_path, steps=12, on_update=on_update, max_staleness=max_staleness)
    admissions, trajectories, pauses = watch_admissions(harness), watch_trajectories(harness), watch_pauses(harness)
    assert await harness.run()
    harness.check_staleness(max_staleness)
    total = harness.check_ledger()
    assert total["trained"] == 12 * 4 and not total["dropped"]
    assert pauses == [1] * 36
    assert all(admitted <= oldest for admitted, oldest in admissions)
    sampled = sum(len(s) for t in trajectories for s in t.segments)
    assert sampled == sum(g["tokens"] for g in (*harness.groups("trained"), *harness.groups("open")))
    if max_staleness == 3 and on_update == "resume":
        versions = [v[v >= 0].tolist() for v in map(param_versions, trajectories)]
        assert any(len(set(v)) > 1 for v in versions)
        moved = [t for t in trajectories if len({s.replica for s in t.segments}) > 1]
        assert moved, "an aborted rollout continues at another replica"


async def test_rolling_run_replaces_a_replica_that_dies_in_a_load(tmp_path):
    options = [REPLICAS[0], {**REPLICAS[1], "die_at_load": 2}, REPLICAS[2]]
    harness = rolling(
        tmp_path, steps=10, max_staleness=1, replica_options=options, supervision=SupervisionConfig(max_restarts=1)
    )
    assert await harness.run()
    harness.check_staleness(1)
    assert harness.check_ledger()["trained"] == 10 * 4
    assert {member.name for member in harness.pool.live} == {"fake-0", "fake-2", "fake-3"}
    assert {replica.weights.version for replica in harness.replicas if replica.name != "fake-1"} == {10}


async def test_probe_of_a_rolling_publish_compares_the_new_version_of_each_replica(tmp_path):
    harness = rolling(tmp_path, steps=6, max_staleness=1, probe=MismatchConfig(prompts=2, tokens=4))
    assert await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert all(s["mismatch/k3_probe"] < 1e-9 for s in steps)
    assert harness.trainer.scored == [0, 1, 2, 3, 4, 5, 6]
