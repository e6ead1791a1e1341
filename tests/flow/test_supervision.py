"""Failed replicas are replaced while the run continues."""

import asyncio

import pytest

from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from async_rl.run import causes
from tests.flow.harness import FakeReplica, FakeTrainer, Harness, check_trained
from tests.flow.test_faulty_engines import record_groups, trained_of

pytestmark = pytest.mark.virtual_time


def supervised(directory, *, step_s=0.01, max_restarts=2, window_s=600.0, **options):
    return Harness(
        directory,
        token_s=0.0005,
        steps=10,
        max_staleness=2,
        trainer=FakeTrainer(step_s=step_s),
        supervision=SupervisionConfig(max_restarts=max_restarts, window_s=window_s),
        **options,
    )


async def finished(harness):
    """Trained trajectories of a run without a dropped group."""
    groups = record_groups(harness)
    assert await harness.run()
    assert harness.check_ledger()["dropped"] == 0
    harness.check_staleness(2)
    trained = trained_of(harness, groups)
    check_trained(trained)
    return trained


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("others", [0, 1])
async def test_replacement_of_a_replica_serves_the_newest_weights(tmp_path, on_update, others):
    harness = supervised(tmp_path, on_update=on_update, replica_options=[{"die_at_load": 3}, *[{}] * others])
    trained = await finished(harness)
    new = harness.replicas[-1]
    assert new.name == f"fake-{others + 1}"
    assert [member.name for member in harness.pool.live] == [r.name for r in harness.replicas[1:]]
    assert new.loads[0][0] >= 3, "it joined with older weights"
    assert new.name in {s.replica for t in trained for s in t.segments}


@pytest.mark.parametrize(
    ("options", "live"),
    [
        (  # one does not start, and its successor dies
            {"replica_options": [{"die_at_load": 2}, {}], "new_replicas": [{"stillborn": True}, {"die_at_load": 5}]},
            ["fake-1"],
        ),
        (  # the limit is of a time
            {
                "replica_options": [{"die_at_load": 2}],
                "new_replicas": [{"die_at_load": 5}],
                "max_restarts": 1,
                "window_s": 0.03,
                "step_s": 0.02,
            },
            ["fake-2"],
        ),
        (  # each replica has its own limit
            {"replica_options": [{"die_at_load": version} for version in (2, 2, 4)], "max_restarts": 1},
            ["fake-3", "fake-4", "fake-5"],
        ),
    ],
    ids=["again", "window", "own"],
)
async def test_restarts_of_replicas_are_limited_each_in_a_time(tmp_path, options, live):
    harness = supervised(tmp_path, **options)
    await finished(harness)
    assert sorted(member.name for member in harness.pool.live) == live
    assert any("supervision.max_restarts" in note for note in harness.spy.notes) == (live == ["fake-1"])


@pytest.mark.parametrize("restarts", [False, True])
async def test_run_ends_with_the_names_of_its_replicas_if_all_failed(tmp_path, restarts):
    if restarts:
        options = {"replica_options": [{"die_at_load": 2}], "new_replicas": [{"die_at_load": 4}]}
        harness = supervised(tmp_path, max_restarts=1, **options)
    else:
        options = {"replica_options": [{"die_at_load": 2}, {"die_at_load": 3}]}
        harness = Harness(tmp_path, trainer=FakeTrainer(step_s=0.01), **options)
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    line = next(causes(caught.value))
    assert "fake-0" in line and "fake-1" in line
    harness.check_ledger()


@pytest.mark.parametrize(("field", "value"), [("max_restarts", -1), ("window_s", 0.0)])
def test_supervision_config_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=rf"supervision\.{field}"):
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
    (note,) = notes
    assert "fake-3" in note and "fake-0" in note
