"""What router replay does to the difference between engine and trainer, on the same tokens and the same weights.

vLLM rolls out trajectories of the calculator task; the trainer computes the logprobs of the same tokens once with the
engine's experts (R3) and once with its live router (none). First at the weights that sampled, then after optimizer
updates on other trajectories: one training, both evaluations at every stop. d = trainer - engine logprob of a sampled
token; intervals are 95 % bootstrap over trajectories.

A token counts as `own` when the live router changes a choice in the forward pass that predicts it, as `context` when
only a position before that has a changed choice, and as `none` otherwise: there both evaluations agree.

    python benchmarks/routing_mismatch.py [--checkpoint DIR] [--trajectories N] [--updates 0 1 2 4 8]
        [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.tools.tool import PauseGate
from async_rl.config import RunConfig, load_config
from async_rl.inference.vllm.engine import engine_environment, start_vllm
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.task import Task, build_task
from async_rl.trainer.batch.advantage import batch_rewards
from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.batch.training_batch import TrainingBatch, training_batch
from async_rl.weights.model_info import read_model_info
from benchmarks.support import (
    BoolArray,
    FloatArray,
    Interval,
    Mismatch,
    bootstrap,
    figure,
    find_warm_start,
    make_warm_start,
    markdown_table,
    roll_groups,
    say,
    show,
    start_rank,
)
from message_queue.heads import head_of
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup

WARM_STEPS = 120
LOG_2 = float(np.log(2.0))
CHANGES = ("none", "context", "own")
Rows = NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """Both evaluations after `updates` optimizer updates.

    changed_choices: share of (token, MoE layer) whose set of experts the live router changes, over forwarded tokens.
    change: int64 [n], index into CHANGES for each sampled token.
    """

    updates: int
    replayed: Mismatch
    live: Mismatch
    changed_choices: Interval
    change: NDArray[np.int64]


def evaluate(
    rank: Any, batch: TrainingBatch, *, replay: Literal["none", "R2", "R3"]
) -> tuple[list[torch.Tensor], list[Rows]]:
    """Logprobs float32 [n] of the tokens in the loss and experts int16 [t, L, K], of each sequence.

    The mode is chosen here and not by the rank's own configuration, so that one set of weights serves all modes.
    experts: those replayed (R3), those that the live router chose (R2), -1 (none).
    """
    from async_rl.trainer.step import MicroBatchBuilder, Objective

    info, model = rank._info, rank.model
    plan = rank._planner.whole(batch)
    (update,) = plan.updates
    builder = MicroBatchBuilder(
        plan.batch,
        update,
        at=Coordinates(),
        device=next(model.chunks[0].parameters()).device,
        packing=True,
        replay=replay,
        routing=info.routing,
        layers=model.replay.layers,
        rotary=model.rotary,
    )
    objective: Objective = rank._forward_backward.objective("logprobs")
    logprobs = torch.zeros(update.num_loss_tokens)
    experts = [np.full((length, *info.routing.row_shape), -1, np.int16) for length in batch.lengths.tolist()]
    with torch.no_grad():
        for numbers in update.micro_batches[0]:
            micro_batch = builder.build(numbers)
            hidden = micro_batch.forward(model.wrapped[0], at=Coordinates())
            logprobs[micro_batch.numbers.cpu()] = objective(hidden, micro_batch)[1]["logprobs"].cpu()
            routing, rows = micro_batch.context.routing, micro_batch.context.rows
            for place, layer in enumerate(info.routing.layers if routing is not None else ()):
                for i, number in enumerate(numbers):
                    of = (rows.segments == i) & (rows.index >= 0)
                    experts[number][rows.positions[of].cpu().numpy(), place] = routing.tables[layer][of].cpu().numpy()
    return list(logprobs.split(batch.num_loss_tokens.tolist())), experts


def changed_rows(engine: Rows, live: Rows) -> BoolArray:
    """bool [t, L]: the live router chose another set of experts; False where the engine has no row.

    Args:
        engine, live: int16 [t, L, K].
    """
    return (np.sort(engine) != np.sort(live)).any(-1) & (engine >= 0).all(-1)


def classify(changed: BoolArray, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n], index into CHANGES for each of the tokens at `positions` [n] of a sequence.

    changed: bool [t], row p changed in some layer. Token p is predicted by row p - 1, which attends to rows before.
    """
    own = np.concatenate([np.zeros(1, np.bool_), changed[:-1]])
    ever = np.logical_or.accumulate(own)
    return np.where(own, CHANGES.index("own"), np.where(ever, CHANGES.index("context"), 0))[positions]


