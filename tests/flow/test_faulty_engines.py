"""The whole pipeline with engines that sometimes answer nonsense, and replicas that die, hang and are replaced."""

import asyncio
import itertools
import zlib
from dataclasses import replace

import pytest

from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from message_queue.trajectory import PromptGroup
from tests.flow.harness import LIMITS, FakeReplica, FakeTrainer, Harness, check_trained
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


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.virtual_time
async def test_replacement_of_a_replica_serves_the_newest_weights(tmp_path, others):
    harness = Harness(
        tmp_path,
        steps=10,
        max_staleness=2,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_at_load": 3}, *[{}] * others],
        supervision=SupervisionConfig(max_restarts=2),
    )
    groups = record_groups(harness)
    assert await harness.run()
    assert harness.check_ledger()["dropped"] == 0
    harness.check_staleness(2)
    trained = trained_of(harness, groups)
    check_trained(trained)
    new = harness.replicas[-1]
    assert new.name == f"fake-{others + 1}"
    assert [member.name for member in harness.pool.live] == [r.name for r in harness.replicas[1:]]
    assert new.loads[0][0] >= 3, "it joined with older weights"
    assert new.name in {s.replica for t in trained for s in t.segments}


@pytest.mark.parametrize(("field", "value"), [("max_restarts", -1), ("window_s", 0.0)])
def test_supervision_config_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=rf"supervision\.{field}"):
        SupervisionConfig(**{field: value})


@pytest.mark.virtual_time
async def test_a_restart_of_a_replica_that_is_cut_off_is_counted_once():
    lost, other = (FakeReplica([[1]], name=f"fake-{i}") for i in range(2))
    pool, notes, tries = ReplicaPool([lost, other]), [], []

    async def start(_lost, /, *, slot, name):
        tries.append((slot, name))
        if len(tries) == 1:
            await asyncio.Event().wait()
        return FakeReplica([[1]], name=name)

    class Nowhere:
        async def bring_up(self, replica, *, slot):
            pool.join(replica, slot=slot)

    config = SupervisionConfig(max_restarts=1)
    supervisor = Supervisor(pool, Nowhere(), start=start, config=config, note=notes.append)
    pool.lose(pool.live[0], reason="it died")
    for count in (1, 2):
        watch = asyncio.create_task(supervisor.watch(every_s=60, timeout_s=60))
        async with asyncio.timeout(5):
            while len(tries) < count or (count == 2 and not notes):  # noqa: ASYNC110 - other tasks do it
                await asyncio.sleep(0)
        watch.cancel()
        await asyncio.wait({watch})
    assert tries == [(0, "fake-2"), (0, "fake-3")]
    (note,) = notes
    assert "fake-3" in note and "fake-0" in note
