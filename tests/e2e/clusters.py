"""Ray clusters of several nodes on this machine."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster()


def add(num_cpus, *, wait):
    cluster.add_node(wait, num_cpus=int(num_cpus), object_store_memory=100 << 20, include_dashboard=False)


for num_cpus in sys.argv[1:]:
    add(num_cpus, wait=True)
print(cluster.address, flush=True)
for line in sys.stdin:
    add(line, wait=False)
cluster.shutdown()
"""


def cluster_environment(folder):
    """Environment of a cluster and of what joins it; a process of either may start in any directory.

    folder: for the token of the cluster.
    """
    token = folder / "token"
    token.write_text("a" * 64)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as in a cluster that a run starts
    }


@contextlib.contextmanager
def start_cluster(*num_cpus, environment, directory):
    """Cluster of nodes with so many CPUs each: (address, process). A number on a line for the process adds a node."""
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, *map(str, num_cpus)],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        address = process.stdout.readline().strip()
        assert address, (directory / "log").read_text()
        yield address, process
        process.stdin.close()
