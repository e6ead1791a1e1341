"""The whole pipeline with a fake engine and a fake trainer: what a run does, and how each stage may fail."""

import asyncio
import re

import numpy as np
import pytest

from agent_loop.engine import EngineError
from agent_loop.loop import RolloutError
from async_rl.controller.checkpoints import read_run_state
from async_rl.metrics.report import read_run, write_report
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.run import causes
from tests.flow.harness import FakeTrainer, Harness

DONE = {"trained", "dropped", "open"}


def check_ledger(harness):
    *groups, total = harness.lines("ledger.jsonl")
    assert total["error"] == 0
    assert total["admitted"] == len(groups) == total["trained"] + total["dropped"] + total["open"]
    assert sorted(g["group"] for g in groups) == list(range(len(groups)))
    assert {g["outcome"] for g in groups} <= DONE
    assert all(bool(g["reason"]) == (g["outcome"] == "dropped") for g in groups)
    return total


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("on_update", ["resume", "drain"])
async def test_a_run_trains_every_step_within_the_bound_and_closes_its_ledger(tmp_path, max_staleness, on_update):
    harness = Harness(tmp_path, max_staleness=max_staleness, on_update=on_update, trainer=FakeTrainer(step_s=0.01))
    assert await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, 7))
    assert [s["param_version"] for s in steps] == list(range(1, 7))
    assert all(s["staleness/max"] <= max_staleness and s["ledger/error"] == 0 for s in steps)
    assert all(s["routing/missing_fraction"] == 0 for s in steps)
    assert check_ledger(harness)["trained"] == 6 * 4
    assert harness.trainer.exported == list(range(1, 7))


async def test_staleness_zero_trains_only_on_the_current_weights(tmp_path):
    harness = Harness(tmp_path, max_staleness=0, trainer=FakeTrainer(step_s=0.01))
    await harness.run()
    for batch in harness.trainer.batches:
        assert all((batch.loss_tokens(number).lag == 0).all() for number in range(len(batch)))


async def test_rollout_goes_on_while_the_trainer_trains(tmp_path):
    harness = Harness(tmp_path, max_staleness=1, token_s=0.001, trainer=FakeTrainer(step_s=0.1))
    await harness.run()
    assert any(s["staleness/max"] == 1 for s in harness.lines("metrics.jsonl"))
    idle = [s["idle/trainer"] for s in harness.lines("metrics.jsonl")[2:]]
    assert np.mean(idle) < 0.5


async def test_aborted_rollouts_resume_with_every_row_from_the_weights_that_sampled_it(tmp_path):
    harness = Harness(tmp_path, max_staleness=4, token_s=0.002, mean_length=60, trainer=FakeTrainer(step_s=0.03))
    await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert max(s["partial/resumed_fraction"] for s in steps) > 0
    assert max(s["partial/max_segments"] for s in steps) >= 2
    for batch in harness.trainer.batches:
        for sequence in map(batch.sequence, range(len(batch))):
            rows = sequence.routed_experts
            assert (rows[:-1] >= 0).all() and (rows[-1] == -1).all()


async def test_several_updates_per_publish_count_as_staleness(tmp_path):
    harness = Harness(tmp_path, max_staleness=2, publish_every=2, trainer=FakeTrainer(step_s=0.01))
    await harness.run()
    steps = harness.lines("metrics.jsonl")
    assert [s["param_version"] for s in steps] == [0, 1, 1, 2, 2, 3]
    assert all(s["staleness/max"] <= 2 for s in steps)
    assert any(s["staleness/max"] > 0 for s in steps)


class KeepingTrainer(FakeTrainer):
    """Notes, at each export, the oldest version that it keeps and the version of each replica."""

    async def export(self, directory, *, version, keep_version):
        self.noted = [*getattr(self, "noted", []), (keep_version, [r.weights.version for r in self.replicas])]
        return await super().export(directory, version=version, keep_version=keep_version)


@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_a_version_is_removed_as_soon_as_no_replica_needs_it(tmp_path, max_staleness):
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


