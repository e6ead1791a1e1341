"""The whole pipeline with a fake engine and a fake trainer: a run, and each stage's ways to fail."""

import asyncio

import numpy as np
import pytest

from async_rl.controller.checkpoints import read_run_state
from async_rl.metrics.report import read_run, write_report
from async_rl.metrics.trace import read_trace
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.run import causes
from async_rl.trainer.batch.forest import prefixes_of
from message_queue.errors import EngineError, RolloutError
from tests.flow.harness import FakeTrainer, Harness
from tests.helpers.traces import CHAIN, check_trace

pytestmark = pytest.mark.virtual_time


def prefixes_in_groups(batch):
    """Prefixes of the sequences of each group, by their content."""
    contents = [batch.contents[group] for group in sorted(set(batch.index[:, 0].tolist()))]
    return [prefix for content in contents for prefix in prefixes_of([s for of in content for s in of])]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("on_update", ["resume", "drain"])
async def test_run_trains_every_step_within_the_bound(tmp_path, max_staleness, on_update):
    harness = Harness(tmp_path, max_staleness=max_staleness, on_update=on_update, trainer=FakeTrainer(step_s=0.01))
    assert await harness.run()
    steps = harness.check_staleness(max_staleness)
    assert [s["train_step"] for s in steps] == list(range(1, 7))
    assert [s["param_version"] for s in steps] == list(range(1, 7))
    assert all(s["routing/missing_fraction"] == 0 for s in steps)
    assert harness.check_ledger()["trained"] == 6 * 4
    assert harness.trainer.exported == list(range(1, 7))
    kinds = check_trace(tmp_path, trained=[group["group"] for group in harness.groups("trained")])
    assert kinds["worker-0"] == {"trajectory", "generate", "wait_group"}
    assert kinds["fake-0"] == {"fetch", "pause", "load", "abort" if on_update == "resume" else "drain"}
    replica = [event["tid"] for event in read_trace(tmp_path / "trace.json") if event["pid"] == "fake-0"]
    assert set(replica) == {"fake-0 publish 0"}, "a load is inside its pause"
    assert kinds["controller"] >= {*CHAIN, "wait", "export", "checkpoint"} - {"trajectory"}
    for batch in harness.trainer.batches:
        assert batch.temperature == 0.5, "of rollout.sampling"
        for sequence in map(batch.sequence, range(len(batch))):
            rows = sequence.routed_experts
            assert (rows[:-1] >= 0).all() and (rows[-1] == -1).all()
        shared = [tokens for _, tokens in batch.prefixes]
        assert shared == [tokens for _, tokens in prefixes_in_groups(batch)] and max(shared) > 0


async def test_rollout_continues_while_the_trainer_trains(tmp_path):
    harness = Harness(tmp_path, max_staleness=1, token_s=0.001, trainer=FakeTrainer(step_s=0.1))
    await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert any(s["staleness/max"] == 1 for s in steps)
    assert np.mean([s["idle/trainer"] for s in steps[2:]]) < 0.5


class KeepingTrainer(FakeTrainer):
    """Notes, at each export, the oldest version that it keeps and the version of each replica."""

    async def export(self, directory, *, version, keep_version):
        self.noted = [*getattr(self, "noted", []), (keep_version, [r.weights.version for r in self.replicas])]
        return await super().export(directory, version=version, keep_version=keep_version)


@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_export_removes_a_version_once_no_replica_needs_it(tmp_path, max_staleness):
    trainer = KeepingTrainer(step_s=0.001)
    harness = Harness(
        tmp_path, max_staleness=max_staleness, trainer=trainer, replica_options=[{"load_s": 0.01}, {"load_s": 0.03}]
    )
    trainer.replicas = harness.replicas
    await harness.run()
    assert all(kept <= min(versions) for kept, versions in trainer.noted)
    assert trainer.noted[-1][0] >= 3, "of 6 versions at most one is being loaded, one waits, and one is written"
    if not max_staleness:
        assert [kept for kept, _ in trainer.noted] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "stages", "cause"),
    [
        ({"trainer": FakeTrainer(fail_at=3)}, ["train"], "rank 0 ran out of memory"),
        ({"replica_options": {"fail_load": EngineError("fake-0: no room")}}, ["publish"], "fake-0: no room"),
        (
            {"replica_options": {"load_s": 1e9}, "publish_timeout_s": 0.1},
            ["publish", "rollout", "watch"],
            "sync.timeout_s",
        ),
        ({"replica_options": {"fail": lambda _: EngineError("fake-0 is dead")}}, ["rollout"], "fake-0 is dead"),
        ({"order": lambda index: {}[index]}, ["feed"], "KeyError"),
    ],
    ids=["train", "publish", "publish-hangs", "rollout", "feed"],
)
async def test_run_ends_with_the_cause_of_a_failed_stage(tmp_path, options, stages, cause):
    harness = Harness(tmp_path, **options)
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    lines = list(causes(caught.value))
    assert any(line.startswith(f"stage {stage} ") and cause in line for line in lines for stage in stages), lines
    harness.check_ledger()


