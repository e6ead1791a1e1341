"""What benchmarks of the trainer share: batches, steps timed in turns, and ratios of paired rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from benchmarks.support import FloatArray, Interval, bootstrap
from message_queue.routing_rows import RowRun
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import ExpertArray, RoutingSpec
from message_queue.training_sequence import TrainingSequence


@dataclass(slots=True)
class Taken:
    """Seconds of each round, by the clock on the wall and by the CPU time of this process."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


def time_in_turns(steps: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Taken]:
    """Seconds of every step in every round. The order turns with the round; a first round warms up."""
    taken = {name: Taken() for name in steps}
    for number in range(-1, rounds):
        shift = number % len(steps)
        for name in [*steps][shift:] + [*steps][:shift]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if number >= 0:
                taken[name].wall.append(wall)
                taken[name].cpu.append(cpu)
    return taken


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Median over rounds of over / under."""
    ratios: FloatArray = np.sort(np.array(over, np.float64) / np.array(under, np.float64))

    def median(drawn: FloatArray) -> FloatArray:
        counted = drawn.cumsum(1)
        middle = drawn.sum(1, keepdims=True) / 2
        below, above = (counted >= middle).argmax(1), (counted > middle).argmax(1)
        return (ratios[below] + ratios[above]) / 2

    return bootstrap(median, units=len(ratios))


def with_sequences(batch: TrainingBatch, change: Callable[[TrainingSequence, int], TrainingSequence]) -> TrainingBatch:
    """The batch with the sequences that `change` makes of a sequence and its number."""
    contents = [[[*trajectory] for trajectory in batch.content(at)] for at in range(len(batch.contents))]
    for number, (group, trajectory, at) in enumerate(batch.index.tolist()):
        contents[group][trajectory][at] = change(batch.sequence(number), number)
    return replace(batch, contents=[tuple(map(tuple, content)) for content in contents])


def with_rows(sequence: TrainingSequence, rows: ExpertArray) -> TrainingSequence:
    """The sequence with a row for each token but the last; rows: [t, L, K]."""
    return replace(sequence, rows=rows[:-1], row_runs=(RowRun(len(rows) - 1, sequence.runs[0].version),))


def as_rollouts(batch: TrainingBatch, routing: RoutingSpec) -> TrainingBatch:
    """A supervised batch dressed as rollouts: random advantages and routing rows, behaviour logprobs of zero."""

    def routed(sequence: TrainingSequence, _number: int) -> TrainingSequence:
        scores = torch.rand(len(sequence), len(routing.layers), routing.num_experts)
        return with_rows(sequence, scores.topk(routing.top_k).indices.numpy().astype(routing.dtype))

    return replace(with_sequences(batch, routed), advantages=torch.randn(len(batch)).numpy())


def with_support(batch: TrainingBatch, *, vocab: int, kept: int) -> TrainingBatch:
    """The batch as if a sampler had kept `kept` tokens at each position in the loss, evenly spread over the ids."""
    offsets = np.arange(kept) * (vocab // kept)

    def cut(sequence: TrainingSequence, number: int) -> TrainingSequence:
        positions = batch.loss_tokens(number).positions
        ids = np.sort((sequence.token_ids[positions, None] + offsets) % vocab)
        counts = np.zeros(len(sequence), np.int64)
        counts[positions] = kept
        return replace(sequence, support=SamplingSupport.pack(counts, ids.flatten()))

    return with_sequences(batch, cut)


def random_batch(lengths: Sequence[int], *, vocab: int, routing: RoutingSpec) -> TrainingBatch:
    """Sequences of random tokens as rollouts, every token but the first in the loss."""
    examples = [(torch.randint(vocab, (n,)).numpy().astype(np.int32), np.arange(n) > 0) for n in lengths]
    return as_rollouts(supervised_batch(examples), routing)
