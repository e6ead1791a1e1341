"""Tokens/s of TrainerRank.train against a bare megatron loop on the same batch, model and micro-batches, in one run.

The bare loop has nothing to do with RL: forward, cross entropy, backward, optimizer step, on micro-batches built before
the clock starts. What TrainerRank adds is checking and cutting the batch, router replay, logprobs and entropy, the
loss, and metrics. Rounds alternate, so that a busy machine slows both; there the ratio of CPU time is the steadier.

The same batch is also trained as if a sampler had kept some tokens at each position (top-p, top-k, min-p), which adds
cutting and decoding the sets, and logprobs over them in place of the whole vocabulary.

    python benchmarks/train_throughput.py [--threads 2] [--rounds 8] [--sequences 256] [--micro-batch-tokens 4096]
        [--kept 16]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.planning import Planner
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.state.optimizer import Optimizer, OptimizerConfig
from async_rl.trainer.step import MicroBatch, MicroBatchBuilder
from async_rl.weights.model_info import read_model_info
from benchmarks.support import Variant, save_calculator, show, trainers_side_by_side
from benchmarks.train_steps import as_rollouts, paired_ratio, time_in_turns, with_support
from message_queue.tokens import RoutingSpec
from recipes.calculator.task import CalculatorTask

ADAM = OptimizerConfig(lr=1e-6)
GOAL, SUPPORT_GOAL = 0.97, 1.05


def demonstrations(task: CalculatorTask, routing: RoutingSpec, *, sequences: int) -> TrainingBatch:
    """Demonstrations dressed as rollouts."""
    return as_rollouts(supervised_batch(task.demonstrations(0, sequences)), routing)


def build_micro_batches(trainer: TrainerRank, batch: TrainingBatch, config: TrainerConfig) -> list[MicroBatch]:
    """The micro-batches TrainerRank would cut, without routing."""
    plan = Planner(config=config, loss=DecoupledPPO()).whole(batch)
    (update,) = plan.updates
    assert update is not None
    builder = MicroBatchBuilder(
        plan.batch,
        update,
        at=Coordinates(),
        device=next(trainer.model.chunks[0].parameters()).device,
        packing=True,
        replay="none",
        routing=None,
        layers=(),
        rotary=trainer.model.rotary,
    )
    return [builder.build(numbers) for numbers in update.micro_batches[0]]


def output_weight(trainer: TrainerRank) -> Tensor:
    """Weight of the output layer."""
    layer = trainer.model.output_layer(float32=False)
    assert layer is not None
    return layer.weight


def bare_step(trainer: TrainerRank, optimizer: Optimizer, micro_batches: list[MicroBatch]) -> None:
    """Forward, cross entropy of all logits, backward and update, straight on megatron's modules."""
    (model,), weight = trainer.model.wrapped, output_weight(trainer)
    layer: Any = trainer.model.chunks[0].output_layer
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        hidden = micro_batch.forward(model, at=Coordinates())[0].to(weight.dtype)
        # The trainer replaces this method of the layer.
        logits, _ = type(layer).forward(layer, hidden.unsqueeze(1), weight=weight)
        F.cross_entropy(logits.squeeze(1).float()[micro_batch.loss_rows], micro_batch.targets).backward()
    finalize = trainer.model.config.finalize_model_grads_func
    assert finalize is not None
    finalize([model])
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--kept", type=int, default=16, help="tokens that the sampler kept at each position")
    arguments = parser.parse_args()
    config = TrainerConfig(threads=arguments.threads, micro_batch_tokens=arguments.micro_batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, task, routing = save_calculator(Path(folder))
        ways = {"trainer": Variant(config=config)}
        with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=ADAM) as trainers:
            batch = demonstrations(task, routing, sequences=arguments.sequences)
            cut = with_support(batch, vocab=read_model_info(checkpoint).vocab_size, kept=arguments.kept)
            compare(trainers["trainer"], batch, cut, config, rounds=arguments.rounds)


def compare(
    trainer: TrainerRank, batch: TrainingBatch, cut: TrainingBatch, config: TrainerConfig, *, rounds: int
) -> None:
    """Print tokens/s and ratios of times, medians over rounds with 95 % bootstrap intervals.

    cut: the batch with support.
    """
    micro_batches = build_micro_batches(trainer, batch, config)
    optimizer = Optimizer(trainer.model.wrapped, config=ADAM, trainer=config)
    tokens = int(batch.lengths.sum())
    steps = {
        "bare": lambda: bare_step(trainer, optimizer, micro_batches),
        "trainer": lambda: trainer.train(batch),
        "support": lambda: trainer.train(cut),
    }
    taken = time_in_turns(steps, rounds=rounds)
    rates = {name: tokens / statistics.median(of_one.wall) for name, of_one in taken.items()}
    show(f"{len(batch)} sequences, {tokens} tokens, {len(micro_batches)} micro-batches, {config.threads} threads")
    show(f"bare megatron loop  {rates['bare']:8.0f} tokens/s")
    show(f"TrainerRank.train   {rates['trainer']:8.0f} tokens/s")
    show(f"with support        {rates['support']:8.0f} tokens/s")
    for what, clock in (("wall time", "wall"), ("CPU time", "cpu")):
        ratio = paired_ratio(getattr(taken["bare"], clock), getattr(taken["trainer"], clock))
        show(f"ratio by {what:<10} {ratio.value:8.3f} [{ratio.low:.3f}, {ratio.high:.3f}]   (goal {GOAL})")
        more = paired_ratio(getattr(taken["support"], clock), getattr(taken["trainer"], clock))
        show(f"with support        {more.value:8.3f} [{more.low:.3f}, {more.high:.3f}]   (goal {SUPPORT_GOAL})")


if __name__ == "__main__":
    main()