def against_engine(batch: TrainingBatch, logprobs: Sequence[torch.Tensor]) -> Mismatch:
    """d of every token in the loss, by sequence."""
    behaviour = np.concatenate([batch.loss_tokens(number).logprobs for number in range(len(batch))])
    d = torch.cat(list(logprobs)).numpy().astype(np.float64) - behaviour
    return Mismatch(d, np.repeat(np.arange(len(batch)), batch.num_loss_tokens), len(batch))


def compare(rank: Any, batch: TrainingBatch, *, updates: int) -> Stop:
    """Evaluate with and without replay.

    Raises:
        RuntimeError: the replayed evaluation is not what the rank itself computes.
    """
    replayed, engine = evaluate(rank, batch, replay="R3")
    live, chosen = evaluate(rank, batch, replay="R2")
    if not torch.equal(torch.cat(replayed), torch.cat(rank.logprobs(batch))):
        raise RuntimeError("the replayed logprobs differ from TrainerRank.logprobs; evaluate() no longer mirrors it")
    changed = [changed_rows(*rows) for rows in zip(engine, chosen, strict=True)]
    change = [classify(c.any(-1), batch.loss_tokens(number).positions) for number, c in enumerate(changed)]
    choices, where = choices_of(engine, changed)
    return Stop(
        updates=updates,
        replayed=against_engine(batch, replayed),
        live=against_engine(batch, live),
        changed_choices=choices.mean(where),
        change=np.concatenate(change),
    )


def choices_of(engine: Sequence[Rows], changed: Sequence[BoolArray]) -> tuple[Mismatch, FloatArray]:
    """Every choice of the engine by its sequence, and 1 where it is changed."""
    routed = [(rows >= 0).all(-1) for rows in engine]
    where = np.concatenate([c[r] for c, r in zip(changed, routed, strict=True)]).astype(np.float64)
    sequences = np.repeat(np.arange(len(engine)), [int(r.sum()) for r in routed])
    return Mismatch(np.zeros(len(where)), sequences, len(engine)), where


def train_and_compare(
    rank: Any,
    evaluation: TrainingBatch,
    training: Sequence[list[PromptGroup]],
    *,
    config: RunConfig,
    stops: Sequence[int],
) -> list[Stop]:
    """One optimizer update per group list of `training`; both evaluations at every stop."""
    found: list[Stop] = []
    for update in range(max(stops) + 1):
        if update in stops:
            found.append(compare(rank, evaluation, updates=update))
        if update < max(stops):
            groups = training[update]
            metrics = rank.train(tensors(groups, config=config, current_update=update))
            say(f"update {update + 1}: {metrics['tokens']:.0f} tokens, gradient norm {metrics['grad_norm']:.3f}")
    return found


def tensors(groups: Sequence[PromptGroup], *, config: RunConfig, current_update: int) -> TrainingBatch:
    """The batch that a run would make of `groups`, which version 0 sampled."""
    heads = [head_of(group) for group in groups]
    advantages = batch_rewards(heads, config.advantage).advantages()
    return training_batch(
        heads,
        [content_of(group) for group in groups],
        advantages=advantages,
        current_update=current_update,
        version_updates={0: 0},
    )


async def roll_out(
    config: RunConfig, *, task: Task, checkpoint: Path, trajectories: int, batches: int
) -> tuple[list[PromptGroup], list[list[PromptGroup]]]:
    """Groups of one trajectory of held-out prompts to evaluate on, and `batches` batches of groups to train on."""
    rollout, info = config.rollout, read_model_info(checkpoint)
    replica = await start_vllm(config.engine, name="replica-0", checkpoint=checkpoint)
    try:
        loop = task.build_loop(
            engine=replica,
            tokenizer=AutoTokenizer.from_pretrained(checkpoint),
            sampling=rollout.sampling,
            limits=rollout.limits,
            gate=PauseGate(),
        )
        single = Rollouter(loop=loop, routing=info.routing, trajectories_per_group=1)
        evaluation = await roll_groups(
            single, task.validation_prompts(trajectories), first_group=0, at_once=trajectories
        )
        prompts = [task.train_prompt(i) for i in range(batches * rollout.groups_per_batch)]
        grouped = Rollouter(loop=loop, routing=info.routing, trajectories_per_group=rollout.trajectories_per_group)
        training = await roll_groups(grouped, prompts, first_group=trajectories, at_once=rollout.groups_per_batch)
    finally:
        await replica.close()
    size = rollout.groups_per_batch
    return evaluation, [training[i : i + size] for i in range(0, len(training), size)]


