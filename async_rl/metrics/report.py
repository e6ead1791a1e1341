"""One HTML page for one or more runs, opened from disk: `report.html` with the data of the run directories.

The page has charts, drop reasons, links to rollouts, all metrics and the config. `_run_data` lists the data of a run.
The charts are drawn by Plotly, whose script is in the page.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from plotly.offline import get_plotlyjs

from async_rl.files.atomic_dir import whole_file
from async_rl.files.jsonl import read_lines
from async_rl.files.masking import differences, dotted, masked
from async_rl.files.rollouts import FOLDER, read_failed, read_steps
from async_rl.files.starts import STARTS
from async_rl.metrics.pages import json_script, packed_script, template
from async_rl.metrics.registry import FILTERS, INFO, METRICS, ROUTING, Metric, metric_of, split_layer

_DIGITS = 6
RECENT = 10  # batches in a mean over the newest ones
_LAG_LABELS = {"lag0": "0", "lag0_mixed": "0, mixed", "lag1": "1", "lag2": "2", "lag3": "3+"}
_OF_RANK = ("old_policy", "reference", "proximal", "values", "forward_backward", "critic", "optimizer")
_OF_CONTROLLER = ("export", "probe", "checkpoint")
_PHASES = ("wait", "batch", *_OF_RANK, *_OF_CONTROLLER, "other")
_SPANS = {
    "controller train": {kind: kind for kind in ("wait", *_OF_CONTROLLER)},
    "trainer-0 rank": {**dict.fromkeys(("fetch", "build", "record"), "batch"), **{kind: kind for kind in _OF_RANK}},
}
"""Track of the trace -> kind of span -> phase of a train step."""
_COMPUTED = {
    "recent/throughput": Metric("last", "tokens/s", f"sampled tokens trained per second, newest {RECENT} batches"),
    "recent/limit": Metric("last", "tokens/s", "the same per second in which the trainer did not wait for a batch"),
    "recent/idle_trainer": Metric("last", "share", f"time that the trainer waited, newest {RECENT} batches"),
    "recent/idle_replicas": Metric("last", "share", f"time without a request in flight, newest {RECENT} batches"),
    "staleness/share": Metric("last", "share", "tokens in the loss by their staleness in optimizer steps, whole run"),
    "validation/success": Metric("last", "", "mean reward on the held-out prompts"),
    "phase/wait": Metric("sum", "s", "time of a step by what the controller and trainer rank 0 did, from trace.json"),
}
"""Values that this module makes, and validations."""
_SIGNALS = ("without_signal", "all_right", "all_wrong")
_NO_CURVES = ("validation/success", "prompts", "samples", "_version")  # of the validations


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart of the page."""

    title: str
    """Heading."""
    keys: tuple[str, ...]
    """Metrics in it."""
    topic: str = ""
    """Heading that the chart is folded under; empty for the charts that come first."""
    over: str = "step"
    """Horizontal axis: `step` for lines over the axis that the reader chose; for bars `layer`, `staleness` or `lag` (a
    bucket of `registry.LAGS`), each a mean over the run."""
    log: bool = False
    """Whether the vertical axis is logarithmic at first."""
    zero: bool = False
    """Whether the vertical axis includes 0."""
    stack: bool = False
    """Whether the lines of a single run are stacked."""


def _panel(topic: str, title: str, *keys: str, **options: Any) -> Panel:
    return Panel(title=title, topic=topic, keys=keys, **options)