async def test_policy_drop_gives_up_what_expired_and_says_so(tmp_path):
    harness = Harness(
        tmp_path, policy="drop", max_staleness=1, token_s=0.002, mean_length=40, steps=8, trainer=FakeTrainer()
    )
    await harness.run()
    assert all(s["staleness/max"] <= 1 for s in harness.lines("metrics.jsonl"))
    total = check_ledger(harness)
    dropped = [g for g in harness.lines("ledger.jsonl") if g["outcome"] == "dropped"]
    assert total["dropped"] == len(dropped)
    assert all("expired" in g["reason"] for g in dropped if "group" in g)


async def test_a_failed_rollout_is_a_dropped_group_not_a_crash(tmp_path):
    harness = Harness(tmp_path, loop_fail=lambda prompt: RolloutError("reward died") if prompt.index % 5 == 2 else None)
    assert await harness.run()
    total = check_ledger(harness)
    assert total["dropped"] > 0
    assert any("reward died" in g["reason"] for g in harness.lines("ledger.jsonl")[:-1] if g["reason"])


async def test_too_many_failed_rollouts_in_a_row_stop_the_run_and_say_why(tmp_path):
    harness = Harness(tmp_path, loop_fail=lambda prompt: RolloutError("reward died"))
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    (line,) = causes(caught.value)
    assert "stage rollout failed" in line and "reward died" in line and "max_failed_groups" in line
    check_ledger(harness)


@pytest.mark.parametrize(
    ("options", "stage", "cause"),
    [
        ({"trainer": FakeTrainer(fail_at=3)}, "train", "rank 0 ran out of memory"),
        ({"replica_options": {"fail_load": EngineError("fake-0: no room")}}, "publish", "fake-0: no room"),
        (
            {"replica_options": {"hang_load": True}, "publish_timeout_s": 0.1},
            "(publish|rollout)",  # without replicas both fail
            "(sync.timeout_s) within 0.1 s",
        ),
        ({"engine_fail": lambda request: EngineError("fake-0 is dead")}, "rollout", "fake-0 is dead"),
    ],
    ids=["train", "publish", "publish-hangs", "rollout"],
)
async def test_a_failed_stage_ends_the_run_with_its_cause(tmp_path, options, stage, cause):
    harness = Harness(tmp_path, **options)
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    lines = list(causes(caught.value))
    assert any(re.match(f"stage {stage} failed", line) and cause in line for line in lines), lines
    check_ledger(harness)


async def test_a_failing_feed_ends_the_run_with_its_cause(tmp_path):
    harness = Harness(tmp_path)

    def broken():
        raise ValueError("prompt 3 is damaged")

    harness.pipeline._prompts.current = broken
    with pytest.raises(ExceptionGroup) as caught:
        await harness.run()
    assert "stage feed failed: ValueError: prompt 3 is damaged" in next(causes(caught.value))


async def test_closing_the_queue_while_it_is_full_ends_every_waiter(tmp_path):
    harness = Harness(tmp_path, trainer=FakeTrainer(step_s=10))
    run = asyncio.create_task(harness.run())
    await asyncio.sleep(0.2)
    await harness.queue.close()
    with pytest.raises(ExceptionGroup) as caught:
        await run
    assert any("closed" in line for line in causes(caught.value))
    check_ledger(harness)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.02, 0.04, 0.06, 0.09])
async def test_cancelling_the_run_anywhere_leaves_no_task_and_a_closed_ledger(tmp_path, after_s):
    harness = Harness(tmp_path, token_s=0.001, trainer=FakeTrainer(step_s=0.01), steps=1000)
    before = asyncio.all_tasks()
    run = asyncio.create_task(harness.run())
    await asyncio.sleep(after_s)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == before
    check_ledger(harness)


