"""`python -m async_rl.plan FILE`: whether asynchronous training pays on a described cluster, and with which split.

FILE is YAML with cluster, workload, rates, publish and staleness. With `--run DIR` instead, lengths and rates are those
of a run. Exit codes: 0 asynchronous training is faster, 1 it is not, 2 the arguments make no sense.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.plan.__main__")

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from async_rl.files.command import prog
from async_rl.plan.description import Description, PlanError, read_description
from async_rl.plan.measured import describe_run
from async_rl.plan.planner import Plan, make_plan
from async_rl.plan.records import RecordsError


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        description = _description(arguments)
        plan = make_plan(description, steps=arguments.steps, search=not arguments.no_search, seed=arguments.seed)
    except (PlanError, RecordsError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        return 2
    text = json.dumps(plan.values(), indent=2) if arguments.json else "\n".join(table(plan))
    sys.stdout.write(f"{text}\n")
    sys.stderr.write("".join(f"warning: {line}\n" for line in plan.warnings))
    return 1 if plan.given.speed_up < 1 else 0


def _description(arguments: argparse.Namespace) -> Description:
    found = read_description(arguments.file) if arguments.run is None else describe_run(arguments.run)
    if arguments.bound is None:
        return found
    return replace(found, staleness=replace(found.staleness, max_staleness=arguments.bound))


def table(plan: Plan) -> Iterator[str]:
    """Lines for a terminal: one column for the synchronous run, one for each split."""
    splits = [plan.given, *([plan.best] if plan.best is not None else [])]
    runs = [plan.synchronous, *(split.seen for split in splits)]

    def of_splits(show: str, *values: float) -> list[str]:
        return ["", *(show.format(value) for value in values)]

    rows = [
        ("", ["synchronous", "given", "best"][: len(runs)]),
        ("GPUs of the trainer", of_splits("{}", *(split.train_gpus for split in splits))),
        ("replicas", of_splits("{}", *(split.replicas for split in splits))),
        ("steps per hour", [f"{3600 / run.step_s:.1f}" for run in runs]),
        ("trained tokens per second", [f"{run.tokens_per_s:,.0f}" for run in runs]),
        ("speed-up", of_splits("{:.2f}", *(split.speed_up for split in splits))),
        ("S_max", of_splits("{:.2f}", *(split.s_max for split in splits))),
        ("trainer idle", [f"{run.trainer_idle:.0%}" for run in runs]),
        ("replicas idle", [f"{run.rollout_idle:.0%}" for run in runs]),
        ("staleness, mean", [f"{run.staleness_mean:.2f}" for run in runs]),
        ("staleness, p99", [f"{run.staleness_p99}" for run in runs]),
        ("length, trained over ended", [f"{run.length_bias:.3f}" for run in runs]),
        ("weights, GB/s", [f"{run.sync_bytes_per_s / 1e9:.3g}" for run in runs]),
        ("rollouts, MB/s", [f"{run.rollout_bytes_per_s / 1e6:.3g}" for run in runs]),
    ]
    for name, values in rows:
        yield f"{name:28}" + "".join(f"{value:>14}" for value in values)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog("plan"), description=(__doc__ or "").partition("`: ")[2])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", type=Path, nargs="?", metavar="FILE", help="YAML with cluster, workload and rates")
    source.add_argument("--run", type=Path, default=None, metavar="DIR", help="output_dir of a run")
    parser.add_argument(
        "--bound", type=int, default=None, help="staleness.max_staleness, instead of that of FILE or DIR"
    )
    parser.add_argument("--steps", type=int, default=12, help="train steps of each simulated run, default: 12")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths, default: 0")
    parser.add_argument("--no-search", action="store_true", help="only the split of FILE")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; must be at least 1")
    if arguments.bound is not None and arguments.bound < 0:
        parser.error(f"--bound is {arguments.bound}; must be at least 0 (0 is synchronous training)")
    return arguments
