"""Outcomes of seeds: one, all of a chunk, what they add up to, and the fewest faults that still give one."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from async_rl.simulator.scenario import Scenario, draw_scenario
from async_rl.simulator.virtual_time import VirtualTimeLoop
from async_rl.simulator.world import Event, World, run_to_end

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one seed."""

    seed: int
    """Of the scenario."""
    faults: tuple[int, ...] | None
    """Numbers of the faults that were planned; None: all that the seed draws."""
    fired: tuple[str, ...]
    """Faults that happened, as text."""
    invariant: str | None
    """Key of `INVARIANTS` that does not hold; None if all hold."""
    text: str | None
    """How the invariant was broken; None if all hold."""
    trace_hash: str
    """Digest of `events`."""
    events: tuple[Event, ...]
    """(virtual seconds, who, what, details) in order; empty in `run_chunk` if all hold."""

    @property
    def command(self) -> str:
        """Replays it."""
        chosen = "" if self.faults is None else f" --faults {','.join(map(str, self.faults)) or 'none'}"
        return f"python -m async_rl.simulate --seed {self.seed}{chosen} --trace"

    def trace(self) -> Iterator[str]:
        """The events, a line each."""
        for at, who, what, details in self.events:
            yield f"{at:12.6f}  {who:<16} {what} {' '.join(map(str, details))}".rstrip()


def run_seed(seed: int, *, faults: Collection[int] | None = None) -> Outcome:
    """Run one seed with all of its faults, or with those of the given numbers."""
    scenario = draw_scenario(seed)
    if faults is not None:
        scenario = replace(scenario, faults=tuple(f for f in scenario.faults if f.number in faults))
    try:
        world = run_scenario(scenario)
    except BaseException as error:
        error.add_note(f"the simulation of seed {seed} itself failed")
        raise
    violation = world.violation
    content = "\n".join(f"{at:.9f} {who} {what} {details}" for at, who, what, details in world.events)
    return Outcome(
        seed=seed,
        faults=None if faults is None else tuple(sorted(faults)),
        fired=tuple(map(str, world.fired)),
        invariant=None if violation is None else violation.invariant,
        text=None if violation is None else str(violation),
        trace_hash=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        events=tuple(world.events),
    )


def run_scenario(scenario: Scenario) -> World:
    """Run a scenario to its end; its world tells how it went."""
    torch.set_num_threads(1)
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    collects = gc.isenabled()
    gc.disable()  # objects that close when they are collected would close at another time in another process
    try:
        with tempfile.TemporaryDirectory(prefix="async_rl-simulate-", dir=base) as directory:
            loop = VirtualTimeLoop()
            world = World(scenario, directory=Path(directory), loop=loop)
            run_to_end(world, loop)
            return world
    finally:
        if collects:
            gc.enable()


def shrink(failed: Outcome, *, run: Callable[..., Outcome] = run_seed) -> Outcome:
    """The same broken invariant with as few faults as dropping one after the other leaves."""
    if failed.invariant is None:
        raise ValueError(f"seed {failed.seed} breaks no invariant; there is nothing to shrink")
    best = failed
    numbers = [fault.number for fault in draw_scenario(failed.seed).faults]
    for number in list(numbers):
        fewer = [n for n in numbers if n != number]
        outcome = run(failed.seed, faults=fewer)
        if outcome.invariant == failed.invariant:
            best, numbers = outcome, fewer
    return best


def run_chunk(seeds: Sequence[int]) -> list[Outcome]:
    """Outcomes in order; those where all is well without their events."""
    outcomes = [run_seed(seed) for seed in seeds]
    gc.collect()  # a run leaves cycles behind
    return [outcome if outcome.invariant else replace(outcome, events=()) for outcome in outcomes]


class Tally:
    """Counts over seeds. failed: outcomes in which an invariant is broken. faults: how often each kind happened."""

    def __init__(self) -> None:
        self.failed: list[Outcome] = []
        self._seeds = 0
        self.faults: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        self._seeds += 1
        self.faults.update(fault.partition(": ")[2].rpartition(" (")[0] for fault in outcome.fired)
        if outcome.invariant is not None:
            self.failed.append(outcome)

    def lines(self) -> Iterator[str]:
        """What a person reads."""
        happened = ", ".join(f"{kind} {count}" for kind, count in self.faults.most_common())
        yield f"faults that happened: {happened or 'none'}"
        yield f"{self._seeds - len(self.failed)} of {self._seeds} seeds held every invariant"
        by_invariant = Counter(outcome.invariant for outcome in self.failed)
        for invariant, count in by_invariant.most_common():
            yield f"  {invariant}: broken by {count}"
