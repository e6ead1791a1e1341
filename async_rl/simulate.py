"""`python -m async_rl.simulate --seeds N`: the control code under random schedules and faults, in virtual time.

Exit codes: 0 every invariant held, 1 one was broken, 2 the arguments make no sense.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, as the imports below take seconds
    from async_rl.files.command import end_process

    end_process("async_rl.simulate")

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from async_rl.files.command import prog
from async_rl.simulator.outcome import Outcome, run_briefly, run_seed, shrink, summary

CHUNK = 20  # seeds that a process is given together
CHUNKS = 20  # that a process runs before another takes its place, because memory of many simulations adds up
LAST_EVENTS = 60
PROGRESS = 1_000  # seeds between two lines of progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    if arguments.seed is None:
        return _run_many(range(arguments.start, arguments.start + arguments.seeds), jobs=arguments.jobs)
    outcome = run_seed(arguments.seed, faults=arguments.faults)
    _print(*(outcome.trace() if arguments.trace else ()), *_report(outcome))
    return 1 if outcome.invariant else 0


def run_seeds(seeds: Iterable[int], *, jobs: int) -> Iterator[Outcome]:
    """Outcomes of all seeds, in order. Those of seeds where all is well come without their events."""
    if jobs == 1:
        yield from map(run_briefly, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=CHUNKS) as pool:
        yield from pool.map(run_briefly, seeds, chunksize=CHUNK)


def _run_many(seeds: range, *, jobs: int) -> int:
    started = time.monotonic()
    outcomes: list[Outcome] = []
    failed: list[Outcome] = []
    for outcome in run_seeds(seeds, jobs=jobs):
        outcomes.append(outcome)
        if outcome.invariant:
            failed.append(outcome)
            _print(f"seed {outcome.seed} broken: {outcome.text}")
        if len(outcomes) % PROGRESS == 0:
            _print(f"{len(outcomes)} of {len(seeds)} seeds, {len(failed)} failed")
    seconds = time.monotonic() - started
    _print(*summary(outcomes))
    _print(f"{len(seeds)} seeds from {seeds.start} in {seconds:.1f} s, {len(seeds) / seconds:.1f} a second")
    for fewest in map(shrink, failed[:3]):
        _print("", *_report(fewest), f"  replay: {fewest.command}", *list(fewest.trace())[-LAST_EVENTS:])
    return 1 if failed else 0


def _report(outcome: Outcome) -> Iterator[str]:
    """What a person reads of one seed."""
    yield f"seed {outcome.seed}: trace {outcome.trace_hash}, {len(outcome.events)} events"
    yield from (f"  fault {fault}" for fault in outcome.fired)
    yield f"broken: {outcome.text}" if outcome.invariant else "every invariant held"


def _print(*lines: str) -> None:
    sys.stdout.writelines(line + "\n" for line in lines)
    sys.stdout.flush()


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(part) for part in text.split(","))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog("simulate"),
        description="Run the control code under random schedules and faults, in virtual time, and check invariants.",
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds, default: 200")
    parser.add_argument("--start", type=int, default=0, help="the first of them, default: 0")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, default: 1")
    parser.add_argument("--seed", type=int, default=None, help="run this one and say what happened")
    parser.add_argument("--faults", type=_numbers, default=None, help="with --seed: only these faults, '0,3' or 'none'")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every event")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error(f"--seeds is {arguments.seeds} and --jobs is {arguments.jobs}; both must be at least 1")
    if arguments.seed is None and (arguments.trace or arguments.faults is not None):
        parser.error("--trace and --faults are about one seed; name it with --seed")
    return arguments
