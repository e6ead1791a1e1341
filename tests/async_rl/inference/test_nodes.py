"""Nodes of a replica: their ports, environment and arguments, and the end of their processes."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from async_rl.inference.nodes import NUM_PORTS, NodePlace, NodeProcess, node_environment, reserve_port, reserve_ports
from async_rl.inference.select import own_variables
from async_rl.inference.sglang.config import SglangConfig, server_arguments
from async_rl.inference.vllm.config import VllmConfig, engine_args
from async_rl.weights.digest import on_this_node
from tests.async_rl.inference.test_serving import EVERY, QWEN, check

HOST = "127.0.0.1"
PLACE = NodePlace(index=1, size=2, host="10.0.0.2", leader="10.0.0.1", port=20_000, store=Path("/dev/shm/run-b"))
GROUP = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(params=[True])
def group(request):
    """A process, with its own group or in the group of this one, and its child in that group."""
    command = [sys.executable, "-c", GROUP]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=request.param)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    yield process, child
    with contextlib.suppress(psutil.NoSuchProcess):
        child.kill()
    process.stdout.close()
    process.wait()


async def until_ended(process):
    async with asyncio.timeout(10):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - no child of this one
            await asyncio.sleep(0.01)


async def test_node_process_takes_its_group_along_and_tells_of_its_death_before_anyone_who_waits(group):
    process, child = group
    watched, told = NodeProcess(process.pid, wait=process.wait), []
    watched.watch(told.append)
    report = asyncio.create_task(watched.until_dead())
    await asyncio.sleep(0)
    assert not report.done()
    process.kill()
    assert told == [await report] == [watched.death] == [f"engine process {process.pid} died, exit code -9"]
    await until_ended(child)
    watched.watch(told.append)
    assert len(told) == 2, "of a process that is dead, at once"
    await watched.stop()
    assert len(told) == 2, "of a stop"


@pytest.mark.parametrize("group", [True, False], indirect=True)
async def test_node_process_stops_with_its_group_and_before_it_has_made_one(group):
    process, child = group
    own_group = os.getpgid(process.pid) == process.pid
    async with asyncio.timeout(10):
        await NodeProcess(process.pid, wait=process.wait).stop()
    assert process.returncode == -9
    if own_group:
        await until_ended(child)


def test_reserved_ports_are_successive_and_taken_until_the_engine_listens():
    reserved, first = reserve_ports(HOST)
    others, second = reserve_ports(HOST)
    assert [each.getsockname() for each in reserved] == [(HOST, first + i) for i in range(NUM_PORTS)]
    assert abs(second - first) >= NUM_PORTS
    for each in (*reserved, *others):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(each.getsockname())
            server.listen()
        each.close()


def test_reserve_ports_passes_over_a_port_that_is_taken():
    with reserve_port(HOST) as taken, pytest.raises(OSError, match="in use"):
        taken.listen()
        reserve_port(HOST, taken.getsockname()[1])
    with pytest.raises(OSError, match=r"203\.0\.113\.1 has no 8 successive free ports"):
        reserve_ports("203.0.113.1")  # an address that no machine has


def test_processes_of_a_node_have_its_address_and_read_versions_from_its_store(monkeypatch):
    folder = Path("/dev/shm/run-a/weights-7")
    assert on_this_node(folder) == folder
    variables = node_environment(PLACE)
    assert variables["VLLM_HOST_IP"] == variables["SGLANG_HOST_IP"] == PLACE.host
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    assert on_this_node(folder) == Path("/dev/shm/run-b/weights-7")


@pytest.mark.parametrize("engine", EVERY)
def test_variables_of_a_node_are_own_ones_of_a_replica_over_nodes_alone(engine):
    variables = set(node_environment(PLACE))
    assert variables <= own_variables(engine(tensor_parallel=2, nodes=2))
    assert not variables & own_variables(engine(tensor_parallel=2))


def test_vllm_meets_at_the_first_node(tmp_path):
    config = VllmConfig(device="cpu", tensor_parallel=2, nodes=2)
    args = engine_args(config, check(config, tmp_path, QWEN), capture_routing=True, place=PLACE)
    assert (args["nnodes"], args["node_rank"]) == (2, 1)
    assert (args["master_addr"], args["master_port"]) == (PLACE.leader, PLACE.port)
    assert PLACE.port < args["data_parallel_rpc_port"] < PLACE.port + NUM_PORTS


def test_sglang_meets_at_the_first_node(tmp_path):
    config = SglangConfig(device="cpu", tensor_parallel=2, nodes=2)
    check(config, tmp_path, QWEN)
    options = {"port": 1, "served_name": "n", "label": "first", "capture_routing": True}
    pairs = dict(itertools.pairwise(server_arguments(config, tmp_path, place=PLACE, **options)))
    assert (pairs["--nnodes"], pairs["--node-rank"], pairs["--dist-init-addr"]) == ("2", "1", "10.0.0.1:20000")
    assert "--nnodes" not in server_arguments(config, tmp_path, **options)
