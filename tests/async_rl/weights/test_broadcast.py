"""Versions sent from the memory of some nodes to that of others, by real groups of gloo."""

import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from async_rl.weights import group
from async_rl.weights.broadcast import VersionServer, end_delivery, receive
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import Seat, Source, UpdateError
from tests.helpers.updates import read_update, write_update

HOST = "127.0.0.1"
NUM_BUCKETS = 5
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def weights():
    """Of one tensor per bucket."""
    return {f"model.layers.{i}.weight": torch.randn(200 + i).to(torch.bfloat16) for i in range(NUM_BUCKETS)}


@pytest.fixture
def published(tmp_path, weights):
    """A version on the node of the trainer."""
    return write_update(tmp_path / "trainer", version=3, tensors=weights.items(), bucket_bytes=400)


@pytest.fixture
def serve(tmp_path):
    """Starts servers of the node of the trainer: serve(numbers of buckets, ...) -> sources."""
    servers = []

    def start(*parts):
        made = [VersionServer(HOST, tmp_path / "trainer") for _ in parts]
        servers.extend(made)
        return tuple(Source(server.address, tuple(part)) for server, part in zip(made, parts, strict=True))

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def stores(tmp_path):
    """Of three nodes."""
    found = [LocalStore(tmp_path / f"node-{i}", host=HOST) for i in range(3)]
    yield found
    for store in found:
        store.release()


def seat(sources, *, index=0, size=1, delivery="d", timeout_s=30.0):
    return Seat(delivery=delivery, index=index, size=size, sources=sources, backend="gloo", timeout_s=timeout_s)


def deliver(stores, update, sources, *, size=None, **options):
    """Errors of the stores, or None, in order."""
    with ThreadPoolExecutor(len(stores)) as pool:
        size = size or len(stores)
        work = [
            pool.submit(store.receive, update, seat(sources, index=i, size=size, **options))
            for i, store in enumerate(stores)
        ]
        return [each.exception() for each in work]


def check(store, update, weights):
    found = dict(read_update(store.local(update.path)))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("parts", [[range(5)], [(4,), (0,), (1, 2, 3)]], ids=["1", "3"])
def test_each_version_reaches_all_nodes_from_all_servers_bit_by_bit_and_replaces_the_one_before(
    tmp_path, stores, serve, published, weights, parts
):
    sources = serve(*parts)
    assert deliver(stores, published, sources) == [None] * 3
    for store in stores:
        check(store, published, weights)
    new = {name: -tensor for name, tensor in weights.items()}
    update = write_update(tmp_path / "trainer", version=4, tensors=new.items(), bucket_bytes=400)
    assert deliver(stores, update, sources, delivery="e") == [None] * 3
    for store in stores:
        check(store, update, new)
        assert not store.local(published.path).exists()


def test_a_server_forgets_deliveries_that_have_ended(tmp_path, stores, published):
    server, kept = VersionServer(HOST, tmp_path / "trainer"), []
    for number in range(6):
        sources = (Source(server.address, tuple(range(NUM_BUCKETS))),)
        assert deliver(stores[:2], published, sources, delivery=f"delivery {number}") == [None, None]
        kept.append(server._store.num_keys())
    server.close()
    assert max(kept[3:]) <= max(kept[:3])


def test_a_node_that_comes_late_gets_the_version_from_another_one(stores, serve, published, weights):
    first, second, third = stores
    assert deliver([first], published, serve(range(5))) == [None]
    with pytest.raises(UpdateError, match="not the published version"):
        second.offer(published)
    second.receive(published, seat((first.offer(published),)))
    third.receive(published, seat((second.offer(published),)))
    check(third, published, weights)
    third.receive(published, seat(()))  # it has the version, and asks nobody


def flipped(folder):
    content = (folder / "bucket-00002.safetensors").read_bytes()
    (folder / "bucket-00002.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def emptied(folder):
    """No mapping of such a file is possible, on either side."""
    (folder / "bucket-00002.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flipped, ["bucket-00002", "digest"]),
        (emptied, ["of weights-3 did not come"]),  # bucket 2, or the one before if a receiver still waits for it
        (shutil.rmtree, ["weights-3", "No such file"]),
    ],
)
def test_a_damaged_or_missing_bucket_is_named_and_the_version_is_not_taken(stores, serve, published, damage, said):
    damage(published.path)
    for error in deliver(stores, published, serve(range(5))):
        assert isinstance(error, UpdateError) and all(text in str(error) for text in said)
    assert not any(store.local(published.path).exists() for store in stores)


