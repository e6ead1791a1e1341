"""What a train step costs: ways to train the same batch, in alternating rounds of one process.

    bare         a bare megatron loop (forward, cross entropy, backward, update, on micro-batches built before the
                 clock starts) over the trainer; and a trainer of tokens of which a sampler kept 16 over the trainer
    packing      padded micro-batches over packed ones; padding can cost 1 / (share of real tokens), the limit
    replay       R3 over none, on the rows that the live router chooses, so that the experts have the same work. R2
                 makes a separate forward pass to record them; a step with the same pass (loss m2po) is its base
    checkpoints  a step during a save, whose thread writes meanwhile, over one without
    trees        each sequence from its first token over shared prefixes: groups of random tokens, and the rollouts that
                 a run has recorded (--recorded). Memory as for attention, with all sequences in one micro-batch
    attention    on one of 8 context ranks of a long sequence: torch's attention with a mask of queries x keys over
                 `async_rl/trainer/model/prefix_attention.py`, for a layer that sees all keys and for one with a window.
                 Memory is the growth of the peak of a separate process, beyond inputs and their gradients

Ratios are medians over rounds with their 95 % bootstrap intervals; that of CPU time is steadier on a busy machine.

    python benchmarks/trainer.py [--cases bare packing ...] [--models calculator 70m] [--threads 1] [--rounds 12]
        [--tokens 32768]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.forest import Forest, prefixes_of
from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows
from async_rl.trainer.batch.packing import plan_micro_batches
from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.trainer.loss.losses import M2PO, DecoupledPPO, LossConfig
from async_rl.trainer.model.model import PrefixSharing, RouterReplayMode, TrainerConfig
from async_rl.trainer.model.prefix_attention import attend_to_prefix
from async_rl.trainer.planning import Planner
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.state.adam import Optimizer
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.trainer.step import MicroBatch, MicroBatchBuilder
from async_rl.weights.model_info import read_model_info
from benchmarks.equal_weights import evaluate, save_random
from benchmarks.support import (
    markdown_table,
    paired_ratio,
    save_calculator,
    show,
    time_in_turns,
    trainers_side_by_side,
    with_sequences,
)
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import ExpertArray, RoutingSpec
from message_queue.training_sequence import RowRun, TrainingSequence

ADAM = OptimizerConfig(lr=1e-9)  # the live router goes on choosing the rows
KEPT = 16  # tokens that the sampler kept at each position
MEDIAN, SIGMA, LONGEST = 60, 1.0, 1024  # log-normal lengths of packing
HEADS, KEY_HEADS, CHANNELS, WINDOW = 4, 2, 64, 1024  # of attention
# Sequences, tokens of each (None: the task's own), tokens of a micro-batch.
SIZES = {"calculator": (128, None, 4096), "70m": (8, 128, 512)}
ONE_PASS, TWO_PASSES = DecoupledPPO(), M2PO()
MODES: dict[str, tuple[RouterReplayMode, LossConfig]] = {
    "no replay": ("none", ONE_PASS),
    "R3": ("R3", ONE_PASS),
    "no replay, recording pass": ("none", TWO_PASSES),
    "R2": ("R2", TWO_PASSES),
}
Rows = Iterator[Sequence[str]]


# ---- batches


def with_rows(sequence: TrainingSequence, rows: ExpertArray) -> TrainingSequence:
    """The sequence with a row for each token but the last; rows: [t, L, K]."""
    return replace(sequence, rows=rows[:-1], row_runs=(RowRun(len(rows) - 1, sequence.runs[0].version),))


def as_rollouts(batch: TrainingBatch, routing: RoutingSpec | None) -> TrainingBatch:
    """A supervised batch dressed as rollouts: random advantages and routing rows, behaviour logprobs of zero."""
    assert routing is not None

    def routed(sequence: TrainingSequence, _number: int) -> TrainingSequence:
        scores = torch.rand(len(sequence), len(routing.layers), routing.num_experts)
        return with_rows(sequence, scores.topk(routing.top_k).indices.numpy().astype(routing.dtype))

    return replace(with_sequences(batch, routed), advantages=torch.randn(len(batch)).numpy())


def with_support(batch: TrainingBatch, *, vocab: int) -> TrainingBatch:
    """The batch as if a sampler had kept KEPT tokens at each position in the loss, evenly spread over the ids."""
    offsets = np.arange(KEPT) * (vocab // KEPT)

    def cut(sequence: TrainingSequence, number: int) -> TrainingSequence:
        positions = batch.loss_tokens(number).positions
        ids = np.sort((sequence.token_ids[positions, None] + offsets) % vocab)
        counts = np.zeros(len(sequence), np.int64)
        counts[positions] = KEPT
        return replace(sequence, support=SamplingSupport.pack(counts, ids.flatten()))

    return with_sequences(batch, cut)


def random_batch(checkpoint: Path, lengths: Sequence[int], *, prompt: int = 1) -> TrainingBatch:
    """Sequences of random tokens as rollouts, those after the prompt in the loss."""
    info = read_model_info(checkpoint)
    examples = [
        (torch.randint(info.vocab_size, (n,)).numpy().astype(np.int32), np.arange(n) >= prompt) for n in lengths
    ]
    return as_rollouts(supervised_batch(examples), info.routing)


def load_batch(name: str, folder: Path, *, sequences: int | None = None) -> tuple[Path, TrainingBatch]:
    """Checkpoint and batch of one of SIZES, the rows random."""
    count, length, _ = SIZES[name]
    if length is not None:
        checkpoint = save_random(name, folder)
        return checkpoint, random_batch(checkpoint, [length] * count)
    checkpoint, task, routing = save_calculator(folder)
    return checkpoint, as_rollouts(supervised_batch(task.demonstrations(0, sequences or count)), routing)


# ---- cases


def compared(
    steps: Mapping[str, Callable[[], object]], pairs: Mapping[str, str], *, rounds: int, note: Callable[[], str] = str
) -> Rows:
    """A row of the table for each pair: the time of a step over that of its base.

    Args:
        note: last cell of each row, made at the end.
    """
    taken = time_in_turns(steps, rounds=rounds)
    for name, base in pairs.items():
        seconds = (f"{statistics.median(taken[each].wall):.3f}" for each in (name, base))
        ratios = (paired_ratio(getattr(taken[name], c), getattr(taken[base], c)) for c in ("wall", "cpu"))
        yield name, base, *seconds, *(f"{ratio:.3f}" for ratio in ratios), note()


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
        shares_prefixes=False,
        replay="none",
        routing=None,
        layers=(),
        rotary=trainer.model.rotary,
    )
    return [builder.build(numbers) for numbers in update.micro_batches[0]]


def bare_step(trainer: TrainerRank, optimizer: Optimizer, micro_batches: list[MicroBatch]) -> None:
    """Forward, cross entropy of all logits, backward and update, straight on megatron's modules."""
    output = trainer.model.output_layer(float32=False)
    assert output is not None
    (model,), weight = trainer.model.wrapped, output.weight
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


