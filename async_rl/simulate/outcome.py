"""One seed, its outcome, and the fewest faults that still give it."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from async_rl.simulate.scenario import Fault, Scenario, draw_scenario
from async_rl.simulate.virtual_time import VirtualTimeLoop
from async_rl.simulate.world import Event, World, run_to_end

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a seed.

    faults: that were to happen; None: all that the seed draws. fired: that happened. invariant, text: what does not
    hold; None where all is well. trace_hash: of every event, its time and its content.
    """

    seed: int
    faults: tuple[int, ...] | None
    fired: tuple[str, ...]
    invariant: str | None
    text: str | None
    trace_hash: str
    events: tuple[Event, ...]

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
    gc.disable()  # what is closed when it is collected would be closed at another time in another process
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
    numbers = [f.number for f in _faults_of(failed)]
    for number in list(numbers):
        fewer = [n for n in numbers if n != number]
        outcome = run(failed.seed, faults=fewer)
        if outcome.invariant == failed.invariant:
            best, numbers = outcome, fewer
    return best


def _faults_of(outcome: Outcome) -> list[Fault]:
    every = draw_scenario(outcome.seed).faults
    return [f for f in every if outcome.faults is None or f.number in outcome.faults]
