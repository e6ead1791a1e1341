"""Size and speed of a delta against the version before, for a bucket of bfloat16 weights under Adam.

The weights are N(0, 0.02) in float32. Each version is one step of Adam with random gradients, rounded to bfloat16. The
size is compared with the dense bytes and with the entropy of the change: the entropy of "changed or not" of all values,
plus the entropy of the steps of the changed values. Each version is encoded, decoded and, in the same round, copied.
Rates are medians over versions, in dense bytes, on one thread. The first version, the warm-up, is not counted.

python benchmarks/delta.py [--mb 32] [--versions 50] [--lr 1e-6 3e-6 1e-5]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.weights.delta import decode, encode
from benchmarks.publish_files import medians, timed
from benchmarks.support import bootstrap, markdown_table, say, show

BETAS = 0.9, 0.999


def adam_versions(num_values: int, *, lr: float, versions: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield bfloat16 [num_values] of the base and then of each version."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(num_values, generator=generator) * 0.02
    mean, square = torch.zeros(num_values), torch.zeros(num_values)
    yield master.bfloat16()
    for step in range(1, versions + 1):
        gradient = torch.randn(num_values, generator=generator)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient * gradient, 1 - BETAS[1])
        scale = (square / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
        master.addcdiv_(mean, scale, value=-lr / (1 - BETAS[0] ** step))
        yield master.bfloat16()


def change_entropy(old: Tensor, new: Tensor) -> float:
    """Entropy in bytes of the change between two bfloat16 tensors [n].

    This is n times the entropy of "changed or not", plus the empirical entropy of the steps of all changed values.
    """
    before, after = (t.reshape(-1).view(torch.int16).numpy().astype(np.int64) for t in (old, new))
    steps = np.where(after < 0, -32769 - after, after) - np.where(before < 0, -32769 - before, before)
    changed = np.count_nonzero(steps)
    counts = np.unique(steps[steps != 0], return_counts=True)[1]
    return _bits(np.array([changed, len(steps) - changed])) / 8 + _bits(counts) / 8


def _bits(counts: np.ndarray) -> float:
    """Number of values times the entropy of their histogram."""
    present = counts[counts > 0]
    return float(-(present * np.log2(present / present.sum())).sum())


def table_row(*, num_bytes: int, versions: int, lr: float) -> list[str]:
    """Sizes and rates of all versions under a learning rate."""
    states = adam_versions(num_bytes // 2, lr=lr, versions=versions)
    old, found = next(states), list[tuple[float, ...]]()
    for version, new in enumerate(states):
        base, data, decoded = {"weight": old}, list[bytes](), list[Tensor]()
        seconds = (
            timed(new.clone),
            timed(lambda b=base, n=new, d=data: d.append(encode([("weight", n)], base=b, base_digest="base"))),
            timed(lambda b=base, d=data, r=decoded: r.append(decode(d[0], base=b, base_digest="base")[0][1])),
        )
        assert torch.equal(decoded[0].view(torch.int16), new.view(torch.int16))
        changed = float((old.view(torch.int16) != new.view(torch.int16)).double().mean())
        if version:
            found.append((changed, len(data[0]) / new.nbytes, len(data[0]) / change_entropy(old, new), *seconds))
        old = new
    changed, of_dense, of_entropy, *times = np.array(found).T
    say(f"lr {lr:g}: {changed[0]:.1%} to {changed[-1]:.1%} changed, largest {of_dense.max():.2%} of dense")
    ratios = times[0] / times[1], times[0] / times[2]
    intervals = [bootstrap(lambda drawn, r=ratio: medians(r, drawn), units=len(found)) for ratio in ratios]
    return [
        f"{lr:g}",
        f"{np.median(changed):.2%}",
        f"{np.median(of_dense):.2%}",
        f"{np.median(of_entropy):.3f} (max {of_entropy.max():.3f})",
        *(f"{2 * (num_bytes // 2) / np.median(seconds) / 1e9:.2f}" for seconds in times),
        *(f"{of.value:.2f} [{of.low:.2f}, {of.high:.2f}]" for of in intervals),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=32, help="of the bucket")
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [table_row(num_bytes=args.mb * 1_000_000, versions=args.versions, lr=lr) for lr in args.lr]
    header = ["lr", "changed", "of dense", "of entropy", "copy GB/s", "encode GB/s", "decode GB/s"]
    show(markdown_table([*header, "copy / encode", "copy / decode"], rows))


if __name__ == "__main__":
    main()