async def test_run_ends_if_its_full_queue_is_closed(tmp_path):
    harness = Harness(tmp_path, trainer=FakeTrainer(step_s=10))
    run = asyncio.create_task(harness.run())
    await asyncio.sleep(0.2)
    await harness.queue.close()
    with pytest.raises(ExceptionGroup) as caught:
        await run
    assert any("closed" in line for line in causes(caught.value))
    harness.check_ledger()


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.02, 0.04, 0.06, 0.09])
async def test_cancelled_run_leaves_no_task_and_a_closed_ledger(tmp_path, after_s):
    harness = Harness(tmp_path, token_s=0.001, trainer=FakeTrainer(step_s=0.01), steps=1000)
    before = asyncio.all_tasks()
    run = asyncio.create_task(harness.run())
    await asyncio.sleep(after_s)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == before
    harness.check_ledger()


@pytest.mark.parametrize("how", ["last step", "stop request", "failure", "cancellation"])
async def test_run_ends_beside_a_worker_that_blocks_in_a_publish(tmp_path, how):
    trainer = FakeTrainer(step_s=0.01, fail_at=2 if how == "failure" else None)
    harness = Harness(tmp_path, steps=1 if how == "last step" else 4, max_staleness=4, trainer=trainer)
    (worker,), blocked = harness.workers, asyncio.Event()

    async def adopt(tools_paused, avoided):
        blocked.set()
        await asyncio.Event().wait()

    async def flush():
        raise WorkerLostError("worker-0: flush took longer than 20 s")

    worker.adopt, worker.flush = adopt, flush
    run = asyncio.create_task(harness.run(timeout_s=20))
    await blocked.wait()
    if how == "stop request":
        while len(trainer.exported) < 3:  # noqa: ASYNC110 - the third waits for the first to be published
            await asyncio.sleep(0.001)
        harness.parts.request_stop()
    if how == "cancellation":
        run.cancel()
    with pytest.raises((ExceptionGroup, asyncio.CancelledError)) as caught:  # as no other worker may be started
        await run
    assert isinstance(caught.value, asyncio.CancelledError) == (how == "cancellation")
    assert "worker-0 is lost" in "\n".join(harness.spy.notes)


async def test_stopped_run_continues_from_its_checkpoint_without_a_journal(tmp_path):
    first = Harness(tmp_path, steps=8, token_s=0.001, trainer=FakeTrainer(step_s=0.01))
    run = asyncio.create_task(first.run())
    await first.trainer.three_done.wait()
    first.parts.request_stop()
    assert await run is False
    state = read_run_state(first.checkpoints.latest())
    assert state.train_step == len(first.trainer.batches)

    second = Harness(tmp_path, steps=8, token_s=0.001, trainer=FakeTrainer(step_s=0.01), start=state)
    assert await second.run()
    assert len(first.trainer.batches) + len(second.trainer.batches) == 8
    steps = second.check_staleness(1)
    assert [s["train_step"] for s in steps] == [s["param_version"] for s in steps] == list(range(1, 9))
    trained = [g["group"] for g in second.groups("trained")]
    assert len(trained) == len(set(trained)) == 8 * 4
    assert second.lines("ledger.jsonl")[-1]["error"] == 0


async def test_the_trainer_continues_while_a_checkpoint_is_written(tmp_path):
    harness = Harness(tmp_path, steps=3, checkpoint_every=2, trainer=FakeTrainer(saves_slowly=True))
    assert await harness.run()
    state = read_run_state(harness.checkpoints.steps()[2])
    assert (state.train_step, state.queue.ledger.trained) == (2, 2 * 4)
    assert state.version_updates[state.param_version] == max(state.version_updates.values()) == 2
    assert read_run_state(harness.checkpoints.latest()).train_step == 3


