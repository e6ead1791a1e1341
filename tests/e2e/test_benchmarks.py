"""What benchmarks do with the inside of a real trainer is what the trainer does itself."""

from pathlib import Path

import pytest
import torch

from benchmarks.equal_weights import compare, table
from benchmarks.routing_mismatch import evaluate
from benchmarks.train_throughput import ADAM, bare_step, build_micro_batches
from tests.parallel.support import TRAINER, make_batch, save_tiny_moe, start_trainer


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_moe(tmp_path_factory.mktemp("checkpoint"))


def test_the_evaluations_of_router_replay_are_those_of_the_trainer(checkpoint):
    trainer = start_trainer(checkpoint)
    batch = make_batch()
    replayed, experts = evaluate(trainer, batch, replay="R3")
    assert torch.equal(replayed, trainer.logprobs(batch))
    held = (batch["routed_experts"] >= 0).all(-1)
    assert torch.equal(experts[held], batch["routed_experts"][held])
    live, chosen = evaluate(trainer, batch, replay="R2")
    assert not torch.equal(live, replayed)
    found = compare(trainer, batch)
    assert found.mismatch["none"].k3.tolist() == found.mismatch["R2"].k3.tolist(), "R2 replays what none chose"
    assert found.mismatch["R3"].k3.tolist() != found.mismatch["R2"].k3.tolist()
    assert 0 < found.agreement["none"].value < 0.5 and found.agreement["R3"].value == 1.0, "the rows are random"
    assert "0.9M" in table({"tiny": found})
    trainer.close()


def test_the_bare_loop_trains_on_the_micro_batches_of_the_trainer(checkpoint):
    from async_rl.train.optimizer import Optimizer

    trainer = start_trainer(checkpoint)
    micro_batches = build_micro_batches(trainer, make_batch(), TRAINER)
    before = [parameter.clone() for parameter in trainer.model.wrapped[0].parameters()]
    bare_step(trainer, Optimizer(trainer.model.wrapped, config=ADAM, trainer=TRAINER), micro_batches)
    after = trainer.model.wrapped[0].parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trainer.close()