def bare(args: argparse.Namespace, folder: Path) -> Rows:
    """The goals are at least 0.97 and at most 1.05, by CPU time."""
    checkpoint, batch = load_batch("calculator", folder, sequences=256)
    cut = with_support(batch, vocab=read_model_info(checkpoint).vocab_size)
    config, adam = TrainerConfig(threads=args.threads, micro_batch_tokens=4096), OptimizerConfig(lr=1e-6)
    with trainers_side_by_side({"one": (config, ONE_PASS)}, checkpoint=checkpoint, optimizer=adam) as trainers:
        trainer = trainers["one"]
        micro_batches = build_micro_batches(trainer, batch, config)
        optimizer = Optimizer(trainer.model.wrapped, config=adam, trainer=config)
        steps = {
            "bare": lambda: bare_step(trainer, optimizer, micro_batches),
            "trainer": lambda: trainer.train(batch),
            "support": lambda: trainer.train(cut),
        }
        yield from compared(steps, {"bare": "trainer", "support": "trainer"}, rounds=args.rounds)


def real_share(lengths: Sequence[int], *, max_tokens: int) -> float:
    """Real tokens over computed ones, in the padded micro-batches of one rank."""
    (plan,) = plan_micro_batches(Forest.separate(lengths), max_tokens=max_tokens, num_ranks=1, padded=True)
    return sum(lengths) / sum(len(indices) * max(lengths[i] for i in indices) for indices in plan if indices)


