"""The control code at a size that no machine here has: replicas, workers and trajectories simulated in virtual time.

Everything is as in `python -m async_rl.simulate` (real driver, queue, journal, rollout workers and messages; simulated
processes, engines and trainer; an oracle that judges every token that is trained), with one scenario of the given size.
All trajectories that the staleness bound allows are in flight, every step publishes and aborts them, and replicas and
workers die or hang meanwhile. Prints what happened, and CPU per trajectory by the process that the code would run in.

    python benchmarks/simulated_scale.py [--replicas 1024] [--workers 32] [--trajectories 100000] [--steps 8]
        [--replica-deaths 32] [--worker-deaths 8] [--seed 0] [--profile]

Exit code 1 if an invariant is broken: a token or a group that is lost or trained twice, a ledger that does not close, a
token that is older than the bound, or less deaths than were asked for.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.simulator.processes import current_process
from async_rl.simulator.scenario import Fault, Scenario, run_config
from async_rl.simulator.world import STANDSTILL_TURNS, World
from benchmarks.support import markdown_table, say, show

GROUP = 50  # trajectories
SAMPLE_S = 0.005  # of CPU, between two looks at the process whose code runs
DEATHS_OF_REPLICAS = ("process dies", "process dies", "process hangs")
DEATHS_OF_WORKERS = ("worker dies", "worker dies", "worker hangs")
PROFILE_LINES = 40
TURNS_OF_TRAJECTORY = 200  # turns of the event loop without a train step that are no standstill, per trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What happened in a run."""

    steps: int
    """Train steps in metrics.jsonl."""
    deaths: Counter[str]
    """Faults that happened, by kind."""
    staleness: int
    """Of the oldest token with gradient, in optimizer steps."""
    ledger: dict[str, int]
    """Total of ledger.jsonl."""
    virtual_s: float
    """Of the whole run."""
    wall_s: float
    """Of the whole run."""
    cpu_s: dict[str, float]
    """CPU seconds by the kind of the process: driver, queue, worker, replica."""
    broken: str | None
    """What does not hold."""


def scenario_of(
    *, replicas: int, workers: int, trajectories: int, steps: int, replica_deaths: int, worker_deaths: int, seed: int
) -> Scenario:
    """All trajectories are admitted at once, if nothing is published meanwhile, and trained in `steps` steps."""
    draw = random.Random(f"scale {seed}")
    victims = [
        *((f"message/replica-{i}", DEATHS_OF_REPLICAS) for i in draw.sample(range(replicas), replica_deaths)),
        *((f"message/worker-{i}", DEATHS_OF_WORKERS) for i in draw.sample(range(workers), worker_deaths)),
    ]
    faults = tuple(
        Fault(number, point, draw.randint(5, 20), draw.choice(kinds), 0.0)
        for number, (point, kinds) in enumerate(victims)
    )
    settings = {
        "seed": seed,
        "total_train_steps": steps,
        "rollout.groups_per_batch": trajectories // GROUP // steps,
        "rollout.trajectories_per_group": GROUP,
        "rollout.workers": workers,
        "rollout.limits.max_turns": 1,
        "rollout.limits.max_tokens": 32,
        "staleness.max_staleness": steps - 1,
        "checkpoint.every": 2,
    }
    return Scenario(
        agent=None,
        blocks=False,
        config=run_config(settings),
        file_bytes=1 << 26,
        latency_s=0.0005,
        token_s=tuple(draw.choice((0.2, 0.5, 1.0)) for _ in range(replicas)),
        train_s=2.0,
        load_s=0.2,
        tool_s=0.01,
        faults=faults,
    )


