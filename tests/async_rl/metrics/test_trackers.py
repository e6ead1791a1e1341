"""Trackers with their real clients, read back as a user reads them; and trackers that fail."""

import json
import math
import re
import threading
import urllib.request

import pytest

from async_rl.metrics import trackers
from async_rl.metrics.trackers import TABLE, TrackedRun, Trackers, TrackingConfig, build_trackers, tracker_problems

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
ROWS = [
    {"train_step": 2, "prompt": "2+2", "response": "4|\n`x`", "reward": 1.0, "error": None},
    {"train_step": 2, "prompt": "2+3", "response": "4", "reward": 0.0, "error": "it raised"},
]
BLOCK = 1 << 15
CONFIG = {"seed": 3, "loss": {"name": "tis"}}


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Folders for what clients write next to the run."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=True)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=True)


def track(directory, name, *, train_step=0, steps=(1, 2), config=CONFIG, during=lambda _: None):
    """A run of some steps with one tracker, and a table at its end. during: called with the tracker before its end."""
    directory.mkdir(exist_ok=True)
    run = TrackedRun(directory=directory, name="mine", config=config, train_step=train_step)
    warnings = []
    made = build_trackers(TrackingConfig(trackers=[name]), run, warn=warnings.append)
    for step in steps:
        made.log({"reward/mean": step / 10, "loss": math.nan}, step)
    made.table(iter(ROWS), steps[-1])
    made._threads[0].put(during)
    made.close()
    assert warnings == []


def in_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    table = events.Tensors(f"{TABLE}/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| `4\\|\\n'x'` |" in table and "it raised" in table
    return [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("reward/mean")]


def leveldb_records(data):
    """Records of a file in the log format of LevelDB, as in W&B: blocks of 32 KiB after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_wandb(directory):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # the service of wandb writes the end of a file after a run has finished; at exit, wandb waits
    history, ids, configs, axes = [], set(), [], set()
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.display_name, record.run.project))
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            elif record.WhichOneof("record_type") == "metric" and record.metric.glob_name:
                axes.add((record.metric.glob_name, record.metric.step_metric))
            elif record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                history.append({key: json.loads(value) for key, value in values.items()})
    assert len(ids) == 1, ids
    assert {name for _, *names in ids for name in names} == {"mine", "async_rl"}
    assert configs[0].items() >= CONFIG.items() and axes == {("*", "train_step")}
    (table, *_) = directory.glob(f"wandb/offline-run-*/files/media/table/{TABLE}_*.json")
    assert json.loads(table.read_text())["data"] == [list(row.values()) for row in ROWS]
    return [(line["train_step"], line["reward/mean"]) for line in history if "reward/mean" in line]


def run_of_mlflow():
    """(client, its only run)."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("async_rl").experiment_id])
    return client, run


def in_mlflow(directory):
    client, run = run_of_mlflow()
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params == {"seed": "3", "loss.name": "tis"}
    table = client.load_table(run.info.experiment_id, f"{TABLE}.json")
    assert list(table["response"])[:2] == [row["response"] for row in ROWS]
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "reward/mean")]


def in_trackio(directory):
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("async_rl")
    assert re.fullmatch("mine-[0-9a-f]{6}", name)
    assert SQLiteStorage.get_run_config("async_rl", name)["loss"] == CONFIG["loss"]
    logs = SQLiteStorage.get_logs("async_rl", name)
    table = next(line[TABLE] for line in logs if TABLE in line)
    assert [row["response"] for row in table["_value"]] == [row["response"] for row in ROWS]
    return [(line["step"], line["reward/mean"]) for line in logs if "reward/mean" in line]


@pytest.mark.parametrize("read", [in_tensorboard, in_wandb, in_mlflow, in_trackio], ids=lambda read: read.__name__[3:])
def test_a_tracker_has_metrics_and_rollouts_and_a_resumed_run_continues_it(read, tmp_path, capfd):
    import openai  # noqa: F401 - whose presence makes wandb advertise another product, unless it is told not to

    directory, name = tmp_path / "run", read.__name__.removeprefix("in_")
    track(directory, name)
    assert read(directory) == [(1, 0.1), (2, 0.2)]
    track(directory, name, train_step=1, steps=(2, 3), config=CONFIG | {"seed": 4})
    repeated = [] if name == "tensorboard" else [(2, 0.2)]
    assert sorted(read(directory)) == [(1, 0.1), *repeated, (2, 0.2), (3, 0.3)]
    assert capfd.readouterr() == ("", ""), "the console belongs to the run"


