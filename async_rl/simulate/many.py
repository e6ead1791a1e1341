"""Many seeds: run a chunk of them, and add up what came of all."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from async_rl.simulate.outcome import Outcome, run_seed

COLLECT_EVERY = 20  # seeds; a run leaves cycles behind
NEW_OBJECTS = 50_000  # between two looks for short cycles, of which a run makes few


def spare_imports() -> None:
    """Once in a process that runs seeds: what it has imported is not looked through for cycles again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


def run_chunk(seeds: Sequence[int]) -> list[Outcome]:
    """Outcomes in order; those where all is well without their events."""
    outcomes: list[Outcome] = []
    for number, seed in enumerate(seeds):
        outcome = run_seed(seed)
        outcomes.append(outcome if outcome.invariant else replace(outcome, events=()))
        if number % COLLECT_EVERY == COLLECT_EVERY - 1:
            gc.collect()
    return outcomes


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
