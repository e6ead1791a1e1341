"""Runs that join a Ray cluster of several nodes, started from another directory."""

import contextlib
import json
import re
import sqlite3
import time
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from async_rl.config import load_config
from tests.e2e.clusters import cluster_environment, start_cluster
from tests.e2e.runs import (
    SLOW,
    SMALL,
    begins_with,
    check_prompts,
    check_records,
    complete,
    each,
    finish,
    lines,
    peek,
    pids,
    start,
    tree_of,
    until,
    wait_for_step,
)
from tests.e2e.tasks import TURNS
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.traces import check_trace

APART = ("cluster.strategy=STRICT_SPREAD", "cluster.start_timeout_s=60", "total_train_steps=2")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of cluster and runs."""
    return cluster_environment(tmp_path_factory.mktemp("token"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Working directory of the nodes."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def address(environment, nodes):
    """Address of a cluster of five nodes."""
    with start_cluster(2, 2, 2, 2, 2, environment=environment, directory=nodes) as (address, _):
        yield address


@WHOLE_RUN
def test_a_run_over_nodes_keeps_its_files_and_removes_its_versions(address, environment, nodes, tmp_path):
    run = tmp_path / "outputs" / "run"
    process = start(
        "outputs/run",
        "warm",
        *APART,
        f"cluster.address={address}",
        "sync.route=folder",
        f"sync.directory=file://{tmp_path}/weights",
        "sync.delta=true",
        "sync.mode=staged",
        "engine.tensor_parallel=2",
        "engine.nodes=2",
        "+cluster.rank_env.ASYNC_RL_TEST=rank",
        "+cluster.replica_env.ASYNC_RL_TEST=replica",
        cwd=tmp_path,
        env=environment,
    )
    parts = until(lambda: {"trainer-0", "replica-0"} <= set(found := pids(run)) and found, process, what="parts")
    rank, replica = (psutil.Process(parts[name]).environ() for name in ("trainer-0", "replica-0"))
    finish(process)
    assert [s["param_version"] for s in lines(run, "metrics.jsonl")] == [1, 2]
    checkpoint = run / "checkpoints" / "step-000002"
    saved = json.loads((checkpoint / "trainer" / "trainer.json").read_text())["files"]
    assert saved and all((checkpoint / "trainer" / name).is_file() for name in saved)
    assert list((tmp_path / "weights").iterdir()) == []
    name = sha256(str(run.resolve()).encode()).hexdigest()[:12]
    kept = list(Path("/dev/shm").glob(f"async_rl-weights-{name}*"))
    assert not kept, "the last replica of a node removes its store"
    assert [path.name for path in nodes.iterdir()] == ["log"]
    assert (rank["ASYNC_RL_TEST"], replica["ASYNC_RL_TEST"]) == ("rank", "replica")
    assert "VllmWorker-1" in (run / "logs" / "replica-0-node-1.log").read_text(), "the second rank is on another node"
    kinds = check_trace(run, trained=[g["group"] for g in lines(run, "ledger.jsonl")[:-1] if g["outcome"] == "trained"])
    assert kinds.keys() - {"controller"} == pids(run).keys() - {"queue"}, "processes of all nodes have spans"


@WHOLE_RUN
def test_trainer_ranks_send_versions_to_engine_ranks_on_other_nodes(address, environment, tmp_path):
    over_nodes = ("sync.route=direct", "engine.tensor_parallel=2", "engine.nodes=2")
    overrides = (*APART, f"cluster.address={address}", *over_nodes)
    complete("outputs/run", "warm", *overrides, cwd=tmp_path, env=environment)
    steps = lines(tmp_path / "outputs" / "run", "metrics.jsonl")
    assert [s["param_version"] for s in steps] == [1, 2]
    assert all(s["mismatch/k3_probe"] is not None for s in steps), "the probe compares what the engine serves"


@pytest.mark.parametrize(
    ("run", "shared", "named"),
    [
        ("run", (), ("sync.route", "sync.directory")),  # shared memory
        # These are another place for each process.
        (
            "run",
            ("sync.route=folder", "sync.directory=memory://weights"),
            ("sync.directory", "memory://weights/.probe"),
        ),
        ("/proc/self/cwd/own", ("sync.route=folder", "sync.directory={folder}"), ("output_dir",)),
    ],
)
def test_a_place_that_nodes_do_not_share_is_refused_before_any_part_starts(
    address, environment, tmp_path, run, shared, named
):
    overrides = (*APART, *(word.format(folder=tmp_path) for word in shared), f"cluster.address={address}")
    last = complete(run, "warm", *overrides, code=1, cwd=tmp_path, env=environment).splitlines()[-1]
    assert all(name in last for name in named), last
    assert not list(tmp_path.glob("*/processes.json"))


GATED = (
    *SLOW,
    "task.factory=tests.e2e.tasks:gated_task",
    "checkpoint.every=100",
    "rollout.workers=2",
    "engine.replicas=2",
    "sync.route=broadcast",
    "cluster.cpus_per_rank=4",
    "cluster.cpus_per_replica=2",
    "total_train_steps=6",
)
FREE_STEPS = 2  # train steps before groups wait for the gate


def node_of(run, name):
    """Raylet of a part of a run; None if its process died."""
    try:
        parents = psutil.Process(pids(run)[name]).parents()
    except psutil.NoSuchProcess:
        return None
    return next((parent for parent in parents if parent.name() == "raylet"), None)


def newest(run, kind):
    """Name of the replica or worker that was started last."""
    return max((name for name in pids(run) if name.startswith(kind)), key=lambda name: int(name.split("-")[1]))


def kill_node(raylet):
    """Kill all processes of a node at once."""
    tree = [raylet, *raylet.children(recursive=True)]
    each(tree, psutil.Process.kill)
    deadline = time.monotonic() + 60
    while not all(map(_gone, tree)):
        assert time.monotonic() < deadline, tree
        time.sleep(0.1)


def _gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stop(process):
    """Kill a run that is still there."""
    if process.poll() is None:
        each(tree_of(process), psutil.Process.kill)
        process.communicate()


def stored_by(run, worker):
    """Groups with stored records of a worker of the first start."""
    index = run / "journal" / "content" / f"rollout-{worker:04d}.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
        return {group for (group,) in database.execute("SELECT DISTINCT group_id FROM records")}


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_a_run_outlives_nodes_with_a_replica_a_worker_and_the_trainer(environment, tmp_path):
    run, warm, gate, nodes = (tmp_path / name for name in ("run", "warm", "gate", "nodes"))
    gate.mkdir()
    nodes.mkdir()
    overrides = (*GATED, f"+task.options.gate={gate}", f"+task.options.first={2 * FREE_STEPS}")
    config = load_config([*SMALL, *overrides])
    on_its_node = {"RAY_max_direct_call_object_size": "1024"}  # content is larger, so that it stays there
    environment = environment | on_its_node
    with contextlib.ExitStack() as stack:
        # room next to the driver for the queue or a worker, twice for a replica and one of these, and the trainer
        cpus = (1, 3, 3, 4)
        address, cluster = stack.enter_context(start_cluster(*cpus, environment=environment, directory=nodes))
        process = start(run, warm, *overrides, f"cluster.address={address}", cwd=tmp_path, env=environment)
        stack.callback(stop, process)

        def journal():
            return peek(run, tmp_path / "copy", config=config, warm_starts=warm)

        def says(text):
            log = run / "logs" / "driver.log"
            return until(lambda: re.search(text, log.read_text()), process, what=text)

        def add_node(num_cpus):
            cluster.stdin.write(f"{num_cpus}\n")
            cluster.stdin.flush()

        # ---- a node with a replica and a worker, a finished group and others at the gate

        wait_for_step(run, FREE_STEPS, process)
        part = {name: node_of(run, name) for name in pids(run)}
        replicas, busy = (part["replica-0"], part["replica-1"]), (part["queue"], part["trainer-0"])
        worker = next(i for i in (0, 1) if part[f"worker-{i}"] in replicas and part[f"worker-{i}"] not in busy)
        whole = config.rollout.trajectories_per_group * 24  # tokens of a turn of a group

        def at_the_gate():
            if (now := journal()) is None:
                return None
            restored, content = now
            own = [admission for admission in restored.open if admission.group in stored_by(run, worker)]
            full = [admission for admission in own if content[admission.group].num_tokens == whole * (TURNS - 1)]
            return full[:2] if len(full) >= 2 else None

        finished, moved = until(at_the_gate, process, what="two groups at the gate")
        (gate / str(finished.prompt)).touch()
        until(lambda: (now := journal()) and finished in now[0].ready, process, what="a finished group")
        kill_node(part[f"worker-{worker}"])
        _, held = until(journal, process, what="the journal")

        (gate / str(moved.prompt)).touch()

        def continues():
            group = (journal() or (None, {}))[1].get(moved.group)
            return group and group.num_tokens > held[moved.group].num_tokens and group

        after, before = until(continues, process, what="a group that moved"), held[moved.group]
        pairs = zip(after.trajectories, before.trajectories, strict=True)
        assert all(begins_with(found, stored) for found, stored in pairs)
        for prompt in range(2 * FREE_STEPS, 2 * FREE_STEPS + 4):  # two batches, one with the finished group
            (gate / str(prompt)).touch()
        says(r"left the cluster; the run had there: replica slot \d, rollout worker slot \d")
        says(r"no node has room for replica slot \d .*; its restart waits for one")
        add_node(3)
        says(r"replica replica-\d serves in place of replica-\d")
        assert finished.prompt < 2 * FREE_STEPS + 4
        says("on a node that died; trainer and queue start anew")

        # ---- the node of the trainer

        says("goes on after train step 0")  # with another trainer
        wait_for_step(run, FREE_STEPS + 1, process)
        until(lambda: node_of(run, newest(run, "worker")) not in (None, *part.values()), process, what="another worker")
        assert node_of(run, newest(run, "worker")) == node_of(run, newest(run, "replica"))
        kill_node(node_of(run, "trainer-0"))
        (gate / "all").touch()
        says("left the cluster; the run had there: trainer rank 0")
        says("no node has room for trainer rank 0")
        add_node(4)
        output = finish(process)
    assert "done: 6 train steps" in output
    assert output.count("trainer and queue start anew") == 2, output
    lost = re.findall(r"rollout worker worker-\d is lost, [1-9]\d* groups continue at another", output)
    assert len(lost) == 1, output
    assert "did not start" not in output, output
    _, groups = check_records(run, steps=6, staleness=2, trained=12, dropped=0)
    check_prompts(run, step=6)
    trained = {g["group"]: g["tokens"] for g in groups if g["outcome"] == "trained"}
    assert all(tokens >= held[g].num_tokens for g, tokens in trained.items() if g in held)