def test_a_server_that_is_gone_is_named(tmp_path, stores, published):
    server = VersionServer(HOST, tmp_path / "trainer")
    server.close()
    address = server.address
    del server
    [error] = deliver(stores[:1], published, (Source(address, tuple(range(5))),), timeout_s=0.2)
    assert isinstance(error, UpdateError) and address in str(error)


def test_a_node_that_does_not_come_leaves_the_others_with_an_error_and_the_next_delivery_works(
    stores, serve, published, weights
):
    sources = serve(range(5))
    for error in deliver(stores[:2], published, sources, size=3, timeout_s=0.5):
        assert isinstance(error, UpdateError)
        assert sources[0].address in str(error) and "3 receivers of weights-3 did not form" in str(error)
    assert deliver(stores[:2], published, sources, delivery="again") == [None, None]
    check(stores[1], published, weights)


def stop_after_two(update, place, into):
    """A receiver that stops between two buckets, with open connections."""
    for number in receive(update.path.name, place, into=into):
        if number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_delivery_that_is_ended_for_a_lost_node_leaves_the_others_with_an_error_that_names_the_bucket(
    tmp_path, stores, serve, weights
):
    weights = {name: tensor.repeat(100_000) for name, tensor in weights.items()}  # more than sockets hold
    update = write_update(tmp_path / "trainer", version=3, tensors=weights.items(), bucket_bytes=1)
    sources = serve(range(len(update.buckets)))
    (tmp_path / "stopped").mkdir()
    place = seat(sources, index=2, size=3, timeout_s=60.0)
    context = multiprocessing.get_context("spawn")
    stopped = context.Process(target=stop_after_two, args=(update, place, tmp_path / "stopped"))
    stopped.start()
    with ThreadPoolExecutor(1) as others:
        delivered = others.submit(deliver, stores[:2], update, sources, size=3, timeout_s=60.0)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        end_delivery(place, "node 2 hangs")
        errors = delivered.result()
    stopped.kill()
    stopped.join()
    for error in errors:
        assert isinstance(error, UpdateError)
        assert f"of weights-3 did not come from {sources[0].address}" in str(error)
        assert "took longer" not in str(error), "the others need not wait for the time-out"
    assert not any(store.local(update.path).exists() for store in stores)
    assert deliver(stores[:2], update, sources, delivery="again") == [None, None]
    check(stores[0], update, weights)


def member(server, rank, *, size):
    store = group.connect(f"{HOST}:{server.port}", TIMEOUT)
    return group.member(store, rank=rank, size=size, backend="gloo", timeout=TIMEOUT)


def test_no_member_leaves_a_group_before_all_are_connected(monkeypatch):
    """Gloo would take the connections that it closes for a failure, if another member were still connecting."""
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    members, connected = [], dist.ProcessGroupGloo

    def connects_last(store, rank, size, timeout):
        made = connected(store, rank, size, timeout)
        while rank == 2 and store.add("connected", 0) < 2 and len(members) < 2:
            time.sleep(0.001)
        if rank == 2:
            members.append("all are connected")
        return made

    def work(rank):
        with member(server, rank, size=3):
            members.append(rank)

    monkeypatch.setattr(dist, "ProcessGroupGloo", connects_last)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert members[0] == "all are connected"


def test_a_member_that_cannot_connect_ends_the_group_for_the_others(monkeypatch):
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    connected = dist.ProcessGroupGloo

    def connects(store, rank, size, timeout):
        made = connected(store, rank, size, timeout)
        if rank == 1:
            raise RuntimeError("no route to host")
        return made

    def work(rank):
        with member(server, rank, size=2):
            pass

    monkeypatch.setattr(dist, "ProcessGroupGloo", connects)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(work, rank) for rank in range(2))
        for found, said in ((second, "no route to host"), (first, "another member failed: no route to host")):
            with pytest.raises(RuntimeError, match=said):
                found.result()
