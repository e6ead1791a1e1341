"""Experiment trackers: each is called in a separate thread, so that a slow or failing one does not disturb the run.

    tensorboard   `tensorboard/` in the run directory
    wandb         Weights & Biases; WANDB_MODE=offline writes to `wandb/` in the run directory
    mlflow        the server or database of MLFLOW_TRACKING_URI
    trackio       its local dashboard; TRACKIO_DIR and TRACKIO_SPACE_ID choose another place
    prometheus    newest values at `tracking.prometheus_address`, for a server to scrape

The clients read their own environment variables. A run that is resumed continues the run of each tracker; its id there
is in `trackers.json`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from agent_loop.bounds import bounded
from async_rl.files.atomic_dir import whole_file
from async_rl.files.masking import MASK, dotted

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]
Row = Mapping[str, Any]
TABLE = "validation/rollouts"
"""Name of the table of rollouts."""
MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
MAX_WAITING = 1_000  # calls that wait for a tracker; more are left out
CLOSE_S = 60.0  # longest wait for a tracker at the end of a run
MAX_PARAM = 500  # characters of a parameter of MLflow, which refuses more than 6000; its servers refused more than 500
_IDS = threading.Lock()


@bounded("tracking")
class TrackingConfig:
    """Experiment trackers of a run."""

    trackers: Sequence[TrackerName] = ("tensorboard",)
    """Trackers that get the metrics, and tables of held-out rollouts if they have tables."""
    project: str = "async_rl"
    """Project (wandb, trackio) or experiment (mlflow) of the run."""
    samples: Annotated[int, Ge(0)] = 32
    """Rollouts of a validation round in its table; 0 sends no tables."""
    prometheus_address: str = "127.0.0.1:9464"
    """host:port of the metrics for Prometheus; 0.0.0.0 is every interface."""

    def __post_init__(self) -> None:
        if len(set(self.trackers)) != len(self.trackers):
            raise ValueError(f"tracking.trackers is {list(self.trackers)}; name each tracker once")
        if not re.fullmatch(r"[^:\s]+:\d{1,5}", self.prometheus_address):
            raise ValueError(
                f"tracking.prometheus_address is {self.prometheus_address!r}; give host:port, as in 127.0.0.1:9464"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What trackers know of a run."""

    directory: Path
    """Directory of the run."""
    name: str
    """Name of the run."""
    config: Mapping[str, Any]
    """All values of its config; secrets are masked."""
    train_step: int
    """Step that the run resumes from; 0 for a new run."""


class Trackers:
    """The trackers of a run. Calls return at once.

    A call that fails is left out, and the first one of each tracker is reported: the records of the run directory have
    everything.

    Args:
        build: name -> function that makes the tracker, called in its thread.
        warn: called with each text for the user, in any thread.
        samples: rollouts in a table.
    """

    def __init__(
        self, build: Mapping[str, Callable[[], Tracker]], *, warn: Callable[[str], None], samples: int = 32
    ) -> None:
        self._warn, self._samples = warn, samples
        self._threads = [_TrackerThread(name, make, warn) for name, make in build.items()]
        for thread in self._threads:
            thread.start()

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        """Record the finite ones of the metrics of a step."""
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log(finite, train_step))

    def table(self, rows: Iterator[Row], train_step: int) -> None:
        """Record the first held-out rollouts of a round."""
        first = [row for row, _ in zip(rows, range(self._samples), strict=False)]
        for thread in self._threads if first else ():
            thread.put(lambda tracker: tracker.table(first, train_step))

    def close(self) -> None:
        """Wait until all calls are made; a tracker that hangs is given up after CLOSE_S."""
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.calls.put(lambda tracker: tracker.close())
            thread.calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._warn(f"{thread.name} did not end within {CLOSE_S:g} s, and is given up")


class _TrackerThread(threading.Thread):
    """Makes the calls of one tracker, in order; None in `calls` ends it."""

    def __init__(self, name: str, build: Callable[[], Tracker], warn: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._build = build
        self._warn = warn
        self._warned = False
        self.calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue()

    def put(self, call: Callable[[Tracker], None]) -> None:
        if self.calls.qsize() < MAX_WAITING:
            self.calls.put(call)
        else:
            self._report(f"is {MAX_WAITING} calls behind")

    def run(self) -> None:
        try:
            tracker = self._build()
        except BaseException as error:  # noqa: BLE001 - clients raise many kinds, some on purpose no Exception
            self._report(f"cannot be used: {_cause(error)}")
            for _ in iter(self.calls.get, None):
                pass
            return
        for call in iter(self.calls.get, None):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - see above
                self._report(f"failed: {_cause(error)}")

    def _report(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self.name} {text}; the run goes on, and its directory has all records")


def build_trackers(config: TrackingConfig, run: TrackedRun, *, warn: Callable[[str], None]) -> Trackers:
    """The trackers of a run; they start in their threads."""
    kinds: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run),
        "wandb": lambda: WeightsAndBiases(run, project=config.project),
        "mlflow": lambda: MLflow(run, project=config.project),
        "trackio": lambda: Trackio(run, project=config.project),
        "prometheus": lambda: Prometheus(run, address=config.prometheus_address),
    }
    return Trackers({name: kinds[name] for name in config.trackers}, warn=warn, samples=config.samples)


