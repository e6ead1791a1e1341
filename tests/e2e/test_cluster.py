"""Runs that join a Ray cluster of four nodes, which was started from another directory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import finish, lines, start

ROOT = Path(__file__).parents[2]
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster()
for _ in range(4):
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
APART = ("cluster.strategy=STRICT_SPREAD", "cluster.start_timeout_s=60", "total_train_steps=2")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of cluster and runs; a process of either may start in any directory."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("a" * 64)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Working directory of the nodes."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def address(environment, nodes):
    """Address of the cluster."""
    with (nodes / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            cwd=nodes,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        address = process.stdout.readline().strip()
        assert address, (nodes / "log").read_text()
        yield address
        process.stdin.close()


def environments(directory, names, process, *, timeout_s=300):
    """Environment of each named process of a run, as soon as all of them have started."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = directory / "processes.json"
        pids = json.loads(path.read_text() or "{}") if path.exists() else {}
        if set(names) <= set(pids):
            return [psutil.Process(pids[name]).environ() for name in names]
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError(f"no {names} within {timeout_s} s")


def test_a_run_over_nodes_keeps_its_files_and_removes_its_versions(address, environment, nodes, tmp_path):
    run = tmp_path / "outputs" / "run"
    process = start(
        "outputs/run",
        "warm",
        *APART,
        f"cluster.address={address}",
        "sync.transport=disk",
        "sync.directory=weights",
        "+cluster.rank_env.ASYNC_RL_TEST=rank",
        "+cluster.replica_env.ASYNC_RL_TEST=replica",
        cwd=tmp_path,
        env=environment,
    )
    rank, replica = environments(run, ["trainer-0", "replica-0"], process)
    output = finish(process)
    assert process.returncode == 0, output
    assert [s["param_version"] for s in lines(run, "metrics.jsonl")] == [1, 2]
    checkpoint = run / "checkpoints" / "step-000002"
    saved = json.loads((checkpoint / "trainer" / "trainer.json").read_text())["files"]
    assert saved and all((checkpoint / "trainer" / name).is_file() for name in saved)
    assert list((tmp_path / "weights").iterdir()) == []
    assert [path.name for path in nodes.iterdir()] == ["log"]
    assert (rank["ASYNC_RL_TEST"], replica["ASYNC_RL_TEST"]) == ("rank", "replica")


def test_shared_memory_over_nodes_is_refused_before_any_part_starts(address, environment, tmp_path):
    process = start("run", "warm", *APART, f"cluster.address={address}", cwd=tmp_path, env=environment)
    output = finish(process)
    assert process.returncode == 1, output
    last = output.splitlines()[-1]
    assert "sync.transport" in last and "sync.directory" in last, output
    assert not (tmp_path / "run" / "processes.json").exists()


def test_a_run_directory_that_other_nodes_do_not_see_is_refused(address, environment, tmp_path):
    own = f"/proc/self/cwd/{tmp_path.name}"  # each process has another
    disk = ("sync.transport=disk", f"sync.directory={tmp_path}")
    process = start(own, "warm", *APART, *disk, f"cluster.address={address}", cwd=tmp_path, env=environment)
    output = finish(process)
    assert process.returncode == 1, output
    assert "output_dir" in output.splitlines()[-1], output
    assert not (tmp_path / tmp_path.name / "processes.json").exists()
