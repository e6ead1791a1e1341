"""Speed and size of rank-coded routing rows, against memcpy and zlib on the same rows, and the bytes of a trajectory.

All ways take turns in one process, a round each, so that what else the machine does hits them alike; the figures are
medians over rounds. The floor is log2 C(num_experts, top_k) bits a set: rows are drawn uniformly, for which no lossless
code needs less.

    python benchmarks/row_coding.py [--rows 4096] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support import show
from message_queue.tokens import ExpertArray, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from message_queue.wire import EncodedSize, encode_trajectory, encoded_size
from message_queue.wire.rank_code import RankCode

MODELS = {
    "8 of 128, 48 layers": RoutingSpec(layers=tuple(range(48)), num_experts=128, top_k=8),
    "8 of 256, 58 layers": RoutingSpec(layers=tuple(range(3, 61)), num_experts=256, top_k=8),
    "8 of 384, 60 layers": RoutingSpec(layers=tuple(range(1, 61)), num_experts=384, top_k=8),
    "2 of 8, 32 layers": RoutingSpec(layers=tuple(range(32)), num_experts=8, top_k=2),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """seconds: way -> one per round. sizes: way -> bytes of what it wrote. floor, raw: bytes."""

    seconds: dict[str, list[float]]
    sizes: dict[str, int]
    floor: float
    raw: int

    def rate(self, way: str) -> float:
        """MB of rows per second."""
        return self.raw / 1e6 / statistics.median(self.seconds[way])

    def ratio(self, way: str, other: str) -> float:
        """How many times as fast as `other`, round by round."""
        pairs = zip(self.seconds[other], self.seconds[way], strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)


def random_rows(spec: RoutingSpec, rows: int) -> ExpertArray:
    """[rows, moe_layers, top_k], every set equally likely."""
    rng = np.random.default_rng(0)
    drawn = rng.random((rows * len(spec.layers), spec.num_experts), np.float32).argpartition(spec.top_k, axis=1)
    return drawn[:, : spec.top_k].astype(spec.dtype).reshape(rows, *spec.row_shape)


def measure(spec: RoutingSpec, *, rows: int, rounds: int) -> Figures:
    """All ways on the same rows."""
    distinct = random_rows(spec, min(rows, 1024))
    experts = np.ascontiguousarray(np.resize(distinct, (rows, *spec.row_shape)))
    sets, raw = experts.reshape(-1, spec.top_k), experts.tobytes()
    code = RankCode(num_experts=spec.num_experts, top_k=spec.top_k)
    coded, deflated = code.encode(sets), zlib.compress(raw, 1)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": experts.copy,
        "rank encode": lambda: code.encode(sets),
        "rank decode": lambda: code.decode(coded, len(sets)),
        "zlib encode": lambda: zlib.compress(raw, 1),
        "zlib decode": lambda: zlib.decompress(deflated),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begun)
    sizes = {"rank": len(coded), "zlib": len(deflated)}
    return Figures(seconds, sizes, floor=len(sets) * code.floor_bits / 8, raw=len(raw))


def resumed_trajectory(spec: RoutingSpec) -> Trajectory:
    """10 turns of 200 tokens given and 300 sampled, every second one cut by an update and resumed."""
    made, version = Trajectory(routing=spec), 0
    for turn in range(10):
        made.observe(np.zeros(200, np.int32))
        for tokens in (120, 180) if turn % 2 else (300,):
            version += tokens == 180
            rows = random_rows(spec, len(made) + tokens - 1 - made.num_rows)
            made.extend(
                TokenOutput(
                    token_ids=np.zeros(tokens, np.int32),
                    logprobs=np.zeros(tokens, np.float32),
                    routed_experts=RoutedExperts(first_position=made.num_rows, experts=rows),
                    weights=WeightVersion(version, f"{version:064x}"),
                    stop_reason=StopReason.STOP,
                    replica="replica-0",
                )
            )
    return made


def speed_lines(name: str, figures: Figures) -> list[str]:
    """What `measure` found, as text."""
    lines = [f"{name}: {figures.raw / 1e6:.1f} MB of rows, memcpy {figures.rate('memcpy'):.0f} MB/s"]
    for way in ("rank", "zlib"):
        size = figures.sizes[way]
        line = f"  {way}  {size / figures.raw:.3f} of the bytes, {size / figures.floor:.3f} x floor"
        for direction in ("encode", "decode"):
            step = f"{way} {direction}"
            line += f"   {direction} {figures.rate(step):5.0f} MB/s ({figures.ratio(step, 'memcpy'):.4f} x memcpy"
            line += ")" if way == "zlib" else f", {figures.ratio(step, f'zlib {direction}'):.1f} x zlib)"
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for name, spec in MODELS.items():
        show("\n".join(speed_lines(name, measure(spec, rows=args.rows, rounds=args.rounds))))
    spec = next(iter(MODELS.values()))
    trajectory = resumed_trajectory(spec)
    sizes: list[EncodedSize] = [encoded_size(encode_trajectory(trajectory, rank_coded=r)) for r in (False, True)]
    show(f"\n10 turns, 5 resumes, {next(iter(MODELS))}:")
    for size in sizes:
        show(size.report())


if __name__ == "__main__":
    main()