def tracker_problems(config: TrackingConfig) -> Iterator[str]:
    """Why a tracker cannot be used on this machine."""
    for name in config.trackers:
        if importlib.util.find_spec(MODULES[name]) is None:
            yield (
                f"tracking.trackers has {name!r}, and the package {MODULES[name]} is not installed; install async-rl "
                f"with the extra trackers, or leave {name!r} out"
            )
        elif name == "wandb" and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
            import wandb

            if wandb.api.api_key is None:
                yield (
                    "tracking.trackers has 'wandb', and there is no key of Weights & Biases; set WANDB_API_KEY, run "
                    "`wandb login`, or set WANDB_MODE=offline"
                )
        elif name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            yield (
                "tracking.trackers has 'mlflow', and MLFLOW_TRACKING_URI is not set; set it to the address of a "
                "server, as in http://127.0.0.1:5000"
            )
        elif name == "prometheus":
            yield from _address_problems(config.prometheus_address)


def _address_problems(address: str) -> Iterator[str]:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            yield f"tracking.prometheus_address is {address}, which cannot be used ({error}); give another host:port"


def _cause(error: BaseException) -> str:
    lines = f"{error}".strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else repr(error)


def _run_id(run: TrackedRun, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
    """Id of the run in a tracker, kept in the run directory, and whether an earlier start made it."""
    path = run.directory / "trackers.json"
    with _IDS:
        ids: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        if tracker in ids:
            return ids[tracker], True
        ids[tracker] = make()
        with whole_file(path) as partial:
            partial.write_text(json.dumps(ids) + "\n")
    return ids[tracker], False


# ---- clients: all have the methods of `TensorBoard`, and each call comes from the thread that made the client


class TensorBoard:
    """Event files; those of steps after the one that the run resumes from are hidden."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = run.train_step + 1 if run.train_step else None
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purged)

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        """Record finite metrics of a step."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, train_step)

    def table(self, rows: Sequence[Row], train_step: int) -> None:
        """Record held-out rollouts."""
        self._writer.add_text(TABLE, _markdown(rows), train_step)

    def close(self) -> None:
        """Send what is left, and end the run of the tracker."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # it advertises itself on the console of the run
        import wandb

        self._table = wandb.Table
        number, _ = _run_id(run, "wandb", lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=number,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=MASK in f"{run.config}"),  # the command
        )
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        self._run.log({**metrics, "train_step": train_step})

    def table(self, rows: Sequence[Row], train_step: int) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({TABLE: table, "train_step": train_step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # the console belongs to the run
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = client = MlflowClient()

        def create() -> str:
            experiment = client.get_experiment_by_name(project)
            number = client.create_experiment(project) if experiment is None else experiment.experiment_id
            return client.create_run(number, run_name=run.name).info.run_id

        self._id, resumed = _run_id(run, "mlflow", create)
        if resumed:
            client.update_run(self._id, status="RUNNING")
        else:
            params = [Param(key, str(value)[:MAX_PARAM]) for key, value in dotted(run.config)]
            client.log_batch(self._id, params=params)

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(key, value, now, train_step) for key, value in metrics.items()])

    def table(self, rows: Sequence[Row], train_step: int) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self._client.log_table(self._id, columns, artifact_file=f"{TABLE}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """A run of Trackio."""

    def __init__(self, run: TrackedRun, *, project: str) -> None:
        import trackio
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.run, trackio.utils):
            vars(module)["print"] = lambda *words, **_: logging.getLogger("trackio").info("%s", words)
        self._trackio = trackio
        name, _ = _run_id(run, "trackio", lambda: f"{run.name}-{secrets.token_hex(3)}")
        self._run = trackio.init(
            project,
            name=name,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        self._run.log(dict(metrics), step=train_step)

    def table(self, rows: Sequence[Row], train_step: int) -> None:
        import pandas as pd

        self._run.log({TABLE: self._trackio.Table(dataframe=pd.DataFrame(rows))}, step=train_step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """The newest value of each metric as a gauge, `async_rl_reward_mean{run="calculator"}` for `reward/mean`."""

    def __init__(self, run: TrackedRun, *, address: str) -> None:
        import prometheus_client

        self._registry = prometheus_client.CollectorRegistry()
        self._gauge = prometheus_client.Gauge
        self._gauges: dict[str, Any] = {}
        self._name = run.name
        host, _, port = address.rpartition(":")
        self._server, self._thread = prometheus_client.start_http_server(int(port), host, registry=self._registry)

    def log(self, metrics: Mapping[str, float], train_step: int) -> None:
        for key, value in {**metrics, "train_step": train_step}.items():
            name = f"async_rl_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}"
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, key, ["run"], registry=self._registry).labels(run=self._name)
            self._gauges[name].set(value)

    def table(self, rows: Sequence[Row], train_step: int) -> None:
        """Prometheus has numbers only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Tracker = TensorBoard | WeightsAndBiases | MLflow | Trackio | Prometheus


def _markdown(rows: Sequence[Row]) -> str:
    """A table of rows; texts are code, with the newlines shown."""

    def cell(value: Any) -> str:
        if isinstance(value, str):
            shown = json.dumps(value, ensure_ascii=False)[1:-1].replace("|", "\\|").replace("`", "'")
            return f"`{shown}`" if value else ""
        return "" if value is None else f"{value}"

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
