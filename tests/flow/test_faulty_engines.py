"""The whole pipeline with engines that sometimes answer nonsense, and a replica that dies or hangs."""

import asyncio
import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest

from async_rl.simulator.virtual_time import run_in_virtual_time
from message_queue.heads import head_of
from message_queue.trajectory import PromptGroup
from tests.flow.harness import LIMITS, FakeTrainer, Harness, check_trained
from tests.helpers.dense import loss_mask, param_versions
from tests.helpers.faults import FAULTS


def now_and_then(share):
    """Spoils one in `share` answers, each in one of all ways; never the third request of a rollout or a later one."""

    def spoil(request, answer):
        draw = zlib.crc32(request.request_id.encode())
        if draw % share or not request.request_id.endswith(("#0.", "#1.")):
            return answer
        return list(FAULTS.values())[draw // share % len(FAULTS)](request, answer)

    return itertools.repeat(spoil)


def record_groups(harness):
    """Group id -> group that was put into the queue."""
    groups = {}

    def recorded(roll):
        async def rolled(prompt, admission, **options):
            group = await roll(prompt, admission, **options)
            if isinstance(group, PromptGroup):
                groups[group.group] = group
            return group

        return rolled

    harness.wrap_roll = recorded
    return groups


def trained_of(harness, groups):
    """Trajectories of the groups that were trained."""
    return [t for line in harness.groups("trained") for t in groups[line["group"]].trajectories]


@pytest.mark.parametrize(
    ("on_update", "kv"), [("resume", "recompute"), ("keep", "recompute"), ("keep", "keep"), ("drain", "recompute")]
)
async def test_faulty_answers_are_retried_and_a_dead_replica_is_left_out(tmp_path, on_update, kv):
    harness = Harness(
        tmp_path,
        on_update=on_update,
        kv=kv,
        token_s=0.0005,
        steps=10,
        max_staleness=2,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[
            {"faults": now_and_then(3), "edge": True, "die_at_load": 4},
            {"faults": now_and_then(4), "edge": False},
        ],
    )
    groups = record_groups(harness)
    assert await harness.run()
    total = harness.check_ledger()
    assert (total["trained"], total["dropped"]) == (10 * 4, 0)
    assert list(harness.pool.lost) == ["fake-0"]
    trained = trained_of(harness, groups)
    check_trained(trained)
    assert sum(t.info["refused_answers"] for t in trained) > 5
    assert {s.replica for t in trained for s in t.segments} == {"fake-0", "fake-1"}
    harness.check_staleness(2)


@pytest.mark.parametrize("how", ["dies", "hangs in a publish", "hangs beside the watch"])
async def test_a_replica_that_fails_during_its_decodes_costs_no_rollout(tmp_path, how):
    harness = Harness(
        tmp_path,
        token_s=0.001,
        mean_length=40,
        steps=8,
        publish_timeout_s=0.2 if how == "hangs in a publish" else 60,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{}, {}],
    )
    groups = record_groups(harness)
    replica, trainer = harness.replicas[0], harness.trainer
    watch = asyncio.create_task(harness.pool.watch(every_s=0.05, timeout_s=0.1)) if "watch" in how else None
    run = asyncio.create_task(harness.run())
    while not replica.in_flight or (watch is None and not trainer.three_done.is_set()):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    if how == "dies":
        replica.die("out of memory")
    else:
        replica.hang()
    assert await run
    if watch is not None:
        watch.cancel()
    assert harness.check_ledger()["dropped"] == 0
    assert list(harness.pool.lost) == ["fake-0"]
    assert ("sync.timeout_s" in harness.pool.lost["fake-0"]) == (how == "hangs in a publish")
    check_trained(trained_of(harness, groups))


def test_rollouts_that_return_to_older_weights_stay_within_the_bound(tmp_path):
    harness = Harness(
        tmp_path,
        token_s=0.002,
        mean_length=8,
        turns=6,
        max_staleness=2,
        steps=8,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_after_resume": 3}, {"pause_s": 0.05}],  # the first has its weights well before the other
    )
    groups = record_groups(harness)
    assert run_in_virtual_time(harness.run())
    assert harness.check_ledger()["dropped"] == 0
    trained = trained_of(harness, groups)
    check_trained(trained)
    versions = [param_versions(t)[loss_mask(t)] for t in trained]
    assert any((np.diff(v) < 0).any() for v in versions)
    harness.check_staleness(2)
    for group in groups.values():
        assert min(head_of(group).tokens_per_version()) >= group.admitted_version


async def test_an_engine_of_faulty_answers_costs_groups_with_their_reason(tmp_path):
    bad = itertools.cycle([None] * 20 + [FAULTS["an expert twice"]] * 8)
    harness = Harness(
        tmp_path,
        limits=replace(LIMITS, max_refused_answers=1),
        replica_options={"faults": bad},
        trainer=FakeTrainer(step_s=0.01),
        max_failed_groups=100,  # the number of failures in a row depends on the order of requests
    )
    groups = record_groups(harness)
    assert await harness.run()
    assert harness.check_ledger()["dropped"] > 0
    assert all("RolloutError" in g["reason"] and "fake-0" in g["reason"] for g in harness.groups("dropped"))
    check_trained(trained_of(harness, groups))


@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_resume_routing_trains_through_faults_and_a_death(tmp_path, resume_routing):
    harness = Harness(
        tmp_path,
        resume_routing=resume_routing,
        token_s=0.001,
        mean_length=40,
        max_staleness=2,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"faults": now_and_then(3), "die_at_load": 3}, {"faults": now_and_then(4), "edge": False}],
    )
    assert await harness.run()
    assert harness.check_ledger()["dropped"] == 0
    assert any(s["partial/resumed_fraction"] > 0 for s in harness.lines("metrics.jsonl"))
