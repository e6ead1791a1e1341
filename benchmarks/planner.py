"""The planner against published tables, and against runs of this machine.

    python benchmarks/planner.py                                  # published tables
    python benchmarks/planner.py --runs DIR DIR ...               # each run is predicted with the rates of the first

Published tables mostly give the time of a step, not of its parts. So the parts are inferred from other rows than the
one that is judged, as the note of each case says; no constant is fitted to a judged row. After "assumed" stands what
no row determines. Lengths are lognormal, cut at the published longest sequence, with the published mean. Rows that are
not within 15 % are shown too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.plan.description import Cluster, Description, Distribution, Rates, Workload
from async_rl.plan.measured import describe_run
from async_rl.plan.simulation import simulate, simulate_synchronous
from benchmarks.support import markdown_table, show
from message_queue.policies import StalenessConfig

STEPS = 8
NEMO = "NVIDIA-NeMo/RL docs/about/performance-summary.md at aea463d (v0.6), 2689572 (v0.5)"
VERL = "volcengine/verl docs/advance/{} at {}"
ONE_STEP_OFF, FULLY_ASYNC = VERL.format("one_step_off.md", "e55d143"), VERL.format("fully_async.md", "2147009")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Inferred parts of a step."""

    train_gpu_s: float
    """GPUs x seconds of the trainer for a batch."""
    tokens: float
    """Mean length in the rows that this is inferred from; the trainer's time is proportional to it."""
    decode_s: float = 1e-9
    """Of `Rates`."""
    decode_s_per_request: float = 0.0
    """Of `Rates`."""
    other_s: float = 0.0
    """Seconds of a step that are neither, in the synchronous run only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that is judged."""

    name: str
    """Model and system."""
    seconds: float
    """Published time of a step."""
    parts: Parts
    """Inferred from other rows."""
    gpus: int
    """All GPUs of the row."""
    train_gpus: int | None = None
    """GPUs of the trainer; None for a synchronous run on all GPUs."""
    gpus_per_replica: int
    """GPUs of a replica."""
    trajectories: int
    """Trajectories of a batch."""
    tokens: float
    """Published mean length."""
    longest: float
    """Published longest sequence."""
    max_running: int = 256
    """Requests that a replica runs at a time; assumed."""
    bound: int = 1
    """Bound of the asynchronous run, in batches."""
    synchronous_s: float | None = None
    """Published time of a step of the synchronous run on as many GPUs, which is compared too."""
    source: str = NEMO
    """Of all its numbers."""
    note: str
    """Rows that the parts are inferred from, and what is assumed."""

    def description(self) -> Description:
        """The cluster of the row."""
        group, parts = 16, self.parts
        tokens = self.trajectories * self.tokens
        return Description(
            cluster=Cluster(
                gpus=self.gpus, gpus_per_replica=self.gpus_per_replica, train_gpus=self.train_gpus or self.gpus // 2
            ),
            workload=Workload(
                groups_per_batch=self.trajectories // group,
                trajectories_per_group=group,
                lengths=cut_lognormal(self.tokens, self.longest),
            ),
            rates=Rates(
                decode_s=parts.decode_s,
                decode_s_per_request=parts.decode_s_per_request,
                max_running=self.max_running,
                train_tokens_per_s=tokens / (parts.train_gpu_s * self.tokens / parts.tokens),
                switch_s=parts.other_s,
            ),
            staleness=StalenessConfig(max_staleness=self.bound),
        )

    def predicted(self) -> float:
        """Simulated seconds of a step."""
        run = simulate_synchronous if self.train_gpus is None else simulate
        return run(self.description(), steps=STEPS).step_s

    def predicted_synchronous(self) -> float:
        """Simulated seconds of a synchronous step on as many GPUs."""
        return simulate_synchronous(self.description(), steps=STEPS).step_s


def cut_lognormal(mean: float, longest: float) -> Distribution:
    """Lengths with this mean after the cut; their cv before it is 1."""
    low, high = mean, 1000 * mean
    draw = np.random.default_rng(0).normal(size=100_000)
    sigma = math.sqrt(math.log(2))
    for _ in range(60):
        middle = math.sqrt(low * high)
        found = np.minimum(middle * np.exp(sigma * draw - sigma**2 / 2), longest).mean()
        low, high = (middle, high) if found < mean else (low, middle)
    return Distribution(kind="lognormal", mean=low, cv=1.0, maximum=longest)


