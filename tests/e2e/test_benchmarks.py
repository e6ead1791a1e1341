"""Benchmarks use the inside of a real trainer as the trainer does; scale runs on real processes."""

from dataclasses import replace

import pytest
import torch

from async_rl.run import main
from benchmarks import gpu_runs, gpu_training, packing, replay_overhead, scale
from benchmarks.equal_weights import compare, table
from benchmarks.routing_mismatch import evaluate
from benchmarks.support import trainers_side_by_side
from benchmarks.train_throughput import ADAM, bare_step, build_micro_batches
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
    from async_rl.trainer.state.optimizer import Optimizer

    trainer = start_trainer(checkpoint)
    micro_batches = build_micro_batches(trainer, training_batch_of(make_batch()), TRAINER)
    before = [parameter.clone() for parameter in trainer.model.wrapped[0].parameters()]
    bare_step(trainer, Optimizer(trainer.model.wrapped, config=ADAM, trainer=TRAINER), micro_batches)
    after = trainer.model.wrapped[0].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trainer.close()


def test_replay_is_timed_on_the_rows_that_the_live_router_chooses(checkpoint):
    ways = replay_overhead.variants(threads=1, tokens=64)
    with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=replay_overhead.ADAM) as trainers:
        rows = replay_overhead.compare("tiny", trainers, training_batch_of(make_batch()), rounds=2)
    assert [row[2] for row in rows] == ["R3 against none", "R2 against none, recording pass"]
    assert {row[-1] for row in rows} == {"100.0%"}


def test_the_limit_of_packing_is_that_of_the_trained_micro_batches(checkpoint):
    batch, config = training_batch_of(make_batch()), replace(TRAINER, packing=False)
    trainer = start_trainer(checkpoint, packing=False)
    plan = trainer._planner.whole(batch)
    rows = [mb.context.rows.index for mb in trainer._micro_batches(plan, plan.updates[0])]
    trainer.close()
    real, computed = sum(int((index >= 0).sum()) for index in rows), sum(len(index) for index in rows)
    lengths = batch.lengths.tolist()
    assert packing.real_share(lengths, max_tokens=config.micro_batch_tokens) == real / computed < 1
    row = packing.compare(checkpoint, batch, config, rounds=2)
    assert row[0] == f"6, {real}" and f"{real / computed:.3f}" in row


def test_sequences_in_arrival_order_are_padded_to_the_longest():
    assert packing.share_in_arrival_order([4, 2, 3, 1], max_tokens=8) == 10 / (2 * 4 + 2 * 3)
    assert packing.share_in_arrival_order([9, 1], max_tokens=8) == 1.0
    lengths = packing.long_tailed_lengths(1000)
    assert packing.MEDIAN * 0.9 < sorted(lengths)[500] < packing.MEDIAN * 1.1 and max(lengths) > 8 * packing.MEDIAN


def test_scale_goes_through_the_processes_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", "")
    size = ["--in-flight", str(scale.BATCH), "--workers", "2", "--tokens", "32", "64"]
    scale.main([*size, "--steps", "1", "--directory", str(tmp_path)])
    seen = capsys.readouterr()
    rows = [line.split("|")[1:4] for line in seen.out.splitlines() if line.startswith(f"| {scale.BATCH} ")]
    assert [[int(cell) for cell in row] for row in rows] == 2 * [[scale.BATCH, 2, 32], [scale.BATCH, 2, 64]]
    assert "nan" not in seen.out


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
