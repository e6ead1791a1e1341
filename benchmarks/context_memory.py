"""Peak memory and time of attention on one context rank of a long sequence, forward and backward.

    mask      torch's attention with a mask of the rank's queries x all keys
    trainer   what the trainer does (`async_rl/trainer/model/prefix_attention.py`): a chunk of queries after the other

Both are measured for a layer that sees all keys and for a layer with a window. Memory is the growth of the peak of a
separate process, beyond inputs and their gradients. Times are CPU time of alternating rounds in one process.

    python benchmarks/context_memory.py [--tokens 32768] [--context 8] [--window 1024] [--heads 4] [--groups 2]
        [--channels 64] [--dtype bfloat16] [--rounds 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows
from async_rl.trainer.model.prefix_attention import attend_to_prefix
from benchmarks.support import markdown_table, peak_growth, show
from benchmarks.train_steps import paired_ratio, time_in_turns


def steps(arguments: argparse.Namespace) -> tuple[dict[str, Callable[[], None]], list[Tensor]]:
    """Forward and backward of each way on rank 0, and the tensors that take gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = pack_rows([arguments.tokens], at=Coordinates(context=arguments.context))
    (bucket,) = rows.buckets
    scale, dtype = arguments.channels**-0.5, getattr(torch, arguments.dtype)
    sizes = ((arguments.heads, len(rows)), (arguments.groups, bucket.width), (arguments.groups, bucket.width))
    inputs = [torch.randn(1, *size, arguments.channels, dtype=dtype).requires_grad_() for size in sizes]
    q, k, v = inputs

    def mask(window: int | None) -> Tensor:
        distance = rows.positions[:, None] - torch.arange(bucket.width)
        allowed = (distance >= 0) & (distance < (window or bucket.width))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)

    def trainer(window: int | None) -> Tensor:
        chunks = zip(q.split(bucket.chunk, dim=2), bucket.ends, strict=True)
        outs = (attend_to_prefix(c, k[:, :, :e], v[:, :, :e], scale=scale, window=window) for c, e in chunks)
        return torch.cat([*outs], dim=2)

    def step(way: Callable[[int | None], Tensor], window: int | None) -> None:
        way(window).sum().backward()
        for tensor in inputs:
            tensor.grad = None

    return {
        f"{way.__name__}{', window' if window else ''}": partial(step, way, window)
        for window in (None, arguments.window)
        for way in (mask, trainer)
    }, inputs


def peak_memory(name: str, arguments: argparse.Namespace) -> int:
    """Bytes by which one step raises the peak of this process beyond its inputs and their gradients."""
    found, inputs = steps(arguments)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]

    def measured() -> None:
        gradients.clear()
        found[name]()

    return peak_growth(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 32768, "context": 8, "window": 1024, "heads": 4, "groups": 2, "channels": 64, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    taken = time_in_turns(steps(arguments)[0], rounds=arguments.rounds)
    rows: list[list[str]] = []
    for name in taken:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            memory = process.apply(peak_memory, (name, arguments))
        ratio = paired_ratio(taken[name.replace("trainer", "mask")].cpu, taken[name].cpu)
        seconds = statistics.median(taken[name].cpu)
        speed = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        rows.append([name, f"{memory / 2**20:.0f}", f"{seconds:.2f}", speed])
    queries = arguments.tokens // arguments.context
    show(f"{queries} queries, {arguments.tokens} keys, a window of {arguments.window}, {arguments.dtype}\n")
    show(markdown_table(["way", "MiB at the peak", "CPU s", "speed over the mask"], rows))


if __name__ == "__main__":
    main()
