"""Parameter sync on CUDA: broadcasts over NCCL, and the exchange of staged weights under a CUDA graph."""

import multiprocessing
import os
import signal
from itertools import cycle

import pytest
import torch

from async_rl.weights.broadcast import VersionServer, receive
from async_rl.weights.snapshots import HostCopy
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import Seat, Source, UpdateError
from async_rl.weights.twin import Twin
from tests.helpers.updates import read_update, write_update

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]
HOST = "127.0.0.1"
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def seat(sources, *, delivery, index=0, size=1):
    return Seat(delivery=delivery, index=index, size=size, sources=sources, backend="nccl", timeout_s=60.0)


def be_a_node(gpu, directory, update, place, outcome):
    """Receive a version on a GPU, and report the error or None."""
    torch.cuda.set_device(gpu)
    try:
        LocalStore(directory, host=HOST).receive(update, place)
        outcome.put(None)
    except UpdateError as error:
        outcome.put(str(error))


def die_after_one(gpu, directory, update, place, outcome):
    """Die between two buckets."""
    del outcome
    torch.cuda.set_device(gpu)
    directory.mkdir()
    for _ in receive(update.path.name, place, into=directory):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def published(tmp_path):
    """A version of eight buckets on the node of the trainer, and its weights."""
    weights = {f"model.layers.{i}.weight": torch.randn(1 << 20).to(torch.bfloat16) for i in range(8)}
    return write_update(tmp_path / "trainer", version=3, tensors=weights.items(), bucket_bytes=1), weights


@pytest.fixture
def sources(tmp_path, published):
    """A server on GPU 0."""
    torch.cuda.set_device(0)
    server = VersionServer(HOST, tmp_path / "trainer")
    yield (Source(server.address, tuple(range(len(published[0].buckets)))),)
    server.close()


def run_nodes(targets, update, tmp_path, sources, *, delivery):
    """Processes and outcomes of one node for each target, on GPU 1 and the next ones."""
    spawn = multiprocessing.get_context("spawn")
    processes, outcomes = [], []
    for index, target in enumerate(targets):
        outcomes.append(spawn.Queue())
        place = seat(sources, delivery=delivery, index=index, size=len(targets))
        arguments = (1 + index, tmp_path / f"{delivery}-{index}", update, place, outcomes[-1])
        processes.append(spawn.Process(target=target, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
    return processes, outcomes


@TWO_GPUS
def test_a_version_reaches_all_nodes_over_nccl_bit_by_bit(tmp_path, published, sources):
    update, weights = published
    nodes = torch.cuda.device_count() - 1
    _, outcomes = run_nodes([be_a_node] * nodes, update, tmp_path, sources, delivery="all")
    assert [outcome.get() for outcome in outcomes] == [None] * nodes
    for index in range(nodes):
        found = dict(read_update(tmp_path / f"all-{index}" / update.path.name))
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_a_node_that_dies_leaves_the_others_with_an_error_and_the_server_resends(tmp_path, published, sources):
    update, _ = published
    (_, killed), (outcome, _) = run_nodes([be_a_node, die_after_one], update, tmp_path, sources, delivery="fails")
    assert killed.exitcode == -signal.SIGKILL
    assert "of weights-3 did not come" in outcome.get()
    _, (outcome,) = run_nodes([be_a_node], update, tmp_path, sources, delivery="again")
    assert outcome.get() is None


def test_pinned_buffers_in_turn_take_the_buckets_of_a_gpu():
    """The copies follow the kernels that are queued, and later kernels may overwrite the tensors of a loop."""
    stream = torch.cuda.Stream()
    ring = cycle((HostCopy(stream), HostCopy(stream)))
    weight, addresses = torch.zeros(1 << 22, device="cuda"), set()
    for value in range(6):
        weight.fill_(value)
        copied = next(ring).start([("w", weight.clone()), ("v", weight[:3].to(torch.bfloat16))])
        assert copied.data.is_pinned()
        found = dict(copied.tensors())
        assert bool((found["w"] == value).all()) and found["v"].tolist() == [value] * 3
        addresses.add(copied.data.data_ptr())
    assert len(addresses) == 2


def test_an_exchange_reaches_a_captured_graph():
    """A graph reads the memory that it was captured with, so the exchange must keep that memory."""
    model = torch.nn.Linear(64, 64, device="cuda").requires_grad_(False)
    given = torch.randn(8, 64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = model(given)
    twin = Twin(model)
    for seed in range(3):
        torch.manual_seed(seed)
        weight, bias = torch.randn(64, 64, device="cuda"), torch.randn(64, device="cuda")
        twin.model.weight.data.copy_(weight)
        twin.model.bias.data.copy_(bias)
        twin.exchange()
        graph.replay()
        assert torch.equal(seen, torch.nn.functional.linear(given, weight, bias))