@pytest.mark.parametrize("how", ["last step", "stop request", "failure", "cancellation"])
async def test_a_worker_that_is_blocked_in_a_publish_does_not_hold_up_the_end(tmp_path, how):
    trainer = FakeTrainer(step_s=0.01, fail_at=2 if how == "failure" else None)
    harness = Harness(tmp_path, steps=1 if how == "last step" else 4, max_staleness=4, trainer=trainer)
    (worker,), blocked = harness.workers, asyncio.Event()

    async def pause_tools():
        blocked.set()
        await asyncio.Event().wait()

    async def flush():
        raise WorkerLostError("worker-0: flush took longer than 20 s")

    worker.pause_tools, worker.flush = pause_tools, flush
    run = asyncio.create_task(harness.run(timeout_s=20))
    await blocked.wait()
    if how == "stop request":
        while len(trainer.exported) < 3:  # noqa: ASYNC110 - the third waits for the first to be published
            await asyncio.sleep(0.001)
        harness.pipeline.request_stop()
    if how == "cancellation":
        run.cancel()
    with pytest.raises((ExceptionGroup, asyncio.CancelledError)) as caught:  # as no other worker may be started
        await run
    assert isinstance(caught.value, asyncio.CancelledError) == (how == "cancellation")
    assert "worker-0 is lost" in "\n".join(harness.spy.notes)


async def test_a_stop_request_saves_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    first = Harness(tmp_path, steps=8, token_s=0.001, trainer=FakeTrainer(step_s=0.01))
    run = asyncio.create_task(first.run())
    await first.trainer.three_done.wait()
    first.pipeline.request_stop()
    assert await run is False
    state = read_run_state(first.checkpoints.latest())
    assert state.train_step == len(first.trainer.batches)

    second = Harness(tmp_path, steps=8, token_s=0.001, trainer=FakeTrainer(step_s=0.01), start=state)
    assert await second.run()
    assert len(first.trainer.batches) + len(second.trainer.batches) == 8
    steps = second.lines("metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, 9))
    assert [s["param_version"] for s in steps] == list(range(1, 9))
    trained = [g["group"] for g in second.lines("ledger.jsonl") if g["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == 8 * 4
    assert second.lines("ledger.jsonl")[-1]["error"] == 0
    assert all(s["ledger/error"] == 0 for s in steps)


async def test_validation_runs_before_during_and_after_without_entering_the_ledger(tmp_path):
    harness = Harness(tmp_path, validate_every=2, trainer=FakeTrainer(step_s=0.02))
    await harness.run()
    rounds = harness.lines("validation.jsonl")
    assert [r["train_step"] for r in rounds] == [0, 2, 4, 6]
    assert rounds[-1]["validation/min_version"] == 6
    check_ledger(harness)


@pytest.mark.parametrize(
    "error", [RolloutError("no judge"), KeyError("answer")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("num_failed", [2, 5])
async def test_failed_validation_rollouts_are_counted_apart_and_said(tmp_path, error, num_failed):
    def fail(session):
        return error if int(session.rpartition("-")[2]) < num_failed else None

    harness = Harness(tmp_path, validate_every=2, steps=2, validation_fail=fail)
    assert await harness.run()
    rounds = harness.lines("validation.jsonl")
    assert [r["validation/failed"] for r in rounds] == [num_failed] * 2
    assert all((r["validation/success"] is None) == (num_failed == 5) for r in rounds)
    warnings = [note for note in harness.spy.notes if f"{num_failed} of 5 rollouts failed" in note]
    assert len(warnings) == 2 and all(str(error.args[0]) in warning for warning in warnings)


async def test_a_run_of_no_train_steps_validates_once_and_saves(tmp_path):
    harness = Harness(tmp_path, validate_every=2, steps=0)
    assert await harness.run()
    assert [r["train_step"] for r in harness.lines("validation.jsonl")] == [0]
    assert read_run_state(harness.checkpoints.latest()).train_step == 0
    assert not harness.lines("metrics.jsonl") and not harness.trainer.batches
    assert check_ledger(harness)["trained"] == 0
    write_report([read_run(tmp_path)], tmp_path / "report.html")

    longer = Harness(tmp_path, steps=2, start=read_run_state(harness.checkpoints.latest()))
    assert await longer.run()
    assert [s["train_step"] for s in longer.lines("metrics.jsonl")] == [1, 2]


async def test_the_last_weights_are_loaded_before_the_last_validation_however_slow_that_is(tmp_path):
    harness = Harness(tmp_path, validate_every=2, max_staleness=3, replica_options={"load_s": 0.1})
    await harness.run()
    assert harness.lines("validation.jsonl")[-1]["validation/min_version"] == 6
