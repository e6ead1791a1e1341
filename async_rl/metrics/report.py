"""One HTML page for one or more runs, which opens from disk: `report.html` with the data of the run directories.

The page has plots, drop reasons, links to rollouts, all metrics and the config. `_run_data` lists the data of a run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from async_rl.files.atomic_dir import whole_file
from async_rl.files.jsonl import read_lines
from async_rl.files.masking import masked
from async_rl.files.rollouts import FOLDER, kind_of_error, read_failed, read_steps
from async_rl.metrics.registry import METRICS, metric_of, split_layer

_PAGE = Path(__file__).with_suffix(".html")
_DIGITS = 6
RECENT = 10  # batches in a mean over the newest ones
_LAG_LABELS = {"lag0": "0", "lag0_mixed": "0, mixed", "lag1": "1", "lag2": "2", "lag3": "3+"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plot of the page."""

    title: str
    """Heading."""
    keys: tuple[tuple[str, str], ...]
    """(key of a metric, label in the plot)."""
    unit: str = ""
    """Unit of the values; empty for plain numbers."""
    over: str = "step"
    """Horizontal axis: `step`, `validation` (the step of a validation), `validation time` (its wall time), `layer`,
    `staleness` or `lag` (a bucket of `registry.LAGS`)."""
    log: bool = False
    """Whether the vertical axis is logarithmic; values that are not positive are left out."""
    zero: bool = False
    """Whether the vertical axis includes 0."""


def _of_layers(title: str, key: str, *, zero: bool = False) -> Panel:
    return Panel(title=f"{title}, mean over the run", keys=((key, key),), unit="share", over="layer", zero=zero)