PANELS = (
    _panel("", "Reward", "validation/success", "reward/mean"),
    _panel("", "Mismatch of engine and trainer", "mismatch/k3", "mismatch/k3_lag0", "mismatch/k3_probe", log=True),
    _panel("", "Staleness", "staleness/mean", "staleness/p99", "staleness/max", zero=True),
    _panel("", "Throughput", "recent/throughput", "recent/limit", zero=True),
    _panel("", "Tokens of a trajectory", *(f"length/{k}_{p}" for p in ("p50", "p90") for k in ("offered", "trained"))),
    _panel("Reward", "Groups without signal", *(f"reward/groups_{k}" for k in _SIGNALS), zero=True),
    _panel("Reward", "Spread of the rewards", "reward/std", zero=True),
    _panel("Reward", "Cut-off rollouts", "rollout/cut_off_fraction", "rollout/out_of_turns_fraction", zero=True),
    _panel("Reward", "Partial rollouts", "partial/resumed_fraction", zero=True),
    _panel("Loss", "Loss", "loss"),
    _panel("Loss", "Entropy", "entropy"),
    _panel("Loss", "Gradient norm", "grad_norm", zero=True),
    _panel("Loss", "Learning rate", "lr", zero=True),
    _panel("Loss", "KL", "kl/reference", "kl/proximal", "kl/penalty"),
    _panel("Loss", "Clipped, cut or masked tokens", *(f"{name}/fraction" for name in FILTERS), zero=True),
    _panel("Critic", "Value loss", "critic/loss", zero=True),
    _panel("Critic", "Explained variance", "critic/explained_variance"),
    _panel("Critic", "Mean value", "critic/value_mean"),
    _panel("Critic", "Gradient norm of the critic", "critic/grad_norm", zero=True),
    _panel("Critic", "Staleness of the critic", "critic/staleness", zero=True),
    _panel("Mismatch", "Differences of the logprobs", "mismatch/abs_mean", "mismatch/abs_p99", log=True),
    _panel("Mismatch", "Effective sample size", "ess/token", "ess/sequence"),
    _panel("Mismatch", "Mismatch by staleness", "mismatch/k3", over="lag", log=True),
    _panel("Mismatch", "Trained tokens by staleness", "staleness/share", over="staleness", zero=True),
    _panel("Routing", "Routing overlap", "routing/overlap"),
    *(_panel("Routing", f"{key.partition('/')[2]} by layer", key, over="layer", zero=True) for key in ROUTING),
    _panel("Time", "Phases of a step", *(f"phase/{name}" for name in _PHASES), zero=True, stack=True),
    _panel("Time", "Idle share", "recent/idle_trainer", "recent/idle_replicas", zero=True),
    _panel("Time", "Operations per second of a trainer rank", "throughput/train_tflops", zero=True),
    _panel("Time", "Share of the GPU's peak", "throughput/mfu", zero=True),
    _panel("Time", "Tokens per token that is computed (shared prefixes)", "tree/compression"),
    _panel("Time", "Time of a step", "step/seconds", zero=True),
    _panel("Time", "Time of a publish", "sync/seconds", "sync/pause_seconds", zero=True),
    _panel("Time", "Groups in the queue", "queue/ready", "queue/open", zero=True),
)
"""The charts: five that tell whether a run learns, whether its gradient is right and whether it is fast, then topics.

Reward is the goal. k3 shows a wrong gradient before the reward does, and staleness its most frequent cause. Throughput
next to its limit shows what the engines cost the trainer, and lengths collapse or grow when a policy finds a shortcut.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Records of a run directory."""

    directory: Path
    """The directory."""
    steps: Sequence[dict[str, Any]]
    """Objects of metrics.jsonl, one per batch."""
    validations: Sequence[dict[str, Any]]
    """Objects of validation.jsonl; empty if the file does not exist."""

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.directory.resolve().name

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(train steps, values) of a metric, float64 [n] each; steps and validations without a value are left out."""
        lines = self.validations if key.startswith("validation/") else self.steps
        rows = [(line["train_step"], line[key]) for line in lines if line.get(key) is not None]
        table = np.array(rows, np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]


def read_run(directory: Path) -> RunRecord:
    """Read the records of a run directory.

    Raises:
        ValueError: metrics.jsonl does not exist, or a line is damaged; the message names the file.
    """
    if not (directory / "metrics.jsonl").is_file():
        raise ValueError(f"{directory / 'metrics.jsonl'} does not exist; give the output_dir of a run")
    steps, validations = (_read_lines(directory / f"{name}.jsonl") for name in ("metrics", "validation"))
    return RunRecord(directory=directory, steps=steps, validations=validations)


def write_report(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the page of one or more runs; see `report_page`."""
    text = report_page(runs, beside=path.parent)
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def report_page(runs: Sequence[RunRecord], *, beside: Path) -> str:
    """The page of one or more runs.

    Args:
        beside: folder of the page, for its links to the rollouts of the runs.

    Raises:
        ValueError: a line of a ledger is damaged; the message names the file.
    """
    metrics = _metrics(runs)
    own = [key for key in metrics if key.startswith((INFO, "validation/")) and not key.endswith(_NO_CURVES)]
    panels = [*PANELS, *(_panel("Task", key, key) for key in own)]
    data = {
        "runs": [_run_data(run, beside=beside) for run in runs],
        "panels": [asdict(panel) for panel in panels],
        "metrics": metrics,
        "meanings": {key: [metric.unit, metric.meaning] for key, metric in (METRICS | _COMPUTED).items()},
        "lags": list(_LAG_LABELS.values()),
    }
    before, after = template("report").split("<!--data-->")
    library = packed_script("plotly", get_plotlyjs().encode())
    return before + json_script("data", data) + library + after


