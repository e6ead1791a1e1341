"""Benchmarks use the inside of a real trainer as the trainer does."""

from argparse import Namespace

import pytest
import torch

from async_rl.run import main
from benchmarks import gpu_runs, gpu_training
from benchmarks import trainer as steps
from benchmarks.equal_weights import compare, evaluate, table
from tests.helpers.lanes import WHOLE_RUN
from tests.parallel.support import TRAINER, make_batch, start_trainer, training_batch_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_evaluations_of_router_replay_are_those_of_the_trainer(checkpoint):
    trainer = start_trainer(checkpoint)
    batch = training_batch_of(make_batch())
    replayed, experts = evaluate(trainer, batch, replay="R3")
    assert torch.equal(torch.cat(replayed), torch.cat(trainer.logprobs(batch)))
    for number, rows in enumerate(experts):
        assert rows.tolist() == batch.sequence(number).routed_experts.tolist()
    live, _ = evaluate(trainer, batch, replay="R2")
    assert not torch.equal(torch.cat(live), torch.cat(replayed))
    found = compare(trainer, batch)
    assert found.mismatch["none"].k3.tolist() == found.mismatch["R2"].k3.tolist(), "R2 replays what none chose"
    assert found.mismatch["R3"].k3.tolist() != found.mismatch["R2"].k3.tolist()
    assert 0 < found.agreement["none"].value < 0.5 and found.agreement["R3"].value == 1.0, "the rows are random"
    assert "0.9M" in table({"tiny": found})
    trainer.close()


def test_the_bare_loop_trains_on_the_micro_batches_of_the_trainer(checkpoint):
    from async_rl.trainer.state.adam import Optimizer
    from async_rl.trainer.state.optimizer import OptimizerConfig

    trainer = start_trainer(checkpoint)
    micro_batches = steps.build_micro_batches(trainer, training_batch_of(make_batch()), TRAINER)
    before = [parameter.clone() for parameter in trainer.model.wrapped[0].parameters()]
    optimizer = Optimizer(trainer.model.wrapped, config=OptimizerConfig(lr=1e-6), trainer=TRAINER)
    steps.bare_step(trainer, optimizer, micro_batches)
    after = trainer.model.wrapped[0].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trainer.close()


def cases(monkeypatch, checkpoint, case, **arguments):
    """Rows of a case of benchmarks/trainer.py, on a small batch."""
    batch = training_batch_of(make_batch())
    monkeypatch.setattr(steps, "load_batch", lambda name, folder: (checkpoint, batch))
    monkeypatch.setattr(steps, "random_batch", lambda checkpoint, lengths: batch)
    monkeypatch.setitem(steps.SIZES, "tiny", (len(batch), None, 64))
    return [*case(Namespace(threads=1, rounds=2, **arguments), checkpoint.parent)]


def test_replay_is_timed_on_the_rows_that_the_live_router_chooses(checkpoint, monkeypatch):
    rows = cases(monkeypatch, checkpoint, steps.replay, models=["tiny"])
    assert [row[:2] for row in rows] == [("R3", "no replay"), ("R2", "no replay, recording pass")]
    assert {row[-1] for row in rows} == {"tiny, rows as the live router 100.0%"}


def test_the_limit_of_packing_is_that_of_the_trained_micro_batches(checkpoint, monkeypatch):
    batch = training_batch_of(make_batch())
    trainer = start_trainer(checkpoint, packing=False, micro_batch_tokens=2048)
    plan = trainer._planner.whole(batch)
    rows = [mb.context.rows.index for mb in trainer._micro_batches(plan.batch, plan.updates[0])]
    trainer.close()
    real, computed = sum(int((index >= 0).sum()) for index in rows), sum(len(index) for index in rows)
    lengths = batch.lengths.tolist()
    assert steps.real_share(lengths, max_tokens=2048) == real / computed < 1
    for name, row in zip(("long tail", "calculator"), cases(monkeypatch, checkpoint, steps.packing), strict=True):
        assert row[:2] == (f"{name}, padded", f"{name}, packed") and f"real tokens {real / computed:.3f}" in row[-1]


def test_the_groups_of_the_tree_case_share_their_prompts(checkpoint):
    batches = steps.tree_batches(checkpoint, None)
    compression = {}
    for name, batch in batches.items():
        plan = start_trainer(checkpoint, micro_batch_tokens=1 << 20)._planner.whole(batch)
        compression[name] = int(batch.lengths.sum()) / int(plan.updates[0].runs[:, 1].sum())
    assert compression == {"separate": 1.0, "3x": 3.0, "8x": 8.0}


@WHOLE_RUN
def test_whole_runs_of_one_gpu_run_on_the_cpu(tmp_path):
    rows = gpu_runs.main(["--device", "cpu", "--runs", "async", "--steps", "2", "--keep", str(tmp_path)])
    assert rows["async"]["rows"] == "100.00%"
    assert float(rows["async"]["k3 at equal weights"]) < 1e-9


@pytest.mark.parametrize("name", gpu_runs.RUNS)
def test_settings_of_runs_on_a_gpu_are_accepted(name, tmp_path, capsys):
    model = gpu_runs.save_model(tmp_path / "model", device="cpu")
    arguments = gpu_runs.settings(name, device="cuda", checkpoint=model)
    assert main(["--check", *arguments, f"output_dir={tmp_path / 'run'}"]) == 0, capsys.readouterr().err


def test_trainer_table_of_one_gpu_runs_on_the_cpu(capsys):
    sizes = ("--layers", "2", "--tokens", "256", "--fixed", "128", "--micro-batch-tokens", "256", "--rounds", "1")
    gpu_training.main(["--device", "cpu", *sizes])
    table = capsys.readouterr().out
    assert "2 sequences of 128 to 128 tokens" in table
    for way in ("bare megatron loop", gpu_training.LOOP, "trainer, R3, full recomputation"):
        assert way in table