PANELS = (
    Panel(title="Held-out success", keys=(("validation/success", "success"),), over="validation"),
    Panel(title="Held-out success over wall time", keys=(("validation/success", "success"),), over="validation time"),
    Panel(
        title=f"Throughput, {RECENT} batches",
        keys=(("recent/throughput", "trained"), ("recent/limit", "limit: the trainer never waits")),
        unit="tokens/s",
        zero=True,
    ),
    Panel(
        title=f"Idle, {RECENT} batches",
        keys=(("recent/idle_trainer", "trainer"), ("recent/idle_replicas", "replicas")),
        unit="share of the time",
        zero=True,
    ),
    Panel(
        title="Staleness",
        keys=(("staleness/mean", "mean"), ("staleness/p99", "p99"), ("staleness/max", "max")),
        unit="updates",
        zero=True,
    ),
    Panel(title="Trained tokens by staleness", keys=(("share", "share"),), unit="share", over="staleness", zero=True),
    Panel(
        title="Mismatch by staleness, k3, mean over the run",
        keys=(("mismatch/k3", "k3"),),
        unit="nat",
        over="lag",
        log=True,
    ),
    Panel(
        title="Mismatch of engine and trainer, k3",
        keys=(("mismatch/k3", "all tokens"), ("mismatch/k3_lag0", "lag 0"), ("mismatch/k3_probe", "equal weights")),
        unit="nat",
        log=True,
    ),
    Panel(
        title="Tokens of a trajectory",
        keys=(
            ("length/offered_p50", "sampled p50"),
            ("length/offered_p90", "sampled p90"),
            ("length/trained_p50", "trained p50"),
            ("length/trained_p90", "trained p90"),
        ),
        unit="tokens",
        zero=True,
    ),
    _of_layers("Routing overlap by layer", "routing/overlap"),
    _of_layers("Gate mass of the recorded experts by layer", "routing/gate_mass"),
    _of_layers("Refused experts by layer", "routing/refused_fraction", zero=True),
    _of_layers("Rows left to the live router by layer", "routing/fallback_fraction", zero=True),
    Panel(title="Routing: recorded experts that the live router chooses too", keys=(("routing/overlap", "overlap"),)),
    Panel(title="Reward", keys=(("reward/mean", "mean"),)),
    Panel(title="Loss", keys=(("loss", "loss"),), unit="nat"),
    Panel(title="Entropy", keys=(("entropy", "entropy"),), unit="nat"),
    Panel(title="Gradient norm before clipping", keys=(("grad_norm", "norm"),), zero=True),
    Panel(
        title="Tokens that the loss clips, cuts or masks",
        keys=(("clip/fraction", "clip"), ("truncate/fraction", "truncate"), ("mask/fraction", "mask")),
        unit="share",
        zero=True,
    ),
    Panel(
        title="Groups without signal",
        keys=(
            ("reward/groups_without_signal", "all"),
            ("reward/groups_all_right", "all right"),
            ("reward/groups_all_wrong", "all wrong"),
        ),
        unit="share of groups",
        zero=True,
    ),
    Panel(
        title="Partial rollouts",
        keys=(("partial/resumed_fraction", "aborted and resumed"),),
        unit="share of trajectories",
        zero=True,
    ),
    Panel(
        title="Cut-off rollouts",
        keys=(("rollout/cut_off_fraction", "token limit"), ("rollout/out_of_turns_fraction", "turn limit")),
        unit="share of trajectories",
        zero=True,
    ),
    Panel(title="Time of a step", keys=(("step/seconds", "seconds"),), unit="s", zero=True),
    Panel(title="Time of a publish", keys=(("sync/seconds", "publish"), ("sync/pause_seconds", "pause")), unit="s"),
)
"""The plots, the most important ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Records of a run directory."""

    name: str
    """Name of the directory."""
    steps: Sequence[dict[str, Any]]
    """Objects of metrics.jsonl, one per batch."""
    validations: Sequence[dict[str, Any]]
    """Objects of validation.jsonl; empty if the file does not exist."""
    directory: Path | None = None
    """The directory; None for records without one, whose page has no config, ledger and rollouts."""

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(train steps, values) of a metric, float64 [n] each; steps without a value are left out."""
        rows = [(s["train_step"], s[key]) for s in self.steps if s.get(key) is not None]
        table = np.array(rows, np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def by_layer(self) -> dict[str, dict[int, float]]:
        """Routing metric -> layer (global, from 0) -> mean over the train steps; see `registry.of_layer`."""
        values: dict[str, dict[int, list[float]]] = {}
        for step in self.steps:
            for name, value in step.items():
                found = split_layer(name)
                if found is not None and value is not None:
                    values.setdefault(found[0], {}).setdefault(found[1], []).append(value)
        return {
            key: {layer: float(np.mean(of_layer[layer])) for layer in sorted(of_layer)}
            for key, of_layer in values.items()
        }


def read_run(directory: Path) -> RunRecord:
    """Read the records of a run directory.

    Raises:
        ValueError: metrics.jsonl does not exist, or a line is damaged; the message names the file.
    """
    return RunRecord(
        name=directory.resolve().name,
        steps=_read_lines(directory / "metrics.jsonl"),
        validations=_read_lines(directory / "validation.jsonl", required=False),
        directory=directory,
    )


def write_report(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the page of one or more runs.

    Raises:
        ValueError: a line of a ledger is damaged; the message names the file.
    """
    data = {
        "runs": [_run_data(run, beside=path.parent) for run in runs],
        "panels": [
            {"title": p.title, "keys": p.keys, "unit": p.unit, "over": p.over, "log": p.log, "zero": p.zero}
            for p in PANELS
        ],
        "metrics": _metrics(runs),
        "lags": list(_LAG_LABELS.values()),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("</", "<\\/").replace("<!--", "<\\u0021--")
    before, after = _PAGE.read_text(encoding="utf-8").split("<!--data-->")
    with whole_file(path) as file:
        file.write_text(f'{before}<script type="application/json" id="data">{text}</script>{after}', encoding="utf-8")


def _run_data(run: RunRecord, *, beside: Path) -> dict[str, Any]:
    """Data of a run for the page: columns of steps and validations by key, and the rest of its directory.

    Args:
        beside: folder of the page.
    """
    folder = run.directory
    configs = [] if folder is None else _configs(folder)
    outcomes, drops = _ledger([] if folder is None else _read_lines(folder / "ledger.jsonl", required=False))
    tokens: dict[int, int] = {}
    for step in run.steps:
        for lag, count in step.get("staleness/tokens", {}).items():
            tokens[int(lag)] = tokens.get(int(lag), 0) + count
    total = sum(tokens.values())
    return {
        "name": run.name,
        "directory": "" if folder is None else str(folder),
        "page": "" if folder is None else Path(os.path.relpath(folder, beside), "rollouts.html").as_posix(),
        "steps": _columns(run.steps) | _recent(run.steps),
        "validations": _columns(run.validations),
        "layers": {key: [list(values), list(map(_rounded, values.values()))] for key, values in run.by_layer().items()},
        "staleness": [sorted(tokens), [_rounded(tokens[lag] / total) for lag in sorted(tokens)]] if total else [[], []],
        "mismatch": _mismatch_by_lag(run.steps),
        "outcomes": outcomes,
        "drops": drops,
        "failed": [] if folder is None else _failed(folder),
        "rollouts": [] if folder is None else list(_best_and_worst(folder)),
        "config": configs[-1][1] if configs else {},
        "changes": list(_changes(configs)),
    }


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each record, None for none. Objects such as `staleness/tokens` are left out."""
    keys = dict.fromkeys(key for record in records for key, value in record.items() if not isinstance(value, dict))
    return {key: [_rounded(record.get(key)) for record in records] for key in keys}


def _recent(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rates at each step over its batch and those before it, RECENT in all; empty if a step has no times.

    A step whose batch was ready takes little time, so that the rate of one step says little. The limit is the
    throughput in the time in which the trainer did not wait.
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


def _mismatch_by_lag(steps: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[Any]]:
    """Numbers of the lag buckets with tokens, and the mean k3 over the tokens of each."""
    found: dict[int, Any] = {}
    for number, lag in enumerate(_LAG_LABELS):
        pairs = [(step.get(f"tokens/{lag}") or 0, step.get(f"mismatch/k3_{lag}")) for step in steps]
        pairs = [(tokens, k3) for tokens, k3 in pairs if tokens and k3 is not None]
        if total := sum(tokens for tokens, _ in pairs):
            found[number] = _rounded(float(sum(tokens * k3 for tokens, k3 in pairs) / total))
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


def _ledger(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Groups by outcome, and drops by the part of their reason before the first colon, the most frequent first."""
    outcomes = {"trained": 0, "dropped": 0}
    drops: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["outcome"] in outcomes:
            outcomes[record["outcome"]] += 1
        if record["outcome"] == "dropped":
            reason = record["reason"] or ""
            kind = reason.partition(":")[0]
            drop = drops.setdefault(kind, {"reason": kind, "groups": 0, "tokens": 0, "last": ""})
            drop["groups"] += 1
            drop["tokens"] += record["tokens"]
            drop["last"] = reason
    return outcomes, sorted(drops.values(), key=lambda drop: -drop["groups"])


def _failed(folder: Path) -> list[dict[str, Any]]:
    """Failed rollouts by the kind of their error, the most frequent first, and the newest one of each kind."""
    found: dict[str, dict[str, Any]] = {}
    for _, rollout in read_failed(folder / FOLDER):
        if not isinstance(rollout, str):
            kind = kind_of_error(rollout.error)
            count = found.get(kind, {"rollouts": 0})["rollouts"] + 1
            found[kind] = {"error": kind, "rollouts": count, "group": rollout.group, "trajectory": rollout.trajectory}
    return sorted(found.values(), key=lambda kind: -kind["rollouts"])


def _best_and_worst(folder: Path) -> Iterator[dict[str, Any]]:
    """For each recorded batch, its step, the trajectories with the highest and the lowest reward, and counts."""
    for step, table in read_steps(folder / FOLDER, columns=["group", "trajectory", "reward", "stop_reason"]):
        if isinstance(table, str):
            continue
        rows = table.to_pylist()
        sound = [row for row in rows if row["stop_reason"] != "error"]
        ends = {"best": max, "worst": min}
        found = {name: pick(sound, key=lambda row: row["reward"], default=None) for name, pick in ends.items()}
        chosen = {
            name: row and {key: row[key] for key in ("group", "trajectory", "reward")} for name, row in found.items()
        }
        yield {"step": step, "count": len(rows), "failed": len(rows) - len(sound), **chosen}


def _configs(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file name, dotted key -> value) of the configs of a run, oldest first; see `controller.config_record`."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in (folder / "config.yaml", *sorted(folder.glob("config-??????.yaml"))):
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            continue
        if isinstance(values, Mapping):
            found.append((path.name, dict(_flat(masked(values)))))
    return found


def _changes(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """`config-000020.yaml: field: old -> new` of each field that a later start changed."""
    for (_, old), (name, new) in pairwise(configs):
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key) and key != "resume":
                yield f"{name}: {key}: {old.get(key)} -> {new.get(key)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (dotted key, value): {"a": {"b": 1}} -> ("a.b", 1). Empty mappings are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        else:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str | int | bool | None) else json.loads(json.dumps(value, default=str)),
            )


def _read_lines(path: Path, *, required: bool = True) -> list[dict[str, Any]]:
    if not path.is_file():
        if required:
            raise ValueError(f"{path} does not exist; give the output_dir of a run")
        return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is damaged: {error}") from error
    return records