def test_a_run_of_mlflow_is_running_until_its_end(tmp_path):
    found = []
    for step in (0, 1):  # new, and resumed after its end
        track(tmp_path, "mlflow", train_step=step, during=lambda _: found.append(run_of_mlflow()[1].info.status))
    assert found == ["RUNNING", "RUNNING"]


def test_prometheus_reads_the_newest_values(tmp_path, unused_tcp_port):
    from prometheus_client.parser import text_string_to_metric_families

    address = f"127.0.0.1:{unused_tcp_port}"
    run = TrackedRun(directory=tmp_path, name="mine", config={}, train_step=0)
    made = build_trackers(TrackingConfig(trackers=["prometheus"], prometheus_address=address), run, warn=pytest.fail)
    logged = threading.Event()
    made.log({"reward/mean": 0.1, "loss": math.nan}, 1)
    made.log({"reward/mean": 0.2}, 2)
    made._threads[0].put(lambda tracker: logged.set())
    assert logged.wait(60)
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    values = {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}
    labels = {"run": "mine"}
    assert values == {"async_rl_reward_mean": (labels, 0.2), "async_rl_train_step": (labels, 2.0)}
    made.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics")


class Failing:
    """A tracker that is out of order in some calls."""

    def __init__(self, calls=()):
        self.calls, self.steps, self.rows = calls, [], []

    def log(self, metrics, train_step):
        self.steps.append((train_step, metrics))
        if train_step in self.calls:
            raise ConnectionError("the server is away\nfor now")

    def table(self, rows, train_step):
        self.rows.append(len(rows))

    def close(self):
        if "close" in self.calls:
            raise ConnectionError("the server is away")


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on():
    def absent():
        raise SystemExit("no server")

    sound, failing, warnings = Failing(), Failing([1, 2, "close"]), []
    kinds = {"absent": absent, "failing": lambda: failing, "sound": lambda: sound}
    made = Trackers(kinds, warn=warnings.append, samples=1)
    for step in (1, 2, 3):
        made.log({"x": step, "y": math.inf}, step)
    made.table(iter(ROWS), 3)
    made.close()
    assert sound.steps == failing.steps == [(1, {"x": 1.0}), (2, {"x": 2.0}), (3, {"x": 3.0})]
    assert sound.rows == failing.rows == [1]
    assert sorted(text.partition(";")[0] for text in warnings) == [
        "tracker absent cannot be used: SystemExit: no server",
        "tracker failing failed: ConnectionError: the server is away",
    ]


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end(monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.1)
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    answers, sound, warnings = threading.Event(), Failing(), []

    def hanging():
        answers.wait()
        return Failing()

    made = Trackers({"hanging": hanging, "sound": lambda: sound}, warn=warnings.append)
    for step in range(3):
        made.log({"x": step}, step)
    for _ in range(4):
        made._threads[0].put(lambda tracker: None)
    made.close()
    answers.set()
    made._threads[0].join()
    assert len(sound.steps) == 3
    assert [text.partition(";")[0] for text in warnings] == [
        "tracker hanging is 5 calls behind",
        "tracker hanging did not end within 0.1 s, and is given up",
    ]


def test_trackers_that_cannot_be_used_are_named(monkeypatch, unused_tcp_port_factory):
    names = ["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]
    address = f"127.0.0.1:{unused_tcp_port_factory()}"
    assert list(tracker_problems(TrackingConfig(trackers=names, prometheus_address=address))) == []
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.api._api_key", None, raising=False)
    monkeypatch.setitem(trackers.MODULES, "trackio", "no_such_package")
    problems = tracker_problems(TrackingConfig(trackers=names, prometheus_address="203.0.113.1:80"))
    ways = ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "extra trackers", "tracking.prometheus_address is 203.0.113.1:80")
    assert all(way in problem for problem, way in zip(problems, ways, strict=True))


@pytest.mark.parametrize(
    ("field", "value"), [("trackers", ["wandb", "wandb"]), ("samples", -1), ("prometheus_address", "9464")]
)
def test_a_wrong_value_is_refused_with_its_field(field, value):
    with pytest.raises(ValueError, match=f"tracking.{field} is"):
        TrackingConfig(**{field: value})
