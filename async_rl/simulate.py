"""`python -m async_rl.simulate --seeds N`: the control code under random schedules and faults, in virtual time.

Exit codes: 0 every invariant held, 1 one was broken, 2 the arguments make no sense.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.simulator.outcome import Outcome

CHUNK = 20  # seeds that a process is given together
LAST_EVENTS = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.seed is not None:
        return _replay(arguments.seed, faults=arguments.faults, trace=arguments.trace)
    return _run_many(range(arguments.start, arguments.start + arguments.seeds), jobs=arguments.jobs)


def run_seeds(seeds: Iterable[int], *, jobs: int) -> Iterator[Outcome]:
    """Outcomes of all seeds, in order. Those of seeds where all is well come without their events."""
    from async_rl.simulator.outcome import run_chunk

    ordered = list(seeds)
    chunks = [ordered[i : i + CHUNK] for i in range(0, len(ordered), CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield from run_chunk(chunk)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for outcomes in pool.map(run_chunk, chunks):
            yield from outcomes


def _run_many(seeds: range, *, jobs: int) -> int:
    from async_rl.simulator.outcome import Tally

    tally, begun = Tally(), time.monotonic()
    for outcome in run_seeds(seeds, jobs=jobs):
        tally.add(outcome)
    seconds = time.monotonic() - begun
    for line in tally.lines():
        _print(line)
    _print(f"{len(seeds)} seeds from {seeds.start} in {seconds:.1f} s, {len(seeds) / seconds:.1f} a second")
    for failed in tally.failed[:3]:
        _report(failed)
    return 1 if tally.failed else 0


def _replay(seed: int, *, faults: tuple[int, ...] | None, trace: bool) -> int:
    from async_rl.simulator.outcome import run_seed

    outcome = run_seed(seed, faults=faults)
    if trace:
        for line in outcome.trace():
            _print(line)
    _print(f"seed {seed}: trace {outcome.trace_hash}, {len(outcome.events)} events")
    for fault in outcome.fired:
        _print(f"  fault {fault}")
    _print(f"broken: {outcome.text}" if outcome.invariant else "every invariant held")
    return 1 if outcome.invariant else 0


def _report(failed: Outcome) -> None:
    """What broke, with as few faults as needed, and how to see it again."""
    from async_rl.simulator.outcome import shrink

    fewest = shrink(failed)
    _print(f"\nseed {failed.seed} breaks {fewest.text}")
    for fault in fewest.fired:
        _print(f"  fault {fault}")
    _print(f"  replay: {fewest.command}")
    for line in list(fewest.trace())[-LAST_EVENTS:]:
        _print(f"    {line}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(part) for part in text.split(","))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m async_rl.simulate",
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


if __name__ == "__main__":
    sys.exit(main())
