"""A description with the lengths and rates of a run, from its config, metrics, schedule and trace.

train          step/seconds without idle/trainer, per token; includes export and record of a step
publish        sync/pause_seconds is the pause, the rest of sync/seconds the transfer
lengths        of the trajectories of `schedule.jsonl`, in as many equal turns as info/turns, rounded
decode step    seconds of each group's span in `trace.json`, without publishes, over the tokens of its longest
               trajectory, as a linear function of the trajectories that were open then; if those are more than a
               replica runs, the others wait. Multiplied by what makes the sum of all tokens right

All are means or fits over the second half of the steps: the first ones fill the pipeline and load kernels. On a CPU,
trainer and replicas share the cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from async_rl.metrics.trace import read_trace
from async_rl.plan.description import (
    Cluster,
    Description,
    Distribution,
    PlanError,
    Publish,
    Rates,
    Workload,
)
from message_queue.staleness import StalenessConfig

Floats = NDArray[np.float64]
Metrics = Mapping[str, float]
FITS = 20


def describe_run(directory: Path, *, cores: int | None = None) -> Description:
    """The cluster, workload and rates of a run.

    Args:
        cores: of the machine of the run; None for those of this one.

    Raises:
        PlanError: a file is missing, or the run is too short.
    """
    try:
        config: Any = yaml.safe_load((directory / "config.yaml").read_text())
        metrics: Sequence[Metrics] = _lines(directory / "metrics.jsonl")
        batches = _lines(directory / "schedule.jsonl")
        events = [event for event in read_trace(directory / "trace.json") if event["ph"] == "X"]
    except OSError as error:
        raise PlanError(
            f"{error.filename} cannot be read: {error.strerror}; --run takes the directory of a run"
        ) from error
    staleness = StalenessConfig(**config["staleness"])
    first, least = len(metrics) // 2, 2 * (staleness.max_staleness + 2)
    if len(metrics) < least or len(batches) < len(metrics):
        raise PlanError(
            f"{directory} has {len(metrics)} train steps; with max_staleness={staleness.max_staleness} a plan "
            f"needs {least}"
        )
    lengths = {
        group["group"]: [sum(tokens for _, tokens in spans) for spans in group["spans"]]
        for batch in batches[first:]
        for group in batch["groups"]
    }
    cluster, steps = cluster_of(config), metrics[first:]
    rollout, sync = config["rollout"], config["sync"]
    replicas = (cluster.gpus - cluster.train_gpus) // cluster.gpus_per_replica
    max_running = config["engine"].get("max_num_seqs", 256)
    decode = _decode_step(events, lengths, replicas=replicas, max_running=max_running)
    shared = _shared_speed(config, cores or os.cpu_count() or 1)
    trained = sum(map(sum, lengths.values())) / len(steps)
    return Description(
        cluster=cluster,
        workload=Workload(
            groups_per_batch=rollout["groups_per_batch"],
            trajectories_per_group=rollout["trajectories_per_group"],
            lengths=Distribution(kind="empirical", values=tuple(t for group in lengths.values() for t in group)),
            turns=max(1, round(_mean(steps, lambda m: m.get("info/turns", 1.0)))),
            bytes_per_token=8 + _mean(steps, lambda m: m.get("routing/bytes_per_token", 0.0)),
        ),
        rates=_rates(
            steps,
            decode=decode,
            tokens=trained / cluster.train_gpus,
            max_running=max_running,
            shared=shared,
            overlaps=staleness.max_staleness > 0,
        ),
        publish=Publish(
            on_update=rollout["on_update"], kv=rollout["kv"], mode=sync["mode"], max_paused=sync["max_paused"]
        ),
        staleness=staleness,
    )


def _rates(
    steps: Sequence[Metrics],
    *,
    decode: tuple[float, float],
    tokens: float,
    max_running: int,
    shared: float,
    overlaps: bool,
) -> Rates:
    """Rates of trainer and replicas, each alone on its cores.

    Args:
        decode: seconds of a decode step as measured, and what each request adds.
        tokens: trained in a step by one rank.
        shared: speed of both while both work.
        overlaps: whether replicas and trainer worked at the same time.
    """
    train_s = _mean(steps, lambda m: m["step/seconds"] * (1 - m["idle/trainer"]))
    busy = train_s / _mean(steps, lambda m: m["step/seconds"])
    of_replica = 1 - busy * (1 - shared) if overlaps else 1.0  # mean speed, over that of a replica alone
    pause_s = _mean(steps, lambda m: m["sync/pause_seconds"])
    return Rates(
        decode_s=max(decode[0] * of_replica, 1e-9),
        decode_s_per_request=decode[1] * of_replica,
        max_running=max_running,
        train_tokens_per_s=tokens / (train_s * (shared if overlaps else 1.0)),
        transfer_s=max(0.0, _mean(steps, lambda m: m["sync/seconds"]) - pause_s),
        load_s=pause_s,
        shared_speed=shared,
    )


def _mean(steps: Sequence[Metrics], value: Callable[[Metrics], float]) -> float:
    return float(np.mean([value(step) for step in steps]))


def cluster_of(config: Mapping[str, Any]) -> Cluster:
    """The processes of a run as GPUs; a rank and an engine rank are one each."""
    engine, ranks = config["engine"], config["trainer"]["ranks"]
    per_replica = engine.get("tensor_parallel", 1) * engine.get("data_parallel", 1)
    return Cluster(
        gpus=ranks + engine["replicas"] * per_replica,
        gpus_per_replica=per_replica,
        train_gpus=ranks,
        train_gpus_unit=ranks,
        synchronous="split",
    )


def _shared_speed(config: Mapping[str, Any], cores: int) -> float:
    """Cores over threads of trainer, replicas and rollout workers on a CPU, at most 1; 1 on GPUs."""
    engine, trainer = config["engine"], config["trainer"]
    if engine.get("device", "auto") == "cuda" or "threads" not in engine:
        return 1.0
    threads = engine["replicas"] * engine["threads"] + trainer["ranks"] * trainer["threads"]
    threads += config["rollout"]["workers"]
    return min(1.0, cores / threads)


def _decode_step(
    events: Sequence[Mapping[str, Any]], lengths: Mapping[int, Sequence[int]], *, replicas: int, max_running: int
) -> tuple[float, float]:
    """Seconds of a decode step without requests, and per request of a replica, by least squares."""
    found_spans = {e["args"]["group"]: (e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["cat"] == "rollout"}
    spans = [(group, at, took) for group, (at, took) in found_spans.items() if group in lengths]
    at, took = np.array([span[1:] for span in spans], np.float64).reshape(-1, 2).T
    spent = took - _overlap(events, "publish", at, took)
    undisturbed = (_overlap(events, "validate", at, took) == 0) & (spent > 0)
    if not undisturbed.any():
        undisturbed = spent > 0
    if not undisturbed.any():
        raise PlanError("trace.json has no rollout of a trained group; let the run make more steps")
    longest = np.array([max(lengths[group]) for group, _, _ in spans], np.float64)
    grid, running = _open(spans, lengths)
    running /= replicas
    found = fit_decode_step(
        longest[undisturbed],
        spent[undisturbed],
        at=at[undisturbed],
        took=took[undisturbed],
        grid=grid,
        running=running,
        max_running=max_running,
    )
    # The level is that of all tokens, in the time outside of publishes; the fit only has the longest trajectories.
    full = np.minimum(running, max_running)
    decoding_s = np.diff(grid) - _overlap(events, "publish", grid[:-1], np.diff(grid))
    tokens_of_fit = replicas * (decoding_s * full / (found[0] + found[1] * full)).sum()
    level = tokens_of_fit / sum(sum(lengths[group]) for group, _, _ in spans)
    return found[0] * level, found[1] * level


def fit_decode_step(
    tokens: Floats, spent: Floats, *, at: Floats, took: Floats, grid: Floats, running: Floats, max_running: int
) -> tuple[float, float]:
    """Seconds of a decode step without requests, and per request of a replica, by least squares.

    Args:
        tokens: float64 [spans], tokens that each span decodes one after the other.
        spent: float64 [spans], seconds that they took.
        at: float64 [spans], start of each span.
        took: float64 [spans], seconds from its start to its end, which may have pauses.
        grid: float64 [T], times at which the number of requests changes.
        running: float64 [T - 1], requests of a replica from each time to the next.
        max_running: requests that a replica decodes at a time; others wait.
    """
    waits = np.maximum(1, running / max_running)  # seconds per token of a request, over those of a decode step
    found = (1.0, 0.0)
    for _ in range(FITS):
        progress = 1 / (found[0] * waits + found[1] * running + 1e-12)  # tokens per second, over the grid

        def mean(values: Floats, progress: Floats = progress) -> Floats:
            """Mean of what the grid has over the tokens of each span."""
            return between(grid, values * progress, at, took) / between(grid, progress, at, took)

        found = _fit(tokens * mean(waits), tokens * mean(running), spent)
    return found


def _overlap(events: Sequence[Mapping[str, Any]], track: str, at: Floats, took: Floats) -> Floats:
    """Seconds of each span in which an event of the track lasts."""
    found = np.zeros(len(at))
    for event in events:
        if event["cat"] == track:
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            found += np.clip(np.minimum(at + took, end) - np.maximum(at, start), 0, None)
    return found


def _open(spans: Sequence[tuple[int, float, float]], lengths: Mapping[int, Sequence[int]]) -> tuple[Floats, Floats]:
    """Times, float64 [T], and the trajectories open from each to the next, [T - 1], in proportion to length."""
    starts = np.array([at for group, at, _ in spans for _ in lengths[group]])
    ends = starts + [took * t / max(lengths[group]) for group, _, took in spans for t in lengths[group]]
    return open_counts(starts, ends)


def open_counts(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Times, float64 [T], at which an interval starts or ends, and the open ones from each to the next, [T - 1]."""
    grid = np.unique([*starts, *ends])
    changes = np.zeros(len(grid))
    np.add.at(changes, np.searchsorted(grid, starts), 1)
    np.add.at(changes, np.searchsorted(grid, ends), -1)
    return grid, changes.cumsum()[:-1]


def between(grid: Floats, values: Floats, at: Floats, took: Floats) -> Floats:
    """Integral of a step function over each span."""
    integral = np.concatenate([[0.0], (values * np.diff(grid)).cumsum()])
    return np.interp(at + took, grid, integral) - np.interp(at, grid, integral)


def _fit(first: Floats, second: Floats, seconds: Floats) -> tuple[float, float]:
    """a, b >= 0 with the least squares of seconds - a first - b second."""
    a, b = np.linalg.lstsq(np.stack([first, second], axis=1), seconds, rcond=None)[0]
    if a < 0:
        return 0.0, float(second @ seconds / (second @ second))
    if b < 0:
        return float(first @ seconds / (first @ first)), 0.0
    return float(a), float(b)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
