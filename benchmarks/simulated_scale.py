"""The control code at a size that no machine here has: replicas, workers and trajectories simulated in virtual time.

Everything is as in `python -m async_rl.simulate` (real driver, queue, journal, rollout workers and messages; simulated
processes, engines and trainer; an oracle that judges every token that is trained), with one scenario of the given size.
All trajectories that the staleness bound allows are in flight, every step publishes and aborts them, and replicas and
workers die or hang meanwhile. Prints what happened, and CPU per trajectory by the process that the code would run in.

    python benchmarks/simulated_scale.py [--replicas 1024] [--workers 32] [--trajectories 100000] [--steps 8]
        [--replica-deaths 32] [--worker-deaths 8] [--seed 0]

Exit code 1 if an invariant is broken: a token or a group that is lost or trained twice, a ledger that does not close, a
token that is older than the bound, or less deaths than were asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.simulator.processes import current_process
from async_rl.simulator.scenario import Fault, Scenario, run_config
from async_rl.simulator.world import STANDSTILL_TURNS, World
from benchmarks.support import markdown_table, show

GROUP = 50  # trajectories
SAMPLE_S = 0.005  # of CPU, between two looks at the process whose code runs
DEATHS_OF_REPLICAS = ("process dies", "process dies", "process hangs")
DEATHS_OF_WORKERS = ("worker dies", "worker dies", "worker hangs")
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
    """Run a scenario to its end in a temporary directory."""
    config, samples = scenario.config, Counter[str]()
    trajectories = config.total_train_steps * config.rollout.groups_per_batch * GROUP
    standstill_turns = max(STANDSTILL_TURNS, TURNS_OF_TRAJECTORY * trajectories)
    with tempfile.TemporaryDirectory(prefix="simulated-scale-") as folder:
        world = World(scenario, directory=Path(folder), standstill_turns=standstill_turns)
        cpu = time.process_time()
        with cpu_by_process(samples):
            world.run_to_end()
        seconds = time.process_time() - cpu
        metrics, records = (
            [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
            for name in ("metrics.jsonl", "ledger.jsonl")
        )
    total = {key: value for key, value in records[-1].items() if isinstance(value, int)} if records else {}
    staleness = max((int(lag) for line in metrics for lag in line["staleness/tokens"]), default=-1)
    rules = (
        (world.violation is None, f"{world.violation}"),
        (len(metrics) == config.total_train_steps, f"metrics.jsonl has {len(metrics)} steps"),
        (total.get("error") == 0, f"the ledger does not close: {total}"),
        (staleness <= config.staleness.max_staleness, f"a token of staleness {staleness} was trained"),
        (len(world.fired) == len(scenario.faults), f"{len(world.fired)} deaths happened; the run was too short"),
    )
    return Result(
        steps=len(metrics),
        deaths=Counter(fault.kind for fault in world.fired),
        staleness=staleness,
        ledger=total,
        cpu_s={kind: seconds * count / samples.total() for kind, count in samples.items()},
        broken=next((text for holds, text in rules if not holds), None),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"replicas": 1024, "workers": 32, "trajectories": 100_000, "steps": 8}
    for name, default in {**sizes, "replica-deaths": 32, "worker-deaths": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.trajectories < 1 or args.trajectories % (GROUP * args.steps):
        parser.error(f"--trajectories is {args.trajectories}; must be a multiple of {GROUP} x --steps={args.steps}")
    result = run(scenario_of(**vars(args)))
    rows = [
        ("steps", f"{result.steps}"),
        *result.deaths.items(),
        ("ledger", ", ".join(f"{key} {value}" for key, value in result.ledger.items())),
        ("staleness of the oldest token, bound", f"{result.staleness}, {args.steps - 1}"),
        *((f"CPU ms per trajectory, {kind}", f"{1e3 * s / args.trajectories:.2f}") for kind, s in result.cpu_s.items()),
        ("invariants", "kept" if result.broken is None else f"broken: {result.broken}"),
    ]
    show(markdown_table(("what", "seen"), [(name, str(seen)) for name, seen in rows]))
    return 0 if result.broken is None else 1


if __name__ == "__main__":
    sys.exit(main())
