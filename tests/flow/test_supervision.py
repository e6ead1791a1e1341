"""Lost replicas are started anew while the run goes on."""

import asyncio

import pytest

from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from async_rl.run import causes
from tests.flow.harness import FakeReplica, FakeTrainer, Harness
from tests.flow.test_faulty_engines import check_trained, record_groups
from tests.flow.test_pipeline import check_ledger

SUPERVISED = {"token_s": 0.0005, "steps": 10, "max_staleness": 2, "supervision": SupervisionConfig(max_restarts=2)}


async def finished(harness):
    groups = record_groups(harness)
    assert await harness.run()
    assert check_ledger(harness)["dropped"] == 0
    assert all(s["staleness/max"] <= 2 for s in harness.lines("metrics.jsonl"))
    return check_trained(harness, groups)


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_lost_replica_is_replaced_by_one_that_serves_the_newest_weights(tmp_path, on_update, others):
    harness = Harness(
        tmp_path,
        on_update=on_update,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_at_load": 3}, *[{}] * others],
        **SUPERVISED,
    )
    trained = await finished(harness)
    new = harness.replicas[-1]
    assert new.name == f"fake-{others + 1}"
    assert [member.name for member in harness.pool.live] == [r.name for r in harness.replicas[1:]]
    assert new.loads[0][0] >= 3, "it joined with older weights"
    assert new.name in {s.replica for t in trained for s in t.segments}
    assert any(f"{new.name} serves in place of fake-0" in note for note in harness.spy.notes)


async def test_one_that_does_not_start_or_dies_again_is_tried_again_up_to_the_limit(tmp_path):
    harness = Harness(
        tmp_path,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_at_load": 2}, {}],
        new_replicas=[{"stillborn": True}, {"die_at_load": 5}],
        **SUPERVISED,
    )
    await finished(harness)
    assert [member.name for member in harness.pool.live] == ["fake-1"]
    notes = "\n".join(harness.spy.notes)
    assert "replica fake-2 did not start in place of fake-0" in notes and "it did not start" in notes
    assert "replica fake-3 serves in place of fake-0" in notes
    assert "replica fake-3 is not restarted: 2 restarts within 600 s (supervision.max_restarts)" in notes


async def test_the_limit_is_of_a_time(tmp_path):
    harness = Harness(
        tmp_path,
        trainer=FakeTrainer(step_s=0.02),
        replica_options=[{"die_at_load": 2}],
        new_replicas=[{"die_at_load": 5}],
        **SUPERVISED | {"supervision": SupervisionConfig(max_restarts=1, window_s=0.03)},
    )
    await finished(harness)
    assert [member.name for member in harness.pool.live] == ["fake-2"]


async def test_restarts_of_one_replica_use_up_none_of_another(tmp_path):
    harness = Harness(
        tmp_path,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_at_load": 2}, {"die_at_load": 2}, {"die_at_load": 4}],
        **SUPERVISED | {"supervision": SupervisionConfig(max_restarts=1)},
    )
    await finished(harness)
    assert sorted(member.name for member in harness.pool.live) == ["fake-3", "fake-4", "fake-5"]


async def test_when_none_can_be_started_any_more_the_run_ends_and_names_them_all(tmp_path):
    harness = Harness(
        tmp_path,
        trainer=FakeTrainer(step_s=0.01),
        replica_options=[{"die_at_load": 2}],
        new_replicas=[{"die_at_load": 4}],
        **SUPERVISED | {"supervision": SupervisionConfig(max_restarts=1)},
    )
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    line = next(causes(caught.value))
    assert "all 2 replicas are lost" in line and "fake-0" in line and "fake-1" in line
    check_ledger(harness)


@pytest.mark.parametrize(("field", "value"), [("max_restarts", -1), ("window_s", 0.0)])
def test_config_names_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=rf"supervision\.{field} is {value}"):
        SupervisionConfig(**{field: value})


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
    assert notes == ["replica fake-3 serves in place of fake-0"]
