"""Overrides that treat the causes of a run, and the steps per hour that each would give.

The run is simulated with its measured rates, then once more with each override. The gain is the ratio of both, applied
to the measured steps per hour. If the simulation is far from the run, the gain is that of a step without the part of
the wall clock that the override removes.
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


@dataclass(frozen=True, slots=True)
class Override:
    """An override of a run's config, or an action if the config has none."""

    text: str
    """Keys and values for the command line."""
    treats: tuple[str, ...]
    """Causes that it makes shorter."""
    change: Change
    """Effect in the simulation."""
    removes: float = 0.0
    """Part of the time of its causes that is gone, for a run that is not simulated; 0 if that is not known."""
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
    base = None if description is None else _step_s(description)
    trusted = base is not None and abs(base / step_s - 1) <= MOST_ERROR
    found = list[Prediction]()

    def share(override: Override) -> float:
        return sum(shares.get(cause, 0.0) for cause in override.treats)

    candidates = [each for each in _overrides(config, description, requests) if treated & set(each.treats)]
    candidates.sort(key=lambda each: (limit not in each.treats, -share(each)))
    for place, override in enumerate(candidates):
        if trusted and base is not None and description is not None and place < MOST_SIMULATED:
            gain = base / _step_s(override.change(description)) - 1
            found.append(Prediction(override=override, gain=gain, by="simulation"))
        elif override.removes:
            gone = override.removes * share(override)
            found.append(Prediction(override=override, gain=gone / (1 - min(gone, 0.99)), by="share"))

    def rank(prediction: Prediction) -> tuple[bool, bool, float]:
        of_limit = limit in prediction.override.treats and prediction.gain >= LEAST_GAIN
        return not of_limit, prediction.override.hardware, -prediction.gain

    return sorted(found, key=rank), base


def _step_s(description: Description) -> float:
    """Simulated seconds of a step."""
    workload = description.workload
    if workload.groups_per_batch * workload.trajectories_per_group <= LARGE:
        return simulate(description, steps=STEPS).step_s
    return simulate(description, steps=STEPS_OF_LARGE, thin_to=THIN_TO).step_s


def _overrides(
    config: Mapping[str, Any], description: Description | None, requests: RequestModel | None
) -> Iterator[Override]:
    yield from _of_rollouts(config, description)
    yield from _of_publishes(config)
    yield from _of_interruptions(config)
    if description is not None:
        yield from _of_lengths(description)
        yield from _of_gpus(description)
    if requests is not None:
        slots = 2 * requests.max_running
        change, price = _set("rates", max_running=slots), "K/V memory for twice the requests"
        yield Override(f"engine.max_num_seqs={slots}", ("slots",), change, price=price)
        for name in requests.slow:
            change = _set("interruptions", slow_replica=1.0)
            yield Override(f"restart {name}, or move it to another node", ("replica",), change)


def _of_rollouts(config: Mapping[str, Any], description: Description | None) -> Iterator[Override]:
    staleness, updates = config["staleness"], config["trainer"].get("updates_per_batch", 1)
    treats = ("staleness", "tail", "tools", "reward", "rollouts")
    for more in (1, 2):
        change = _set("staleness", max_staleness=lambda d, more=more: d.staleness.max_staleness + more)
        text = f"staleness.max_staleness={staleness['max_staleness'] + more * updates}"
        yield Override(text, treats, change, price="older tokens")
    if staleness["policy"] != "wait":
        yield Override("staleness=wait", ("drops",), _set("staleness", policy="wait"))
    if description is None or description.interruptions.failed:
        text = f"rollout.failure.max_retries={config['rollout'].get('failure', {}).get('max_retries', 0) + 2}"
        yield Override(text, ("drops",), _set("interruptions", failed=0.0), price="if no retry fails")