def _run_data(run: RunRecord, *, beside: Path) -> dict[str, Any]:
    """Data of a run for the page: columns of steps and validations by key, and the rest of its directory."""
    folder = run.directory
    configs = _configs(folder)
    ledger = _read_lines(folder / "ledger.jsonl")
    outcomes = Counter(record["outcome"] for record in ledger)
    tokens = Counter[int]()
    for step in run.steps:
        tokens.update({int(lag): count for lag, count in step.get("staleness/tokens", {}).items()})
    return {
        "name": run.name,
        "directory": str(folder),
        "page": Path(os.path.relpath(folder, beside), "rollouts.html").as_posix(),
        "steps": _columns(run.steps) | _recent(run.steps) | _phases(folder, run.steps),
        "validations": _columns(run.validations),
        "layers": _by_layer(run),
        "staleness": [sorted(tokens), [_rounded(tokens[lag] / (tokens.total() or 1)) for lag in sorted(tokens)]],
        "mismatch": _mismatch_by_lag(run.steps),
        "outcomes": {outcome: outcomes[outcome] for outcome in ("trained", "dropped")},
        "drops": _drops(ledger),
        "failed": _failed(folder),
        "rollouts": list(_best_and_worst(folder)),
        "starts": _read_lines(folder / STARTS),
        "config": dict(dotted(configs[-1][1])) if configs else {},
        "changes": [f"{name}: {text}" for (_, old), (name, new) in pairwise(configs) for text in differences(old, new)],
    }


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each record, None for none. Objects such as `staleness/tokens` are left out."""
    keys = dict.fromkeys(key for record in records for key, value in record.items() if not isinstance(value, dict))
    return {key: [_rounded(record.get(key)) for record in records] for key in keys}


def _by_layer(run: RunRecord) -> dict[str, list[list[Any]]]:
    """Routing metric -> layers (global, from 0), and the mean of each over the train steps; see `registry.of_layer`."""
    found: dict[str, dict[int, float]] = {}
    for key in dict.fromkeys(key for step in run.steps for key in step):
        if (place := split_layer(key)) is not None and len(values := run.column(key)[1]):
            found.setdefault(place[0], {})[place[1]] = _rounded(float(values.mean()))
    return {key: [sorted(means), [means[layer] for layer in sorted(means)]] for key, means in found.items()}


def _recent(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rates at each step over its batch and those before it, RECENT in all; empty if a step has no times.

    A step whose batch was ready takes little time, so that the rate of one step says little. The limit is the
    throughput in the time that the trainer did not wait.
    """
    keys = ("step/seconds", "idle/trainer", "idle/rollout", "throughput/tokens_per_s")
    if any(step.get(key) is None for step in steps for key in keys):
        return {}
    columns = np.array([[step[key] for key in keys] for step in steps], np.float64).reshape(-1, len(keys))
    seconds = columns[:, 0]
    sums = np.stack([seconds, *(seconds * column for column in columns.T[1:])]).cumsum(axis=1)
    sums[:, RECENT:] -= sums[:, :-RECENT].copy()
    seconds, trainer, replicas, tokens = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "recent/throughput": tokens / seconds,
            "recent/limit": tokens / (seconds - trainer),
            "recent/idle_trainer": trainer / seconds,
            "recent/idle_replicas": replicas / seconds,
        }
    return {key: list(map(_rounded, values.tolist())) for key, values in found.items()}


