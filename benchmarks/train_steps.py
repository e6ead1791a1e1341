"""What benchmarks of the trainer share: batches, steps timed in turns, and ratios of paired rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

from async_rl.batch.collate import add_support
from benchmarks.support import FloatArray, Interval, bootstrap
from message_queue.support import SamplingSupport
from message_queue.tokens import RoutingSpec


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


def random_rows(lengths: torch.Tensor, *, longest: int, routing: RoutingSpec) -> torch.Tensor:
    """int16 [S, longest, L, K]: random experts; -1 after the end."""
    held = torch.arange(longest) < lengths.unsqueeze(1)
    rows = torch.rand(len(lengths), longest, len(routing.layers), routing.num_experts).topk(routing.top_k).indices
    return torch.where(held[..., None, None], rows, -1).to(torch.int16)


def as_rollouts(batch: TensorDict, routing: RoutingSpec) -> TensorDict:
    """A supervised batch dressed as rollouts: random advantages and routing rows, behaviour logprobs of zero."""
    batch = batch.copy()
    count, longest = batch["token_ids"].shape
    batch["routed_experts"] = random_rows(batch["lengths"], longest=longest, routing=routing)
    batch["behaviour_logprobs"] = torch.zeros(count, longest)
    batch["advantages"] = torch.randn(count)
    batch["informative"] = torch.ones(count, dtype=torch.bool)
    batch["pure_lag0"] = batch["loss_mask"].clone()
    batch["group"] = torch.arange(count) // 8
    return batch


def with_support(batch: TensorDict, *, vocab: int, kept: int) -> TensorDict:
    """The batch as if a sampler had kept `kept` tokens at each position in the loss, evenly spread over the ids."""
    batch = batch.copy()
    offsets = torch.arange(kept) * (vocab // kept)
    ids = ((batch["token_ids"].unsqueeze(-1) + offsets) % vocab).sort(-1).values
    parts = zip(ids, batch["loss_mask"], batch["lengths"].tolist(), strict=True)
    support = [
        SamplingSupport.pack(mask[:n].numpy().astype(np.int64) * kept, row[:n][mask[:n]].flatten().numpy())
        for row, mask, n in parts
    ]
    add_support(batch, support)
    return batch


def random_batch(lengths: Sequence[int], *, vocab: int, routing: RoutingSpec) -> TensorDict:
    """Sequences of random tokens as rollouts, every token but the first in the loss."""
    size, longest = torch.tensor(lengths), max(lengths)
    position = torch.arange(longest)
    held = position < size.unsqueeze(1)
    supervised = TensorDict(
        {
            "token_ids": torch.randint(vocab, (len(lengths), longest)) * held,
            "loss_mask": held & (position > 0),
            "lengths": size,
        },
        batch_size=[len(lengths)],
    )
    return as_rollouts(supervised, routing)