@contextmanager
def cpu_by_process(samples: Counter[str]) -> Generator[None]:
    """Count, every `SAMPLE_S` of CPU, the kind of the simulated process whose code runs."""

    def look(_signal: int, _frame: FrameType | None) -> None:
        process = current_process()
        samples["driver" if process is None else process.process_name.partition("-")[0]] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(scenario: Scenario) -> Result:
    """Run a scenario to its end in a directory of its own."""
    trajectories = scenario.config.total_train_steps * scenario.config.rollout.groups_per_batch * GROUP
    standstill_turns = max(STANDSTILL_TURNS, TURNS_OF_TRAJECTORY * trajectories)
    samples = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="simulated-scale-") as folder:
        directory = Path(folder)
        world = World(scenario, directory=directory, standstill_turns=standstill_turns)
        started, cpu = time.monotonic(), time.process_time()
        with cpu_by_process(samples):
            world.run_to_end()
        seconds = time.process_time() - cpu
        metrics, records = (
            [json.loads(line) for line in (directory / name).read_text().splitlines()]
            for name in ("metrics.jsonl", "ledger.jsonl")
        )
    total: dict[str, object] = records[-1] if records else {}
    deaths = Counter(fault.kind for fault in world.fired)
    staleness = max((int(lag) for line in metrics for lag in line["staleness/tokens"]), default=-1)
    return Result(
        steps=len(metrics),
        deaths=deaths,
        staleness=staleness,
        ledger={key: value for key, value in total.items() if isinstance(value, int)},  # its counts
        virtual_s=world.events[-1][0],
        wall_s=time.monotonic() - started,
        cpu_s={kind: seconds * count / samples.total() for kind, count in samples.items()},
        broken=broken(scenario, world, total=total, steps=len(metrics), staleness=staleness),
    )


def broken(scenario: Scenario, world: World, *, total: dict[str, object], steps: int, staleness: int) -> str | None:
    """What does not hold; None if all does."""
    if world.violation is not None:
        return str(world.violation)
    if steps != scenario.config.total_train_steps:
        return f"metrics.jsonl has {steps} steps, not {scenario.config.total_train_steps}"
    if total.get("error") != 0:
        return f"the ledger does not close: {total}"
    if staleness > scenario.config.staleness.max_staleness:
        return f"a token of staleness {staleness} was trained; the bound is {scenario.config.staleness.max_staleness}"
    if len(world.fired) < len(scenario.faults):
        return f"{len(world.fired)} of {len(scenario.faults)} deaths happened; the run was too short"
    return None


def table(scenario: Scenario, result: Result) -> str:
    """What happened."""
    trajectories = scenario.config.total_train_steps * scenario.config.rollout.groups_per_batch * GROUP
    deaths = ", ".join(f"{count} x {kind}" for kind, count in sorted(result.deaths.items()))
    rows = [
        ("replicas, workers", f"{len(scenario.token_s)}, {scenario.config.rollout.workers}"),
        ("trajectories trained, steps", f"{trajectories}, {result.steps}"),
        ("deaths", deaths or "none"),
        ("ledger", ", ".join(f"{key} {value}" for key, value in result.ledger.items())),
        ("staleness, bound", f"{result.staleness}, {scenario.config.staleness.max_staleness}"),
        ("virtual s, wall s", f"{result.virtual_s:.0f}, {result.wall_s:.0f}"),
        *(
            (f"CPU us per trajectory, {kind}", f"{1e6 * seconds / trajectories:.0f}")
            for kind, seconds in sorted(result.cpu_s.items())
        ),
        ("invariants", "kept" if result.broken is None else f"broken: {result.broken}"),
    ]
    return markdown_table(("what", "seen"), rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--trajectories", type=int, default=100_000, help="that are trained")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--replica-deaths", type=int, default=32)
    parser.add_argument("--worker-deaths", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="show the functions that take most time")
    args = parser.parse_args(arguments)
    if args.trajectories % (GROUP * args.steps) or args.trajectories < GROUP * args.steps:
        parser.error(f"--trajectories is {args.trajectories}; must be a multiple of {GROUP} x --steps={args.steps}")
    for deaths, of in (("replica_deaths", "replicas"), ("worker_deaths", "workers")):
        if not 0 <= getattr(args, deaths) < getattr(args, of):
            parser.error(f"--{deaths.replace('_', '-')} is {getattr(args, deaths)}; must be less than --{of}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    options = vars(args)
    profile = cProfile.Profile() if options.pop("profile") else None
    scenario = scenario_of(**options)
    if profile is not None:
        profile.enable()
    result = run(scenario)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(PROFILE_LINES)
    show(table(scenario, result))
    if result.broken is not None:
        say(f"broken: {result.broken}")
    return 0 if result.broken is None else 1


if __name__ == "__main__":
    sys.exit(main())