def packing(args: argparse.Namespace, folder: Path) -> Rows:
    """128 sequences, with log-normal lengths and as demonstrations of the calculator."""
    config = TrainerConfig(threads=args.threads, micro_batch_tokens=2048)
    checkpoint, demonstrations = load_batch("calculator", folder)
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, len(demonstrations))
    lengths = np.clip(drawn.round(), 2, LONGEST).astype(int).tolist()
    for name, batch in {"long tail": random_batch(checkpoint, lengths), "calculator": demonstrations}.items():
        share = real_share(batch.lengths.tolist(), max_tokens=config.micro_batch_tokens)
        ways = {f"{name}, {way}": (replace(config, packing=way == "packed"), ONE_PASS) for way in ("packed", "padded")}
        with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=ADAM) as trainers:
            steps = {way: partial(trainer.train, batch) for way, trainer in trainers.items()}
            note = f"real tokens {share:.3f}, limit {1 / share:.3f}"
            pair = {f"{name}, padded": f"{name}, packed"}
            yield from compared(steps, pair, rounds=args.rounds, note=lambda note=note: note)


def replay(args: argparse.Namespace, folder: Path) -> Rows:
    """The goal for R3 is at most 1.02. Each mode that replays is over its base."""
    pairs = {"R3": "no replay", "R2": "no replay, recording pass"}
    for name in args.models:
        checkpoint, batch = load_batch(name, folder)
        config = TrainerConfig(threads=args.threads, micro_batch_tokens=SIZES[name][2], prefix_sharing="off")
        ways = {mode: (replace(config, router_replay=replayed), loss) for mode, (replayed, loss) in MODES.items()}
        with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=ADAM) as trainers:
            _, chosen = evaluate(trainers["R3"], batch, replay="R2")
            batch = with_sequences(batch, lambda s, n, rows=chosen: with_rows(s, rows[n].astype(np.uint8)))
            steps = {mode: partial(trainer.train, batch) for mode, trainer in trainers.items()}
            note = f"{name}, rows as the live router {trainers['R3'].train(batch)['routing/overlap']:.1%}"
            yield from compared(steps, pairs, rounds=args.rounds, note=lambda note=note: note)


def checkpoints(args: argparse.Namespace, folder: Path) -> Rows:
    """The step waits for the copy of the state."""
    name, state = args.models[-1], folder / "state"
    checkpoint, batch = load_batch(name, folder)
    config = TrainerConfig(threads=args.threads, micro_batch_tokens=SIZES[name][2])
    copies, saves = list[float](), list[float]()
    with trainers_side_by_side({"one": (config, ONE_PASS)}, checkpoint=checkpoint, optimizer=ADAM) as trainers:
        trainer = trainers["one"]

        def step_beside() -> Callable[[], None]:
            started = time.perf_counter()
            written: Future[None] = trainer.save(state)
            copies.append(time.perf_counter() - started)
            trainer.train(batch)

            def wait() -> None:
                written.result()
                saves.append(time.perf_counter() - started)

            return wait

        def note() -> str:
            size = sum(path.stat().st_size for path in state.iterdir())
            copy, save = (statistics.median(seconds) for seconds in (copies, saves))
            return f"{name}, {size / 1e6:.0f} MB, copy {copy:.2f} s, save beside the step {save:.2f} s"

        steps = {"no save": lambda: trainer.train(batch), "beside the save": step_beside}
        yield from compared(steps, {"beside the save": "no save"}, rounds=args.rounds, note=note)


