"""A train step with the experts of a rank in one product per layer, against experts one after another.

Both trainers run in this process on the same batches with R3, in turns. The loop is megatron's SequentialMLP.

    python benchmarks/grouped_experts.py [--models calculator 70m] [--threads 1] [--rounds 12]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from benchmarks.replay_overhead import SIZES, load_batch, parse
from benchmarks.support import Variant, markdown_table, show, trainers_side_by_side
from benchmarks.train_steps import paired_ratio, time_in_turns
from tests.helpers.loop_experts import loop_experts

GOAL = 0.9  # CPU time of the grouped step, of the loop's
ADAM = OptimizerConfig(lr=1e-6)


def main() -> None:
    arguments = parse(__doc__)
    torch.manual_seed(0)
    rows: list[Sequence[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            checkpoint, batch = load_batch(name, Path(folder))
            config = TrainerConfig(threads=arguments.threads, micro_batch_tokens=SIZES[name][2], router_replay="R3")
            start = partial(trainers_side_by_side, checkpoint=checkpoint, optimizer=ADAM)
            way = Variant(config=config)
            with start({"grouped": way}) as trainers, loop_experts(), start({"loop": way}) as others:
                steps = {n: partial(t.train, batch) for n, t in {**trainers, **others}.items()}
                taken = time_in_turns(steps, rounds=arguments.rounds)
            wall, cpu = (paired_ratio(getattr(taken["grouped"], c), getattr(taken["loop"], c)) for c in ("wall", "cpu"))
            rows.append(
                (
                    name,
                    *(f"{statistics.median(taken[n].wall):.2f} s" for n in ("loop", "grouped")),
                    *(f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in (wall, cpu)),
                )
            )
    show(f"{arguments.threads} threads, {arguments.rounds} rounds; goal: at most {GOAL} of the loop's CPU time\n")
    show(markdown_table(("model", "loop", "grouped", "wall time / loop", "CPU time / loop"), rows))


if __name__ == "__main__":
    main()
