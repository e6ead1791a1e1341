"""Explanations of runs with a planted bottleneck, and the predicted gains of their overrides.

    python benchmarks/explain.py            # two workloads of each kind, with seeds and sizes of no tuning
    python benchmarks/explain.py --tuning   # the seeds and smaller sizes that the rules were tuned on

Each run is simulated in virtual time with the planner and written as a run directory. A bottleneck is planted by one
change to a run that its trainer limits, and made stronger until the change makes a step at least 1.5 to 2.5 times as
long. The explanation is right if it names the planted cause. The gain of its first override is compared with that of
the override in simulations of the planted run, whose lengths are drawn with two other seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.explain.explanation import Explanation, explain
from async_rl.plan.description import (
    Cluster,
    Description,
    Distribution,
    Interruptions,
    Publish,
    Rates,
    Workload,
)
from async_rl.plan.planner import num_replicas
from async_rl.plan.simulation import simulate
from benchmarks.support import markdown_table, show
from message_queue.policies import StalenessConfig

TUNING, HELD_OUT = (0, 1), (100, 101)
STEPS, SEARCH_STEPS = 24, 8
OTHER_SEEDS = (1000, 2000)  # added to that of the explained run, for the gain of an override
FASTER = 1.3  # rate of the replicas over that of the trainer without a planted bottleneck
MAX_STRENGTH = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An explained run."""

    planted: str
    """Cause."""
    seed: int
    """Of the workload."""
    slower: float
    """Seconds of a step over those without the planted change."""
    explanation: Explanation
    """Of its directory."""
    gain: float
    """Of the first override, in simulations of the planted run."""

    @property
    def is_right(self) -> bool:
        """Whether the explanation names the planted cause."""
        return self.explanation.limit == self.planted

    def row(self) -> tuple[str, ...]:
        """For the table."""
        seconds = self.explanation.seconds
        first = self.explanation.predictions[0] if self.explanation.predictions else None
        return (
            self.planted,
            str(self.seed),
            f"{self.slower:.1f}",
            self.explanation.limit if self.is_right else f"**{self.explanation.limit}**",
            f"{seconds.get(self.planted, 0.0) / sum(seconds.values()):.0%}",
            "" if first is None else f"`{first.override.text}`",
            "" if first is None else f"{first.gain:+.0%}",
            f"{self.gain:+.0%}",
        )


def workload(seed: int, *, held_out: bool) -> Description:
    """A run that its trainer limits; the replicas are FASTER."""
    draw = np.random.default_rng(seed)
    low, high = (18, 28) if held_out else (8, 16)
    replicas = int(draw.integers(4, 7) if held_out else draw.integers(2, 4))
    groups, each, bound = int(draw.integers(low, high)), int(draw.choice([2, 4])), int(draw.integers(2, 4))
    mean, decode_s = float(draw.uniform(100, 400)), float(draw.uniform(0.01, 0.03))
    open_requests = (bound + 1) * groups * each / replicas
    described = Description(
        cluster=Cluster(gpus=replicas + 4, train_gpus=4, train_gpus_unit=2, synchronous="split"),
        workload=Workload(
            groups_per_batch=groups,
            trajectories_per_group=each,
            lengths=Distribution(kind="lognormal", mean=mean, cv=float(draw.uniform(0.2, 0.5)), maximum=3 * mean),
            prompt_tokens=float(draw.uniform(50, 200)),
            turns=int(draw.integers(1, 4)),
            tool_s=Distribution(kind="exponential", mean=2 * decode_s),
        ),
        rates=Rates(
            decode_s=decode_s,
            decode_s_per_request=decode_s * float(draw.uniform(0.2, 1.0)) / open_requests,
            prefill_tokens_per_s=float(draw.uniform(20_000, 60_000)),
        ),
        staleness=StalenessConfig(max_staleness=bound),
    )
    step_s = simulate(described, steps=SEARCH_STEPS, seed=seed).step_s * FASTER
    tokens = groups * each * (mean + described.workload.prompt_tokens)
    small = {name: step_s * float(draw.uniform(0.01, 0.03)) for name in ("export_s", "transfer_s", "load_s")}
    return _rated(described, train_tokens_per_s=tokens / step_s / 4, **small)


def bound_limits(run: Description, x: float) -> tuple[Description, Description]:
    slower = _rated(run, decode_s=x * run.rates.decode_s)
    return replace(slower, staleness=StalenessConfig(max_staleness=0)), slower


def tails_limit(run: Description, x: float) -> tuple[Description, Description]:
    """One trajectory of each batch is x times as long as the mean."""
    lengths, work = run.workload.lengths, run.workload
    values = lengths.sample(np.random.default_rng(0), (work.groups_per_batch * work.trajectories_per_group,))
    long = Distribution(kind="empirical", values=(*values.tolist(), x * lengths.mean))
    return _worked(run, lengths=long), run


def tools_limit(run: Description, x: float) -> tuple[Description, Description]:
    waiting = _worked(run, turns=4, tool_s=Distribution(kind="exponential", mean=x * run.rates.decode_s))
    return waiting, _worked(run, turns=4)


def repeats_limit(run: Description, x: float) -> tuple[Description, Description]:
    """Long prompts, and trajectories that take about two steps, so that publishes abort them more than once."""
    bound = StalenessConfig(max_staleness=4)
    work = run.workload
    step_s = work.groups_per_batch * work.trajectories_per_group * (work.lengths.mean + work.prompt_tokens)
    step_s /= 4 * run.rates.train_tokens_per_s
    slower = _rated(
        run,
        decode_s=2 * step_s / work.lengths.mean,
        decode_s_per_request=0.0,
        prefill_tokens_per_s=run.rates.prefill_tokens_per_s / x,
    )
    resumed = _worked(replace(slower, staleness=bound), turns=1)
    return resumed, replace(resumed, publish=Publish(on_update="keep", kv="keep"))