# ---- report


def ratio(stop: Stop) -> Interval:
    """k3 without replay over k3 with it, of the same resampled trajectories."""
    live, replayed = (
        np.bincount(m.trajectory, weights=m.k3, minlength=m.trajectories) for m in (stop.live, stop.replayed)
    )

    def statistic(drawn: FloatArray) -> FloatArray:
        return (drawn @ live) / np.maximum(drawn @ replayed, np.finfo(np.float64).tiny)

    return bootstrap(statistic, units=stop.live.trajectories)


def summary(stops: Sequence[Stop]) -> str:
    """All tokens: a row per stop and evaluation."""
    header = ("updates", "replay", "k3", "k1", "max abs d", "abs d > log 2", "choices changed", "k3 none / R3")
    rows: list[Sequence[str]] = []
    for stop in stops:
        quotient = ratio(stop)
        for name, found in (("R3", stop.replayed), ("none", stop.live)):
            rows.append(
                (
                    str(stop.updates),
                    name,
                    figure(found.mean(found.k3)),
                    figure(found.mean(-found.d)),
                    f"{np.abs(found.d).max():.2e}",
                    figure(found.mean((np.abs(found.d) > LOG_2).astype(np.float64)), percent=True),
                    "" if name == "R3" else figure(stop.changed_choices, percent=True),
                    "" if name == "R3" else f"{quotient.value:.2f} [{quotient.low:.2f}, {quotient.high:.2f}]",
                )
            )
    return markdown_table(header, rows)


def by_change(stops: Sequence[Stop]) -> str:
    """Tokens apart by what the live router changed for them.

    The last column is what the choices alone do to a token: the two evaluations against each other.
    """
    header = ("updates", "change", "tokens", "k3 with R3", "k3 with none", "mean abs(none - R3)")
    rows: list[Sequence[str]] = []
    for stop in stops:
        apart = np.abs(stop.live.d - stop.replayed.d)
        for index, name in enumerate(CHANGES):
            where = stop.change == index
            if not where.any():
                continue
            rows.append(
                (
                    str(stop.updates),
                    name,
                    f"{where.mean():.1%}",
                    figure(stop.replayed.mean(stop.replayed.k3, where)),
                    figure(stop.live.mean(stop.live.k3, where)),
                    f"{apart[where].mean():.2e}",
                )
            )
    return markdown_table(header, rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of the task's model; default: warm start")
    parser.add_argument("--trajectories", type=int, default=128, help="evaluated on, each of a prompt of its own")
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="where both are compared")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of engine and trainer")
    args = parser.parse_args(arguments)
    if args.trajectories < 2:
        parser.error(f"--trajectories is {args.trajectories}; intervals need at least 2")
    if min(args.updates) < 0:
        parser.error(f"--updates is {args.updates}; counts of updates are >= 0")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    warnings.simplefilter("ignore")
    config = load_config(
        [f"engine.dtype={args.dtype}", f"trainer.dtype={args.dtype}", f"warm_start.steps={WARM_STEPS}"]
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_environment(config.engine))
    task = build_task(config.task, seed=config.seed)
    with tempfile.TemporaryDirectory(prefix="async_rl-") as folder:
        checkpoint = args.checkpoint or find_warm_start(config.warm_start.cache)
        if checkpoint is None:
            float32 = replace(config, trainer=replace(config.trainer, dtype="float32"))
            checkpoint = make_warm_start(float32, task=task, folder=Path(folder))
        say(f"checkpoint {checkpoint}")
        evaluation, training = asyncio.run(
            roll_out(
                config, task=task, checkpoint=checkpoint, trajectories=args.trajectories, batches=max(args.updates)
            )
        )
        rank = start_rank(config, checkpoint=checkpoint, optimizer=config.optimizer)
        batch = tensors(evaluation, config=config, current_update=0)
        stops = train_and_compare(rank, batch, training, config=config, stops=sorted(set(args.updates)))
        rank.close()
    tokens = int(batch.num_loss_tokens.sum())
    show(f"{args.dtype}, {args.trajectories} trajectories, {tokens} sampled tokens\n")
    show(summary(stops) + "\n")
    show(by_change(stops))


if __name__ == "__main__":
    main()