def in_groups(batch: TrainingBatch, of: Sequence[int], common: Sequence[int]) -> TrainingBatch:
    """The batch with the tokens and rows of sequence of[n] at the first common[n] positions of sequence n."""

    def shared(sequence: TrainingSequence, number: int) -> TrainingSequence:
        first, tokens = batch.sequence(of[number]), common[number]
        assert first.rows is not None and sequence.rows is not None
        pairs = (first.token_ids, sequence.token_ids), (first.rows, sequence.rows)
        ids, rows = (np.concatenate((theirs[:tokens], ours[tokens:])) for theirs, ours in pairs)
        return replace(sequence, token_ids=ids, rows=rows)

    made = with_sequences(batch, shared)
    return replace(made, shared=prefixes_of([made.sequence(number) for number in range(len(made))]))


def recorded_batch(checkpoint: Path, rollouts: Path, *, count: int) -> TrainingBatch:
    """Tokens of the last rollouts that a run has recorded, with random rows; ids are taken modulo the vocabulary."""
    info, columns = read_model_info(checkpoint), ["group", "token_ids", "behaviour_logprobs"]
    rows = pq.read_table(rollouts, columns=columns).to_pylist()[-count:]
    ids = [np.array(row["token_ids"], np.int32) % info.vocab_size for row in rows]
    sampled = [np.isfinite(np.array(row["behaviour_logprobs"], np.float64)) for row in rows]
    first = [next(i for i, other in enumerate(rows) if other["group"] == row["group"]) for row in rows]
    pairs = [(own[:-1].tolist(), ids[of].tolist()) for own, of in zip(ids, first, strict=True)]
    common = [[*(a == b for a, b in zip(*pair, strict=False)), False].index(False) for pair in pairs]
    return in_groups(as_rollouts(supervised_batch([*zip(ids, sampled, strict=True)]), info.routing), first, common)


def tree_batches(checkpoint: Path, recorded: Path | None) -> dict[str, TrainingBatch]:
    """Groups of a prompt and replies, by name."""
    shapes = {"separate": (8, 0, 256), "3x": (8, 128, 40), "8x": (16, 448, 32)}
    batches: dict[str, TrainingBatch] = {}
    for name, (each, prompt, reply) in shapes.items():
        drawn = random_batch(checkpoint, [prompt + reply] * each * 2, prompt=max(1, prompt))
        batches[name] = in_groups(drawn, [n - n % each for n in range(len(drawn))], [prompt] * len(drawn))
    return batches if recorded is None else {**batches, "recorded": recorded_batch(checkpoint, recorded, count=64)}


def tree_peak(checkpoint: Path, sharing: PrefixSharing, batch: TrainingBatch) -> int:
    """Bytes by which a step raises the peak of this process, once gradients and optimizer have theirs."""
    config = TrainerConfig(threads=1, micro_batch_tokens=1 << 20, prefix_sharing=sharing)
    with trainers_side_by_side({"one": (config, ONE_PASS)}, checkpoint=checkpoint, optimizer=ADAM) as trainers:
        trainers["one"].train(random_batch(checkpoint, [8]))
        return raised_peak(lambda: trainers["one"].train(batch))