PLANTS: Mapping[str, Callable[[Description, float], tuple[Description, Description]]] = {
    "train": lambda run, x: (_rated(run, train_tokens_per_s=run.rates.train_tokens_per_s / x), run),
    "export": lambda run, x: (_rated(run, export_s=x * run.rates.export_s), run),
    "checkpoint": lambda run, x: (_interrupted(run, checkpoint_s=x * run.rates.export_s, checkpoint_every=2), run),
    "engines": lambda run, x: (_rated(run, decode_s_per_request=x * run.rates.decode_s_per_request), run),
    "slots": lambda run, x: (_rated(run, max_running=max(1, round(256 / x))), run),
    "staleness": bound_limits,
    "tail": tails_limit,
    "tools": tools_limit,
    "publish": lambda run, x: (_rated(run, load_s=x * run.rates.load_s), run),
    "repeat": repeats_limit,
    "validation": lambda run, x: (_interrupted(run, validation_trajectories=round(10 * x), validation_every=1), run),
    "drops": lambda run, x: (_interrupted(run, failed=1 - 1 / x), run),
    "replica": lambda run, x: (_interrupted(run, slow_replica=x), run),
}
"""Cause -> (run, strength) -> the run with the cause, and without it."""


def plant(cause: str, run: Description, *, seed: int) -> tuple[Description, float]:
    """The run with a cause strong enough, and how many times as long it makes a step."""
    target, strength = float(np.random.default_rng((seed, len(cause))).uniform(1.5, 2.5)), 1.2
    while strength < MAX_STRENGTH:
        planted, without = PLANTS[cause](run, strength)
        slower, faster = (simulate(each, steps=SEARCH_STEPS, seed=seed).step_s for each in (planted, without))
        if slower >= target * faster:
            return planted, slower / faster
        strength *= 1.3
    raise RuntimeError(f"{cause} does not limit the workload of seed {seed}")


def judge(cause: str, *, seed: int, held_out: bool) -> Result:
    """Plant a cause, explain the run, and compare the gain of the first override."""
    planted, slower = plant(cause, workload(seed, held_out=held_out), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        write_run(planted, Path(folder), steps=STEPS, seed=seed)
        explanation = explain(Path(folder))
    gain = 0.0
    if explanation.predictions:
        change = explanation.predictions[0].override.change
        before, after = (
            sum(simulate(run, steps=STEPS, seed=seed + other).step_s for other in OTHER_SEEDS)
            for run in (planted, change(planted))
        )
        gain = before / after - 1
    return Result(planted=cause, seed=seed, slower=slower, explanation=explanation, gain=gain)


def write_run(run: Description, directory: Path, *, steps: int, seed: int) -> None:
    """Simulate a run and write the files of its directory."""
    simulate(run, steps=steps, seed=seed, directory=directory)
    (directory / "config.yaml").write_text(yaml.safe_dump(_config(run)))


def _config(run: Description) -> dict[str, Any]:
    work, other, staleness = run.workload, run.interruptions, run.staleness
    return {
        "engine": {
            "replicas": num_replicas(run),
            "tensor_parallel": run.cluster.gpus_per_replica,
            "max_num_seqs": run.rates.max_running,
            "device": "cuda",
        },
        "trainer": {
            "ranks": run.cluster.train_gpus,
            "parallel": {"tensor": run.cluster.train_gpus_unit, "pipeline": 1, "context": 1},
        },
        "staleness": {
            "max_staleness": staleness.max_staleness,
            "policy": staleness.policy,
            "max_requeues": staleness.max_requeues,
        },
        "rollout": {
            "groups_per_batch": work.groups_per_batch,
            "trajectories_per_group": work.trajectories_per_group,
            "on_update": run.publish.on_update,
            "kv": run.publish.kv,
        },
        "sync": {"mode": run.publish.mode, "max_paused": run.publish.max_paused, "every": run.publish.every},
        "validation": {"every": other.validation_every, "prompts": other.validation_trajectories, "samples": 1},
        "checkpoint": {"every": other.checkpoint_every if other.checkpoint_s else 0},
    }


def _rated(run: Description, **changes: float) -> Description:
    return replace(run, rates=run.rates.model_copy(update=changes))


def _worked(run: Description, **changes: Any) -> Description:
    return replace(run, workload=run.workload.model_copy(update=changes))


def _interrupted(run: Description, **changes: float) -> Description:
    return replace(run, interruptions=Interruptions.model_validate(changes))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="the seeds that the rules were tuned on")
    parser.add_argument("--causes", nargs="+", choices=PLANTS, default=list(PLANTS), help="default: all")
    args = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    seeds = TUNING if args.tuning else HELD_OUT
    results = [judge(cause, seed=seed, held_out=not args.tuning) for cause in args.causes for seed in seeds]
    header = ("planted", "workload", "slower", "named", "its share", "first override", "predicted", "simulated")
    show(markdown_table(header, [result.row() for result in results]))
    right = sum(result.is_right for result in results)
    show(f"{right} of {len(results)} causes are right")
    firsts = [(r.explanation.predictions[0].gain, r.gain) for r in results if r.explanation.predictions]
    errors = [abs(predicted - gain) / (1 + gain) for predicted, gain in firsts]
    show(f"error of the predicted steps per hour: median {np.median(errors):.0%}, at most {max(errors):.0%}")
    return 0 if right >= 0.95 * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