def _phases(folder: Path, steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """`phase/NAME` -> its seconds in each train step, None without its spans. `other` is the rest of the step.

    A span belongs to the newest wait for a batch that began before it; of a step that was trained more than once, the
    last time counts.
    """
    spans = [span for name in ("trace-earlier.json", "trace.json") for span in _phase_spans(folder / name)]
    waits = sorted((ts, step) for phase, ts, _, step in spans if phase == "wait")
    last = {step: number for number, (_, step) in enumerate(waits)}
    sums: dict[tuple[str, int], float] = {}
    for phase, ts, seconds, _ in spans:
        number = bisect_right(waits, ts, key=lambda wait: wait[0]) - 1
        sums[phase, number] = sums.get((phase, number), 0.0) + seconds
    rows = [last.get(step["train_step"]) for step in steps]
    found = {name: [sums.get((name, row)) if row is not None else None for row in rows] for name, _ in sums}
    if found and all(step.get("step/seconds") is not None for step in steps):
        known = [sum(values[i] or 0.0 for values in found.values()) for i in range(len(steps))]
        found["other"] = [max(0.0, step["step/seconds"] - of_it) for step, of_it in zip(steps, known, strict=True)]
    return {f"phase/{name}": [_rounded(value) for value in values] for name, values in found.items()}


def _phase_spans(path: Path) -> Iterator[tuple[str, int, float, int]]:
    """(phase, start in us, seconds, step of a wait or -1) of the spans in a trace that are phases of a step."""
    tracks = {f'"tid":"{track} '.encode(): phases for track, phases in _SPANS.items()}
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            phases = next((phases for track, phases in tracks.items() if track in line), None)
            if phases is not None and line.endswith(b",\n") and (event := json.loads(line[:-2])).get("cat") in phases:
                yield phases[event["cat"]], event["ts"], event["dur"] / 1e6, event["args"].get("step", -1)


def _mismatch_by_lag(steps: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[Any]]:
    """Numbers of the lag buckets with tokens, and the mean k3 over the tokens of each."""
    found: dict[int, Any] = {}
    for number, lag in enumerate(_LAG_LABELS):
        pairs = [(step.get(f"tokens/{lag}") or 0, step.get(f"mismatch/k3_{lag}")) for step in steps]
        tokens, k3 = np.array([pair for pair in pairs if pair[1] is not None], np.float64).reshape(-1, 2).T
        if tokens.any():
            found[number] = _rounded(float(np.average(k3, weights=tokens)))
    return list(found), list(found.values())


def _rounded(value: Any) -> Any:
    """A number with `_DIGITS` digits, None for NaN."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _metrics(runs: Sequence[RunRecord]) -> dict[str, dict[str, str]]:
    """Key -> unit and meaning, of the metrics that a run has: those of the registry first, then those of the run."""
    steps = dict.fromkeys(key for run in runs for step in run.steps for key in step)
    rounds = dict.fromkeys(key for run in runs for each in run.validations for key in each if key != "train_step")
    ordered = [*(key for key in METRICS if key in steps), *sorted(key for key in steps if key not in METRICS)]
    found = {
        key: {"unit": metric.unit, "meaning": metric.meaning}
        for key in ordered
        if (metric := metric_of(key)) is not None
    }
    return found | {key: {"unit": "", "meaning": "of the newest validation"} for key in rounds}


def _drops(ledger: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drops by kind, the most frequent first."""
    drops: dict[str, list[Mapping[str, Any]]] = {}
    for record in ledger:
        if record["outcome"] == "dropped":
            drops.setdefault(record.get("kind") or "of an earlier version", []).append(record)
    return [
        {
            "reason": kind,
            "groups": len(records),
            "tokens": sum(record["tokens"] or 0 for record in records),
            "last": records[-1]["reason"],
        }
        for kind, records in sorted(drops.items(), key=lambda item: -len(item[1]))
    ]


def _failed(folder: Path) -> list[dict[str, Any]]:
    """Failed rollouts by the kind of their error, the most frequent first, and the newest one of each kind."""
    counts, newest = Counter[str](), dict[str, dict[str, int]]()
    for _, rollout in read_failed(folder / FOLDER):
        if not isinstance(rollout, str):
            counts[rollout.title] += 1
            newest[rollout.title] = {"group": rollout.group, "trajectory": rollout.trajectory}
    return [{"error": kind, "rollouts": count, **newest[kind]} for kind, count in counts.most_common()]


def _best_and_worst(folder: Path) -> Iterator[dict[str, Any]]:
    """For each recorded batch, its step, the trajectories with the highest and the lowest reward, and counts."""
    for step, table in read_steps(folder / FOLDER, columns=["group", "trajectory", "reward", "stop_reason"]):
        if isinstance(table, str):
            continue
        rows = table.to_pylist()
        sound = [row for row in rows if row.pop("stop_reason") != "error"]
        ends = {"best": max, "worst": min}
        found = {name: pick(sound, key=lambda row: row["reward"], default=None) for name, pick in ends.items()}
        yield {"step": step, "count": len(rows), "failed": len(rows) - len(sound), **found}


def _configs(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, values) of the configs of a run, oldest first; see `controller.resume`."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in (folder / "config.yaml", *sorted(folder.glob("config-??????.yaml"))):
        with contextlib.suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
            if isinstance(values := yaml.safe_load(path.read_text(encoding="utf-8")), Mapping):
                found.append((path.name, masked(values)))
    return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file; none if it does not exist."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path) if path.is_file() else (), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is damaged: {error}") from error
    return records
