"""Overrides that treat the causes of a run, and the steps per hour that each would give.

The run is simulated with its measured rates, then once more with each override. The gain is the ratio of both, applied
to the measured steps per hour. If the simulation has nothing for an override, or is far from the run, the gain is that
of a step without the part of the wall clock that the override removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from async_rl.explain.division import Seconds
from async_rl.plan.description import Description, Distribution
from async_rl.plan.planner import num_replicas
from async_rl.plan.requests import RequestModel
from async_rl.plan.simulation import simulate

LEAST_SHARE = 0.05  # of the wall clock, for a cause to be treated
LEAST_GAIN = 0.02
MOST_ERROR = 0.5  # of the simulated step, for its gains to count
CUT = 0.9  # quantile at which a limit cuts
MOST_SIMULATED = 6
LARGE, THIN_TO = 128, 64  # trajectories of a batch; a larger one is thinned, and gives as good a mean in fewer steps
STEPS, STEPS_OF_LARGE = 24, 10
Change = Callable[[Description], Description]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An override of a run's config, or an action if the config has none."""

    text: str
    """Keys and values for the command line."""
    treats: tuple[str, ...]
    """Causes that it makes shorter."""
    change: Change | None = None
    """Effect in the simulation; None if it has none."""
    removes: float = 0.0
    """Part of the time of its causes that is gone, if the simulation has no effect."""
    price: str = ""
    """What it costs."""
    hardware: bool = False
    """Whether it needs more GPUs, or cores on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An override and its effect."""

    override: Override
    """What is changed."""
    gain: float
    """Steps per hour over those of the run, minus 1."""
    by: Literal["simulation", "share"]
    """How the gain was found."""


def predict(
    config: Mapping[str, Any],
    seconds: Seconds,
    *,
    limit: str,
    step_s: float,
    description: Description | None,
    requests: RequestModel | None,
    seed: int = 0,
) -> tuple[list[Prediction], float | None]:
    """Predictions, those for the limit first, then by gain; and the simulated seconds of a step of the run.

    At most MOST_SIMULATED overrides are simulated: those for the limit, then those whose causes have the most time.

    Args:
        step_s: measured seconds of a batch.
        description: cluster, workload and rates of the run; None if its rates are not known. Without it, or if its
            simulation is further than MOST_ERROR from the measured seconds, gains are those of shares.
    """
    whole = sum(seconds.values())
    shares = {cause: value / whole for cause, value in seconds.items()}
    treated = {cause for cause, share in shares.items() if share >= LEAST_SHARE} | {limit}
    base = None if description is None else _step_s(description, seed=seed)
    trusted = base is not None and abs(base / step_s - 1) <= MOST_ERROR
    found, left = list[Prediction](), MOST_SIMULATED

    def share(override: Override) -> float:
        return sum(shares.get(cause, 0.0) for cause in override.treats)

    candidates = [each for each in _overrides(config, description, requests) if treated & set(each.treats)]
    for override in sorted(candidates, key=lambda each: (limit not in each.treats, -share(each))):
        simulated = trusted and override.change is not None and left > 0
        if simulated and base is not None and description is not None and override.change is not None:
            left -= 1
            changed = _step_s(override.change(description), seed=seed)
            found.append(Prediction(override=override, gain=base / changed - 1, by="simulation"))
        elif override.removes:
            gone = override.removes * share(override)
            found.append(Prediction(override=override, gain=gone / (1 - min(gone, 0.99)), by="share"))

    def rank(prediction: Prediction) -> tuple[bool, bool, float]:
        of_limit = limit in prediction.override.treats and prediction.gain >= LEAST_GAIN
        return not of_limit, prediction.override.hardware, -prediction.gain

    return sorted(found, key=rank), base


def _step_s(description: Description, *, seed: int) -> float:
    """Simulated seconds of a step."""
    workload = description.workload
    if workload.groups_per_batch * workload.trajectories_per_group <= LARGE:
        return simulate(description, steps=STEPS, seed=seed).step_s
    return simulate(description, steps=STEPS_OF_LARGE, seed=seed, thin_to=THIN_TO).step_s


def _overrides(
    config: Mapping[str, Any], description: Description | None, requests: RequestModel | None
) -> Iterator[Override]:
    yield from _of_rollouts(config, description, requests)
    yield from _of_publishes(config)
    yield from _of_trainer(config)
    if description is not None:
        yield from _of_lengths(description)
        yield from _of_gpus(config, description)
    for name in () if requests is None else requests.slow:
        yield Override(
            text=f"restart {name}, or move it to another node",
            treats=("replica",),
            change=lambda d: _interrupted(d, slow_replica=1.0),
        )