def trees(args: argparse.Namespace, folder: Path) -> Rows:
    """The goal is at least 0.8 of the compression, and 0.99 without shared prefixes."""
    checkpoint = save_random(args.models[-1], folder)
    ways = {
        way: (TrainerConfig(threads=args.threads, micro_batch_tokens=2048, prefix_sharing=way), ONE_PASS)
        for way in get_args(PrefixSharing)
    }
    for name, batch in tree_batches(checkpoint, args.recorded).items():
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = [pool.apply(tree_peak, (checkpoint, way, batch)) / 2**20 for way in ("off", "auto")]
        with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=ADAM) as trainers:
            compression = trainers["auto"].train(batch)["tree/compression"]
            steps = {f"{name}, {way}": partial(trainer.train, batch) for way, trainer in trainers.items()}
            note = f"compression {compression:.2f}, memory {peaks[0] / peaks[1]:.2f} ({peaks[1]:.0f} MiB)"
            pair = {f"{name}, off": f"{name}, auto"}
            yield from compared(steps, pair, rounds=args.rounds, note=lambda note=note: note)


def attention_steps(tokens: int) -> tuple[dict[str, Callable[[], None]], list[Tensor]]:
    """Forward and backward of each way on rank 0, and the tensors that take gradients."""
    rows = pack_rows(Forest.separate([tokens]), at=Coordinates(context=8))
    shapes = ((HEADS, len(rows)), (KEY_HEADS, tokens), (KEY_HEADS, tokens))
    inputs = [torch.randn(1, *shape, CHANNELS).requires_grad_() for shape in shapes]
    (q, k, v), scale = inputs, CHANNELS**-0.5

    def mask(window: int | None) -> Tensor:
        distance = rows.positions[:, None] - torch.arange(tokens)
        allowed = (distance >= 0) & (distance < (window or tokens))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)

    def trainer(window: int | None) -> Tensor:
        chunks = zip(q.split([b.queries for b in rows.buckets], dim=2), [b.keys for b in rows.buckets], strict=True)
        outs = (attend_to_prefix(c, k[:, :, :e], v[:, :, :e], scale=scale, window=window) for c, e in chunks)
        return torch.cat([*outs], dim=2)

    def step(way: Callable[[int | None], Tensor], window: int | None) -> None:
        way(window).sum().backward()
        for tensor in inputs:
            tensor.grad = None

    windows = {"": None, ", window": WINDOW}
    return {
        f"{way.__name__}{name}": partial(step, way, window)
        for name, window in windows.items()
        for way in (mask, trainer)
    }, inputs


def attention_peak(name: str, tokens: int) -> int:
    """Bytes by which a step raises the peak of this process beyond its inputs and their gradients."""
    torch.set_num_threads(1)
    steps, inputs = attention_steps(tokens)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]

    def step() -> None:
        gradients.clear()
        steps[name]()

    return raised_peak(step)


def raised_peak(step: Callable[[], object]) -> int:
    """Bytes by which a step raises the peak of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (most since the peak was reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def attention(args: argparse.Namespace, _folder: Path) -> Rows:
    """4 heads, 2 key-value heads, 64 channels, float32."""
    torch.set_num_threads(args.threads)
    steps, _ = attention_steps(args.tokens)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(attention_peak, (name, args.tokens)) / 2**20 for name in steps}
    for name, base in {"mask": "trainer", "mask, window": "trainer, window"}.items():
        note, pair = f"{peaks[name]:.0f} MiB over {peaks[base]:.0f}", {n: steps[n] for n in (name, base)}
        yield from compared(pair, {name: base}, rounds=args.rounds, note=lambda note=note: note)


CASES: dict[str, Callable[[argparse.Namespace, Path], Rows]] = {
    case.__name__: case for case in (bare, packing, replay, checkpoints, trees, attention)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), help="replay; checkpoints: the last")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recorded", type=Path, help="trees: the folder `rollouts` of a run")
    parser.add_argument("--tokens", type=int, default=32768, help="attention: tokens of the sequence")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Sequence[str]] = []
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows += [(name, *row) for row in CASES[name](args, Path(folder))]
    header = ("case", "step", "over", "seconds", "of the other", "by wall time", "by CPU time", "")
    show(f"{args.threads} threads, {args.rounds} rounds\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