def nemo() -> Iterator[Case]:
    """Synchronous rows of v0.6, on twice the GPUs of the synchronous row of v0.5."""
    for name, gpus, unit, longest, tokens, before, sync, off, seconds in (
        ("DeepSeek-V3, H100", 512, 32, 1536, 697, 744, 134.0, 64.9, 111.0),
        ("DeepSeek-V3, GB200", 256, 32, 1536, 700, 996, 128.0, 64.5, 98.7),
        ("Qwen3-235B, H100", 256, 16, 8192, 5713, 5700, 431.0, 203.0, 312.0),
        ("Qwen3-235B, GB200", 128, 8, 8192, 5693, 5711, 332.0, 268.0, 345.0),
    ):
        rest = min(off, sync - off)  # the shorter part of the synchronous step
        yield Case(
            name=f"{name}, on policy",
            seconds=seconds,
            gpus=gpus,
            gpus_per_replica=unit,
            trajectories=512,
            tokens=tokens,
            longest=longest,
            parts=Parts(
                train_gpu_s=rest * gpus / 2, tokens=before, decode_s=off / longest, other_s=max(0.0, sync - 2 * off)
            ),
            note=f"v0.5: {sync} s on {gpus // 2} GPUs, {off} s 1-step off on {gpus}, half of them for each part; "
            "assumed: generation is the longer part, and its decode step does not depend on the requests (2 to 8)",
        )


def nemo_30b() -> Iterator[Case]:
    """Qwen3-30B, with 64 requests per GPU and more; the row that loses under two assumptions."""
    each = (154 - 121) / 3200 / 128
    yield Case(
        name="Qwen3-30B, H100, 8-step off",
        seconds=34.5,
        gpus=192,
        train_gpus=128,
        gpus_per_replica=2,
        trajectories=2048,
        tokens=3206,
        longest=4096,
        bound=8,
        parts=Parts(
            train_gpu_s=154 * 16, tokens=3201, decode_s=(121 - 128 * 3200 * each) / 4096, decode_s_per_request=each
        ),
        note="v0.5: 198 s on 32 GPUs, 154 s 1-step off on 16 + 16; assumed: both parts of the latter take 154 s, and a "
        "replica runs 256 requests",
    )
    scaling = {
        "": (Parts(train_gpu_s=96 * 16, tokens=3204, decode_s_per_request=136 / 3204 / 128), 2048),
        ", otherwise assumed": (Parts(train_gpu_s=96 * 16, tokens=3204, decode_s=136 / 4096), 2048),
    }
    notes = (
        "both parts take GPUs x seconds that do not depend on the GPUs; the longer part may be either",
        "generation is the longer part, and its decode step takes as long with any number of requests",
    )
    for (name, (parts, running)), note in zip(scaling.items(), notes, strict=True):
        yield Case(
            name=f"Qwen3-30B, GB200, 1-step off{name}",
            seconds=301,
            synchronous_s=221,
            gpus=16,
            train_gpus=8,
            gpus_per_replica=1,
            trajectories=2048,
            tokens=3197,
            longest=4096,
            max_running=running,
            parts=parts,
            note=f"v0.5: 232 s on 16 GPUs, 136 s 1-step off on 16 + 16; assumed: {note}",
        )


def transferred() -> Iterator[Case]:
    """1-step-off rows of GB200 from rows on H100 and the synchronous row of GB200, all of v0.5."""
    for name, gpus, tokens, seconds, here, there, off, train_s, generation_s in (
        ("Qwen3-32B", 32, 3258, 210.0, 381.0, 376.0, 200.0, 176.0, 200.0),
        ("Llama-3.1-8B", 8, 1107, 71.1, 91.0, 92.8, 64.8, 64.8, 64.8),
    ):
        half, factor = gpus // 2, here / there
        yield Case(
            name=f"{name}, GB200, 1-step off",
            seconds=seconds,
            gpus=gpus,
            train_gpus=half,
            gpus_per_replica=1,
            trajectories=2048,
            tokens=tokens,
            longest=4096,
            max_running=2048,
            parts=Parts(
                train_gpu_s=train_s * factor * half,
                tokens=tokens,
                decode_s_per_request=generation_s * factor / tokens / (2048 / half),
            ),
            note=f"{there} s and {off} s 1-step off on H100 with twice the GPUs, {here} s on GB200; assumed: the parts "
            f"of the asynchronous step on H100 take {train_s} and {generation_s} s, and {factor:.2f} times it on GB200",
        )


