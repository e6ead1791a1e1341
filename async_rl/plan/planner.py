"""Figures of an asynchronous run against the synchronous one, for the given split of the GPUs and for the best one.

With g the share of a synchronous step that is generation, and U the tokens generated in that time over those that the
same GPUs generate with all slots of the asynchronous run in use, no asynchronous run on these GPUs is faster than

    S_max = 1 / (1 - g + g U)      the GPUs generate and train in turns, and may be divided in any way
    S_max = 1 / max(1 - g, g U)    the synchronous run has the same split
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from async_rl.plan.description import Description
from async_rl.plan.figures import Seen
from async_rl.plan.simulation import simulate, simulate_synchronous

WASTED = 0.05  # least share of groups without a gradient that is reported
SEARCHED = 128  # trajectories of a batch in the thinned simulations of a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An asynchronous run on one division of the GPUs."""

    train_gpus: int
    """GPUs of the trainer."""
    replicas: int
    """Replicas on the other GPUs."""
    speed_up: float
    """Trained tokens per second over those of the synchronous run."""
    s_max: float
    """Bound on the speed-up of any run with these slots."""
    seen: Seen
    """Figures of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The synchronous run, and the asynchronous ones."""

    synchronous: Seen
    """Figures of the synchronous run."""
    given: Split
    """The split of the description."""
    best: Split | None
    """The fastest split that was tried; None if none was searched."""
    without_signal: float = 0.0
    """Share of the groups that have no gradient."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before the run starts."""
        lines = list[str]()
        if self.without_signal >= WASTED:
            lines.append(wasted(self.without_signal))
        if self.given.speed_up < 1:
            lines.append(
                f"asynchronous training with cluster.train_gpus={self.given.train_gpus} is slower than synchronous "
                f"training: {self.given.speed_up:.2f} times its speed"
            )
            if self.best is not None and self.best.speed_up >= 1:
                lines.append(
                    f"cluster.train_gpus={self.best.train_gpus} makes it {self.best.speed_up:.2f} times as fast"
                )
            elif self.best is not None:
                lines.append("no split that was tried is faster; train synchronously (staleness.max_staleness=0)")
        return tuple(lines)

    def values(self) -> dict[str, Any]:
        """All figures with the types of JSON."""
        return asdict(self) | {"warnings": list(self.warnings)}


def wasted(share: float, *, right: float = 0.0, wrong: float = 0.0) -> str:
    """Text about groups without a gradient.

    Args:
        right: share of the groups whose rewards are all above 0. wrong: whose rewards are all 0 or less.
    """
    task = "a harder task" if right > wrong else "an easier task" if wrong > right else "a harder or an easier task"
    return (
        f"{share:.0%} of the groups have equal rewards and so no gradient: that share of the rollouts is wasted; "
        f"{task} gives more of them a spread, and rollout.drop_without_spread=N trains groups with one in their place"
    )


def make_plan(description: Description, *, steps: int, search: bool, seed: int = 0) -> Plan:
    """Simulate the synchronous run, the given split, and with `search` others until no neighbour is faster.

    Args:
        steps: train steps of each simulated run, after those that fill the pipeline.
    """
    synchronous = simulate_synchronous(description, steps=steps, seed=seed)

    def split(train_gpus: int, thin_to: int | None = None) -> Split:
        cluster = description.cluster.model_copy(update={"train_gpus": train_gpus})
        tried = replace(description, cluster=cluster)
        seen = simulate(tried, steps=steps, seed=seed, thin_to=thin_to)
        return Split(
            train_gpus=train_gpus,
            replicas=num_replicas(tried),
            speed_up=seen.tokens_per_s / synchronous.tokens_per_s,
            s_max=s_max(tried, synchronous),
            seen=seen,
        )

    given = split(description.cluster.train_gpus)
    best = None
    if search:
        found = _search(description, partial(split, thin_to=SEARCHED))
        best = max((given, split(found)), key=lambda each: each.speed_up) if found != given.train_gpus else given
    signal = description.workload.without_signal
    return Plan(synchronous=synchronous, given=given, best=best, without_signal=signal)


def num_replicas(description: Description) -> int:
    """Replicas of the asynchronous run."""
    cluster = description.cluster
    return (cluster.gpus - cluster.train_gpus) // cluster.gpus_per_replica


def s_max(description: Description, synchronous: Seen) -> float:
    """See the module; slots are the requests that the bound admits, and at most `rates.max_running` per replica."""
    cluster, workload, rates = description.cluster, description.workload, description.rates
    admitted = (description.staleness.max_staleness + 1) * workload.groups_per_batch * workload.trajectories_per_group
    slots = min(rates.max_running, max(1.0, admitted / num_replicas(description)))
    colocated = cluster.synchronous == "colocated"
    replicas = (cluster.gpus if colocated else cluster.gpus - cluster.train_gpus) // cluster.gpus_per_replica
    used = synchronous.open_tokens_per_s / (replicas * slots / rates.step_s(slots))
    g = synchronous.open_share
    return 1 / (1 - g + g * used) if colocated else 1 / max(1 - g, g * used)


def _search(description: Description, split: Callable[[int], Split]) -> int:
    """GPUs of the trainer with the fastest split.

    Climb from the given split in steps that halve, over multiples of `cluster.train_gpus_unit`.
    """
    unit, given = description.cluster.train_gpus_unit, description.cluster.train_gpus
    last = (description.cluster.gpus - description.cluster.gpus_per_replica) // unit
    tried = {given: split(given)}
    if not last:
        return given

    def at(count: int) -> Split:
        train_gpus = count * unit
        if train_gpus not in tried:
            tried[train_gpus] = split(train_gpus)
        return tried[train_gpus]

    best = min(max(1, round(given / unit)), last)
    width = max(1, last // 4)
    while width:
        candidates = (best, max(1, best - width), min(last, best + width))  # of equal ones the first
        fastest = max(candidates, key=lambda count: at(count).speed_up)
        if fastest == best:
            width //= 2
        best = fastest
    return max(tried, key=lambda train_gpus: tried[train_gpus].speed_up)