def _of_rollouts(
    config: Mapping[str, Any], description: Description | None, requests: RequestModel | None
) -> Iterator[Override]:
    staleness, updates = config["staleness"], config["trainer"].get("updates_per_batch", 1)
    bound = staleness["max_staleness"]
    for more in (1, 2):
        yield Override(
            text=f"staleness.max_staleness={bound + more * updates}",
            treats=("staleness", "tail", "tools", "reward", "rollouts"),
            change=lambda d, more=more: replace(
                d, staleness=replace(d.staleness, max_staleness=d.staleness.max_staleness + more)
            ),
            price="older tokens",
        )
    if staleness["policy"] != "wait":
        yield Override(
            text="staleness=wait",
            treats=("drops",),
            change=lambda d: replace(d, staleness=replace(d.staleness, policy="wait")),
        )
    if description is None or description.interruptions.failed:
        retries = config["rollout"].get("failure", {}).get("max_retries", 0)
        yield Override(
            text=f"rollout.failure.max_retries={retries + 2}",
            treats=("drops",),
            change=lambda d: _interrupted(d, failed=0.0),
            price="if no retry fails",
        )
    if requests is not None:
        slots = requests.max_running
        yield Override(
            text=f"engine.max_num_seqs={2 * slots}",
            treats=("slots",),
            change=lambda d: replace(d, rates=d.rates.model_copy(update={"max_running": 2 * slots})),
            price="K/V memory for twice the requests",
        )
    every = config.get("validation", {}).get("every", 0)
    if every:
        yield Override(
            text=f"validation.every={4 * every}",
            treats=("validation",),
            change=lambda d: _interrupted(d, validation_every=4 * d.interruptions.validation_every),
            removes=0.75,
        )
        prompts = config["validation"]["prompts"]
        yield Override(
            text=f"validation.prompts={max(1, prompts // 4)}",
            treats=("validation",),
            change=lambda d: _interrupted(
                d, validation_trajectories=max(1, d.interruptions.validation_trajectories // 4)
            ),
            removes=0.75,
            price="a wider interval of the held-out success",
        )


def _of_publishes(config: Mapping[str, Any]) -> Iterator[Override]:
    rollout, sync, updates = config["rollout"], config["sync"], config["trainer"].get("updates_per_batch", 1)
    if sync["mode"] == "at_once":
        for mode, price in (("staged", "twice the weights in each replica"), ("rolling", "")):
            yield Override(
                text=f"sync.mode={mode}",
                treats=("publish",),
                change=lambda d, mode=mode: _published(d, mode=mode),
                removes=0.9 if mode == "staged" else 0.0,
                price=price,
            )
    if config["staleness"]["max_staleness"] >= 2 * updates - 1:
        yield Override(
            text=f"sync.every={sync.get('every', 1) + updates}",
            treats=("publish", "repeat", "export"),
            change=lambda d: _published(d, every=d.publish.every + 1),
            removes=0.5,
            price="older tokens",
        )
    if (rollout["on_update"], rollout["kv"]) != ("keep", "keep"):
        yield Override(
            text="rollout.on_update=keep rollout.kv=keep",
            treats=("repeat",),
            change=lambda d: _published(d, on_update="keep", kv="keep"),
            removes=1.0,
            price="K/V of older weights",
        )


def _of_trainer(config: Mapping[str, Any]) -> Iterator[Override]:
    every = config.get("checkpoint", {}).get("every", 0)
    if every:
        yield Override(
            text=f"checkpoint.every={10 * every}",
            treats=("checkpoint",),
            change=lambda d: _interrupted(d, checkpoint_every=10 * d.interruptions.checkpoint_every),
            removes=0.9,
            price="more steps are repeated after a crash",
        )


def _of_lengths(description: Description) -> Iterator[Override]:
    workload = description.workload
    longest = int(np.quantile(workload.lengths.values, CUT))
    if longest < max(workload.lengths.values):
        yield Override(
            text=f"rollout.limits.max_new_tokens_per_turn={max(1, longest // workload.turns)}",
            treats=("tail",),
            change=lambda d: _worked(d, lengths=d.workload.lengths.model_copy(update={"maximum": longest})),
            price=f"cuts {1 - CUT:.0%} of the trajectories",
        )
    calls = workload.tool_s.values
    slowest = float(np.quantile(calls, CUT)) if calls else 0.0
    if calls and slowest < max(calls):
        yield Override(
            text=f"rollout.limits.tool_timeout_s={slowest:.3g}",
            treats=("tools",),
            change=lambda d: _worked(d, tool_s=Distribution(kind="empirical", values=calls, maximum=slowest)),
            price=f"{1 - CUT:.0%} of the tool calls fail",
        )


def _of_gpus(config: Mapping[str, Any], description: Description) -> Iterator[Override]:
    """Ranks and replicas: more of one, or a part of the GPUs of the other."""
    cluster, replicas = description.cluster, num_replicas(description)
    ranks, unit, each = cluster.train_gpus, cluster.train_gpus_unit, cluster.gpus_per_replica

    def split(text: str, treats: tuple[str, ...], *, train: int, served: int) -> Override:
        gpus = train + served * each
        update = {"gpus": gpus, "train_gpus": train}
        return Override(
            text=text,
            treats=treats,
            change=lambda d: replace(d, cluster=d.cluster.model_copy(update=update)),
            price="more hardware" if gpus > cluster.gpus else "",
            hardware=gpus > cluster.gpus,
        )

    of_replicas = ("engines", "slots", "replica", "validation")
    yield split(f"engine.replicas={2 * replicas}", of_replicas, train=ranks, served=2 * replicas)
    yield split(f"trainer.ranks={ranks + unit}", ("train",), train=ranks + unit, served=replicas)
    freed = -(-unit // each)  # replicas on the GPUs of one copy of the model
    if replicas > freed:
        text = f"trainer.ranks={ranks + unit} engine.replicas={replicas - freed}"
        yield split(text, ("train",), train=ranks + unit, served=replicas - freed)
    if ranks > unit and unit >= each:
        text = f"trainer.ranks={ranks - unit} engine.replicas={replicas + unit // each}"
        yield split(text, of_replicas, train=ranks - unit, served=replicas + unit // each)


def _interrupted(description: Description, **changes: Any) -> Description:
    return replace(description, interruptions=description.interruptions.model_copy(update=changes))


def _published(description: Description, **changes: Any) -> Description:
    return replace(description, publish=description.publish.model_copy(update=changes))


def _worked(description: Description, **changes: Any) -> Description:
    return replace(description, workload=description.workload.model_copy(update=changes))