async def test_a_stop_is_obeyed_though_a_batch_is_ready(tmp_path):
    class StoppingTrainer(FakeTrainer):
        async def train(self, batch):
            metrics = await super().train(batch)
            if len(self.batches) == 3:
                while (await harness.queue.snapshot()).ready < 4:  # noqa: ASYNC110 - a batch
                    await asyncio.sleep(0)
                harness.parts.request_stop()
            return metrics

    harness = Harness(tmp_path, max_staleness=3, steps=8, trainer=StoppingTrainer())
    assert await harness.run() is False
    assert len(harness.trainer.batches) == 3


@pytest.mark.parametrize("load_s", [0.0, 0.1])
async def test_validation_runs_before_during_and_after_training(tmp_path, load_s):
    harness = Harness(tmp_path, validate_every=2, trainer=FakeTrainer(step_s=0.02), replica_options={"load_s": load_s})
    await harness.run()
    rounds = harness.lines("validation.jsonl")
    assert rounds[0]["train_step"] == 0 and rounds[-1]["validation/min_version"] == 6
    if not load_s:
        assert [r["train_step"] for r in rounds] == [0, 2, 4, 6]
    kinds = check_trace(tmp_path, trained=[group["group"] for group in harness.groups("trained")])
    assert kinds["worker-0"] == {"trajectory", "generate", "wait_group", "validation"}
    spans = [event["args"] for event in read_trace(tmp_path / "trace.json") if event["cat"] == "validation"]
    asked = [(number, rollout) for number in range(1, len(rounds) + 1) for rollout in range(5)]
    assert sorted((span["round"], span["rollout"]) for span in spans) == asked
    harness.check_ledger()


@pytest.mark.parametrize("error", [RolloutError("no judge"), KeyError("answer")], ids=["RolloutError", "KeyError"])
@pytest.mark.parametrize("num_failed", [2, 5])
async def test_validation_counts_failed_rollouts_apart(tmp_path, error, num_failed):
    def fail(session):
        return error if int(session.rpartition("-")[2]) < num_failed else None

    harness = Harness(tmp_path, validate_every=2, steps=2, validation_fail=fail)
    assert await harness.run()
    rounds = harness.lines("validation.jsonl")
    assert [r["validation/failed"] for r in rounds] == [num_failed] * 2
    assert all((r["validation/success"] is None) == (num_failed == 5) for r in rounds)
    assert len([note for note in harness.spy.notes if str(error.args[0]) in note]) == 2


async def test_the_first_round_is_of_the_start_weights_while_the_first_batch_is_trained(tmp_path):
    trainer = FakeTrainer(step_s=0.001)
    harness = Harness(tmp_path, validate_every=100, steps=4, max_staleness=3, trainer=trainer)
    (worker,), exported = harness.workers, asyncio.Event()
    export, validate = trainer.export, worker.validate

    async def noted_export(*args, **options):
        exported.set()
        return await export(*args, **options)

    async def late_validate(*args, **options):
        await exported.wait()
        await asyncio.sleep(0.05)  # without the wait of the publish it would be loaded by then
        return await validate(*args, **options)

    trainer.export, worker.validate = noted_export, late_validate
    assert await harness.run()
    first, last = harness.lines("validation.jsonl")
    assert (first["train_step"], first["validation/min_version"], first["validation/max_version"]) == (0, 0, 0)
    assert (last["train_step"], last["validation/min_version"]) == (4, 4)


async def test_run_of_no_train_steps_validates_once_and_saves(tmp_path):
    harness = Harness(tmp_path, validate_every=2, steps=0)
    assert await harness.run()
    assert [r["train_step"] for r in harness.lines("validation.jsonl")] == [0]
    assert read_run_state(harness.checkpoints.latest()).train_step == 0
    assert not harness.lines("metrics.jsonl") and not harness.trainer.batches
    assert harness.check_ledger()["trained"] == 0
    write_report([read_run(tmp_path)], tmp_path / "report.html")

    longer = Harness(tmp_path, steps=2, start=read_run_state(harness.checkpoints.latest()))
    assert await longer.run()
    assert [s["train_step"] for s in longer.lines("metrics.jsonl")] == [1, 2]
