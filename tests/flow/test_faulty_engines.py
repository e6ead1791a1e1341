"""The whole pipeline with engines that answer nonsense now and then, and a replica that dies or hangs."""

import asyncio
import itertools
import zlib

import numpy as np
import pytest

from agent_loop.loop import TurnLimits
from async_rl.run import causes
from async_rl.simulator.virtual_time import run_in_virtual_time
from message_queue.heads import head_of
from message_queue.trajectory import PromptGroup
from tests.flow.harness import FakeTrainer, Harness
from tests.flow.test_pipeline import check_ledger
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions
from tests.helpers.fakes import fake_logprob, true_rows
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
    """Group id -> what was put into the queue."""
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


def check_trained(harness, groups):
    """Every token that was trained is one that an engine sampled, with its logprob and its rows."""
    trained = [g["group"] for g in harness.lines("ledger.jsonl") if g["outcome"] == "trained"]
    assert trained
    for trajectory in (t for group in trained for t in groups[group].trajectories):
        tokens, versions = trajectory.token_ids(), param_versions(trajectory)
        logprobs = [
            fake_logprob(int(token), at, int(version)) if version >= 0 else 0.0
            for at, (token, version) in enumerate(zip(tokens, versions, strict=True))
        ]
        np.testing.assert_allclose(behaviour_logprobs(trajectory), logprobs, rtol=1e-6)
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    return [t for group in trained for t in groups[group].trajectories]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_nonsense_is_asked_for_again_and_a_dead_replica_is_left_out(tmp_path, on_update, kv):
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
    total = check_ledger(harness)
    assert total["trained"] == 10 * 4
    assert total["dropped"] == 0, [g for g in harness.lines("ledger.jsonl") if g.get("reason")]
    assert list(harness.pool.lost) == ["fake-0"]
    assert any("fake-0 is lost, 1 left" in note and "killed in a load" in note for note in harness.spy.notes)
    trained = check_trained(harness, groups)
    assert sum(t.info["refused_answers"] for t in trained) > 5
    assert {s.replica for t in trained for s in t.segments} == {"fake-0", "fake-1"}
    assert all(s["staleness/max"] <= 2 for s in harness.lines("metrics.jsonl"))


async def test_a_replica_that_dies_in_the_middle_of_its_decodes_loses_no_rollout(tmp_path):
    harness = Harness(
        tmp_path, token_s=0.001, mean_length=40, steps=8, trainer=FakeTrainer(step_s=0.01), replica_options=[{}, {}]
    )
    groups = record_groups(harness)
    run = asyncio.create_task(harness.run())
    await harness.trainer.three_done.wait()
    while not harness.replicas[0].in_flight:  # noqa: ASYNC110 - it is a matter of a few turns of the loop
        await asyncio.sleep(0)
    harness.replicas[0].die("out of memory")
    assert await run
    assert check_ledger(harness)["dropped"] == 0
    check_trained(harness, groups)


def test_rollouts_that_go_back_to_a_replica_with_older_weights_stay_within_the_bound(tmp_path):
    run_in_virtual_time(go_back_to_older_weights(tmp_path))


async def go_back_to_older_weights(tmp_path):
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
    assert await harness.run()
    assert check_ledger(harness)["dropped"] == 0
    trained = check_trained(harness, groups)
    versions = [param_versions(t)[loss_mask(t)] for t in trained]
    assert any((np.diff(v) < 0).any() for v in versions)
    assert all(s["staleness/max"] <= 2 for s in harness.lines("metrics.jsonl"))
    for group in groups.values():
        assert min(head_of(group).tokens_per_version()) >= group.admitted_version


async def test_a_replica_that_hangs_is_found_by_the_next_publish_and_its_rollouts_go_on_elsewhere(tmp_path):
    harness = Harness(
        tmp_path,
        token_s=0.001,
        steps=8,
        publish_timeout_s=0.2,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{}, {}],
    )
    groups = record_groups(harness)
    run = asyncio.create_task(harness.run())
    await harness.trainer.three_done.wait()
    harness.replicas[0].hang()
    assert await run
    assert check_ledger(harness)["dropped"] == 0
    assert "sync.timeout_s" in harness.pool.lost["fake-0"]
    check_trained(harness, groups)


async def test_a_replica_that_hangs_while_the_trainer_waits_for_its_rollouts_is_found_by_the_watch(tmp_path):
    harness = Harness(tmp_path, token_s=0.001, steps=8, trainer=FakeTrainer(step_s=0.01), replica_options=[{}, {}])
    groups = record_groups(harness)
    watch = asyncio.create_task(harness.pool.watch(every_s=0.05, timeout_s=0.1))
    run = asyncio.create_task(harness.run())
    await asyncio.sleep(0.005)
    harness.replicas[0].hang()
    assert await run
    watch.cancel()
    assert check_ledger(harness)["dropped"] == 0
    assert harness.pool.lost == {"fake-0": "fake-0 did not answer within 0.1 s"}
    check_trained(harness, groups)


async def test_when_the_last_replica_dies_the_run_ends_and_names_them_all(tmp_path):
    harness = Harness(
        tmp_path, replica_options=[{"die_at_load": 2}, {"die_at_load": 3}], trainer=FakeTrainer(step_s=0.01)
    )
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    line = next(causes(caught.value))
    assert "all 2 replicas are lost" in line and "fake-0" in line and "fake-1" in line
    check_ledger(harness)


async def test_an_engine_that_answers_nothing_else_costs_groups_with_their_reason_and_not_the_ledger(tmp_path):
    limits = TurnLimits(max_turns=1, max_tokens=60, generate_timeout_s=30, max_refused_answers=1)
    bad = itertools.cycle([None] * 20 + [FAULTS["an expert twice"]] * 8)
    harness = Harness(
        tmp_path,
        limits=limits,
        replica_options={"faults": bad},
        trainer=FakeTrainer(step_s=0.01),
        max_failed_groups=100,  # how many fail in a row is up to the order in which requests come
    )
    groups = record_groups(harness)
    assert await harness.run()
    assert check_ledger(harness)["dropped"] > 0
    reasons = [g["reason"] for g in harness.lines("ledger.jsonl")[:-1] if g["reason"]]
    assert all("RolloutError" in r and "fake-0" in r and "duplicate expert" in r for r in reasons), reasons
    check_trained(harness, groups)


@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_every_way_to_merge_rows_trains_through_faults_and_a_death(tmp_path, resume_routing):
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
    assert check_ledger(harness)["dropped"] == 0
    assert any(s["partial/resumed_fraction"] > 0 for s in harness.lines("metrics.jsonl"))