def verl() -> Iterator[Case]:
    """Rows of verl, whose tables give the parts of the synchronous step."""
    yield Case(
        name="verl one-step-off, Megatron, 4 + 12 H20",
        seconds=566,
        gpus=16,
        train_gpus=12,
        gpus_per_replica=1,
        trajectories=8192,
        tokens=4000,
        longest=8192,
        max_running=2048,
        parts=Parts(train_gpu_s=(119 + 344) * 16 + 29 * 12, tokens=4000, decode_s_per_request=162 / 4000 / 512),
        source=ONE_STEP_OFF,
        note="its colocated row: generation 162 s, logprobs and update 463 s, rest 29 s, all on 16 GPUs; assumed: 512 "
        "prompts of 16 rollouts and a mean of 4,000 tokens, which cancel, and generation in GPUs x seconds; if it "
        "scales less, the trainer's 646 s remain",
    )
    for gpus, seconds, generation, update in (
        (32, 294.77, 357.41, 313.81),
        (64, 189.26, 150.72, 133.41),
        (128, 150.63, 177.85, 113.81),
    ):
        yield Case(
            name=f"verl fully async, {gpus // 2} + {gpus // 2} H20",
            seconds=seconds,
            gpus=gpus,
            train_gpus=gpus // 2,
            gpus_per_replica=1,
            trajectories=8192,
            tokens=4000,
            longest=28672,
            max_running=2048,
            parts=Parts(train_gpu_s=update * gpus, tokens=4000, decode_s=generation / 28672),
            source=FULLY_ASYNC,
            note=f"its colocated row: generation {generation} s, update {update} s on {gpus} GPUs; assumed: a mean of "
            "4,000 tokens, which cancels, no logprobs, and generation takes as long on half of the GPUs",
        )


def table(cases: Sequence[Case]) -> str:
    """Published and predicted seconds."""
    rows: list[tuple[str, ...]] = []
    for case in cases:
        predicted = case.predicted()
        rows.append((case.name, f"{case.seconds:g}", f"{predicted:.1f}", f"{predicted / case.seconds - 1:+.1%}"))
        if case.synchronous_s is not None:
            synchronous = case.predicted_synchronous()
            error = f"{synchronous / case.synchronous_s - 1:+.1%}"
            rows.append(("  synchronous", f"{case.synchronous_s:g}", f"{synchronous:.1f}", error))
            speeds = case.synchronous_s / case.seconds, synchronous / predicted
            rows.append(("  speed-up", *(f"{speed:.2f}" for speed in speeds), f"{speeds[1] / speeds[0] - 1:+.1%}"))
    return markdown_table(("row", "published", "predicted", "error"), rows)


def table_of_runs(directories: Sequence[Path]) -> str:
    """Seconds of a step and staleness of runs with other bounds, by the rates of the first."""
    measured = describe_run(directories[0])
    rows: list[tuple[str, ...]] = []
    for directory in directories:
        staleness = describe_run(directory).staleness
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        steps = lines[len(lines) // 2 :]
        seconds, lag = (float(np.mean([s[key] for s in steps])) for key in ("step/seconds", "staleness/mean"))
        seen = simulate(replace(measured, staleness=staleness), steps=len(steps))
        error = f"{seen.step_s / seconds - 1:+.1%}"
        lags = f"{lag:.2f}", f"{seen.staleness_mean:.2f}"
        rows.append(
            (directory.name, str(staleness.max_staleness), f"{seconds:.2f}", f"{seen.step_s:.2f}", error, *lags)
        )
    header = ("run", "bound", "step, s", "predicted", "error", "staleness", "predicted")
    return markdown_table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", default=(), metavar="DIR", help="output_dir of runs")
    args = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if args.runs:
        show(table_of_runs(args.runs))
        return 0
    cases = [*nemo(), *nemo_30b(), *transferred(), *verl()]
    show(table(cases))
    for case in cases:
        show(f"{case.name}: {case.note}. Source: {case.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
