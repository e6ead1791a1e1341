"""Fit of the decode step, a + b n seconds with n requests on a replica, to requests that share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FITS = 20


@dataclass(frozen=True, slots=True)
class StepFunction:
    """A function of time that is constant between some times, and zero before and after them.

    Requests from 0 to 2 s and from 1 to 4 s: times [0, 1, 2, 4] and values [1, 2, 1].
    """

    times: Floats
    """float64 [T], seconds."""
    values: Floats
    """float64 [T - 1], from each time to the next."""
    integral: Floats = field(init=False)
    """float64 [T], from the first time to each."""

    def __post_init__(self) -> None:
        integral = np.concatenate([[0.0], (self.values * np.diff(self.times)).cumsum()])
        object.__setattr__(self, "integral", integral)

    @classmethod
    def of_open(cls, starts: Floats, ends: Floats) -> StepFunction:
        """Number of intervals that are open at a time."""
        times = np.unique([*starts, *ends])
        changes = np.zeros(len(times))
        np.add.at(changes, np.searchsorted(times, starts), 1)
        np.add.at(changes, np.searchsorted(times, ends), -1)
        return cls(times, changes.cumsum()[:-1])

    def between(self, start: Floats | float, end: Floats | float) -> Floats:
        """Integral over each interval."""
        return np.asarray(np.interp(end, self.times, self.integral) - np.interp(start, self.times, self.integral))

    def mean(self, start: float, end: float) -> float:
        """Mean over an interval; 0 if it has no length."""
        return float(self.between(start, end)) / (end - start) if end > start else 0.0

    def most(self, start: float, end: float) -> float:
        """Largest value in an interval between the first and the last time."""
        first, last = self.times.searchsorted(start, side="right") - 1, self.times.searchsorted(end)
        return float(self.values[first:last].max())


def fit_decode_step(
    tokens: Floats, spent: Floats, *, start: Floats, end: Floats, running: StepFunction, max_running: int
) -> tuple[float, float]:
    """Seconds of a decode step without requests, and per request of a replica, by least squares.

    Args:
        tokens: float64 [requests], tokens that each request decodes one after the other.
        spent: float64 [requests], seconds that they took.
        start: float64 [requests], start of each request, in seconds.
        end: float64 [requests], its end; there may be pauses between.
        running: requests of the replica over time.
        max_running: requests that a replica decodes at a time; others wait.
    """
    waits = np.maximum(1, running.values / max_running)  # seconds per token of a request, over those of a decode step
    found = (1.0, 0.0)
    for _ in range(FITS):
        progress = 1 / (found[0] * waits + found[1] * running.values + 1e-12)  # tokens per second
        decoded = StepFunction(running.times, progress).between(start, end)

        def mean(values: Floats, progress: Floats = progress, decoded: Floats = decoded) -> Floats:
            """Mean over the tokens of each request."""
            return StepFunction(running.times, values * progress).between(start, end) / decoded

        columns = np.stack([tokens * mean(waits), tokens * mean(running.values)], axis=1)
        a, b = not_negative(columns, spent)
        found = float(a), float(b)
    return found


def not_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with coefficients >= 0, over all subsets of the columns.

    Args:
        columns: float64 [values, columns].
        values: float64 [values].

    Returns:
        float64 [columns].
    """
    best, least = np.zeros(columns.shape[1]), math.inf
    for chosen in product((False, True), repeat=columns.shape[1]):
        found = np.zeros(columns.shape[1])
        found[list(chosen)] = np.linalg.lstsq(columns[:, chosen], values, rcond=None)[0]
        error = float(((columns @ found - values) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best