def _of_publishes(config: Mapping[str, Any]) -> Iterator[Override]:
    rollout, sync, updates = config["rollout"], config["sync"], config["trainer"].get("updates_per_batch", 1)
    if sync["mode"] == "at_once":
        for mode, removes, price in (("staged", 0.9, "twice the weights in each replica"), ("rolling", 0.0, "")):
            yield Override(f"sync.mode={mode}", ("publish",), _set("publish", mode=mode), removes, price)
    if config["staleness"]["max_staleness"] >= 2 * updates - 1:
        change = _set("publish", every=lambda d: d.publish.every + 1)
        text = f"sync.every={sync.get('every', 1) + updates}"
        yield Override(text, ("publish", "repeat", "export"), change, removes=0.5, price="older tokens")
    if (rollout["on_update"], rollout["kv"]) != ("keep", "keep"):
        change, price = _set("publish", on_update="keep", kv="keep"), "K/V of older weights"
        yield Override("rollout.on_update=keep rollout.kv=keep", ("repeat",), change, removes=1.0, price=price)


def _of_interruptions(config: Mapping[str, Any]) -> Iterator[Override]:
    if every := config.get("validation", {}).get("every", 0):
        change = _set("interruptions", validation_every=lambda d: 4 * d.interruptions.validation_every)
        yield Override(f"validation.every={4 * every}", ("validation",), change, removes=0.75)
        price = "a wider interval of the held-out success"
        change = _set(
            "interruptions", validation_trajectories=lambda d: max(1, d.interruptions.validation_trajectories // 4)
        )
        text = f"validation.prompts={max(1, config['validation']['prompts'] // 4)}"
        yield Override(text, ("validation",), change, removes=0.75, price=price)
    if every := config.get("checkpoint", {}).get("every", 0):
        change = _set("interruptions", checkpoint_every=lambda d: 10 * d.interruptions.checkpoint_every)
        price = "more steps are repeated after a crash"
        yield Override(f"checkpoint.every={10 * every}", ("checkpoint",), change, removes=0.9, price=price)


def _of_lengths(description: Description) -> Iterator[Override]:
    workload = description.workload
    longest = int(np.quantile(workload.lengths.values, CUT))
    if longest < max(workload.lengths.values):
        change = _set("workload", lengths=lambda d: d.workload.lengths.model_copy(update={"maximum": longest}))
        text = f"rollout.limits.max_new_tokens_per_turn={max(1, longest // workload.turns)}"
        yield Override(text, ("tail",), change, price=f"cuts {1 - CUT:.0%} of the trajectories")
    calls = workload.tool_s.values
    if calls and (slowest := float(np.quantile(calls, CUT))) < max(calls):
        change = _set("workload", tool_s=Distribution(kind="empirical", values=calls, maximum=slowest))
        text, price = f"rollout.limits.tool_timeout_s={slowest:.3g}", f"{1 - CUT:.0%} of the tool calls fail"
        yield Override(text, ("tools",), change, price=price)


def _of_gpus(description: Description) -> Iterator[Override]:
    """Ranks and replicas: more of one, or a part of the GPUs of the other."""
    cluster, replicas = description.cluster, num_replicas(description)
    ranks, unit, each = cluster.train_gpus, cluster.train_gpus_unit, cluster.gpus_per_replica

    def split(text: str, treats: tuple[str, ...], *, train: int, served: int) -> Override:
        gpus = train + served * each
        more = gpus > cluster.gpus
        change = _set("cluster", gpus=gpus, train_gpus=train)
        return Override(text, treats, change, price="more hardware" if more else "", hardware=more)

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


def _set(part: str, **values: Any) -> Change:
    """The change of a description that sets values in a part of it; a function gives the value for a description."""

    def change(description: Description) -> Description:
        found = {key: value(description) if callable(value) else value for key, value in values.items()}
        old: Any = getattr(description, part)
        new = old.model_copy(update=found) if hasattr(old, "model_copy") else replace(old, **found)
        return replace(description, **{part: new})

    return change
