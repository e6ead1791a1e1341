"""Outcomes of seeds: one, what several add up to, and the fewest faults that still give one."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from async_rl.files.command import prog
from async_rl.simulator.scenario import Fault, Scenario, draw_scenario
from async_rl.simulator.world import Event, World

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one seed."""

    seed: int
    """Of the scenario."""
    faults: tuple[int, ...] | None
    """Numbers of the faults that were planned; None: all that the seed draws."""
    fired: tuple[Fault, ...]
    """Faults that happened."""
    invariant: str | None
    """Key of `INVARIANTS` that does not hold; None if all hold."""
    text: str
    """How the invariant was broken; empty if all hold."""
    trace_hash: str
    """Digest of `events`."""
    events: tuple[Event, ...]
    """(virtual seconds, who, what, details) in order; empty in `run_briefly` if all hold."""

    @property
    def command(self) -> str:
        """Replays it."""
        chosen = "" if self.faults is None else f" --faults {','.join(map(str, self.faults)) or 'none'}"
        return f"{prog('simulate')} --seed {self.seed}{chosen} --trace"

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
    content = "\n".join(f"{at:.9f} {who} {what} {details}" for at, who, what, details in world.events)
    return Outcome(
        seed=seed,
        faults=None if faults is None else tuple(sorted(faults)),
        fired=tuple(world.fired),
        invariant=None if world.violation is None else world.violation.invariant,
        text=str(world.violation or ""),
        trace_hash=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        events=tuple(world.events),
    )


def run_scenario(scenario: Scenario) -> World:
    """Run a scenario to its end; its world tells how it went."""
    torch.set_num_threads(1)
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    collects = gc.isenabled()
    gc.collect(1)  # cycles that the last run left behind
    gc.disable()  # objects that close when they are collected would close at another time in another process
    try:
        with tempfile.TemporaryDirectory(prefix="async_rl-simulate-", dir=base) as directory:
            world = World(scenario, directory=Path(directory))
            world.run_to_end()
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


def run_briefly(seed: int) -> Outcome:
    """Run one seed; the outcome comes without its events if all is well."""
    outcome = run_seed(seed)
    return outcome if outcome.invariant else replace(outcome, events=())


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What a person reads of several seeds."""
    kinds = Counter(fault.kind for outcome in outcomes for fault in outcome.fired)
    happened = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    yield f"faults that happened: {happened or 'none'}"
    broken = Counter(outcome.invariant for outcome in outcomes if outcome.invariant)
    yield f"{len(outcomes) - broken.total()} of {len(outcomes)} seeds held every invariant"
    for invariant, count in broken.most_common():
        yield f"  {invariant}: broken by {count}"
