"""Sends the files of a version to the memory of other nodes, in groups of torch.distributed (gloo or NCCL).

A process that has versions in the memory of its node serves them: one trainer rank of each node, and a replica if
another one comes late. The receivers of a version, one process of each node, form a group with each server:

    trainer rank 0    buckets 0, 2  -> | node A | node B | node C |
    trainer rank 8    buckets 1, 3  -> | node A | node B | node C |

A server sends in threads of its own, and only reads files, so that its trainer trains meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.weights.overwrite import bytes_to_fill
from async_rl.weights.transport import SPARE, Backend, Seat, Source, UpdateError, bucket_file

_log = logging.getLogger(__name__)
_IDLE = timedelta(days=1)  # time for which a server waits for a request before it waits again
_STOP = "stop"
_POLL_S = 0.001  # time between two looks at a broadcast
_LOOK_S = 0.1  # time between two looks at the other members


class VersionServer:
    """Sends versions of this node to whoever asks, until `close`.

    Args:
        host: address of this node for the others.
        directory: parent of the folders of the versions.

    Attributes:
        address: host:port.
    """

    def __init__(self, host: str, directory: Path) -> None:
        self._directory = directory
        self._ended: list[str] = []  # names of deliveries
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"
        self._thread = threading.Thread(target=self._serve, name="weights server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further request; deliveries under way continue."""
        _ask(_connect(self.address, _IDLE), _STOP)
        self._thread.join()

    def _serve(self) -> None:
        store = _connect(self.address, _IDLE)
        number = 1
        while True:
            try:
                request = store.get(f"request {number}")
            except dist.DistStoreError:  # nobody asked for a day
                continue
            if request == _STOP.encode():
                return
            store.delete_key(f"request {number}")
            self._forget_ended(store)
            threading.Thread(target=self._send, args=(json.loads(request),), daemon=True).start()
            number += 1

    def _forget_ended(self, store: TCPStore) -> None:
        """Remove the keys of the deliveries that had ended when another one was asked for."""
        ended, self._ended = self._ended, []
        for key in store.list_keys() if ended else []:
            if key.partition("/")[0] in ended:
                store.delete_key(key)

    def _send(self, request: dict[str, Any]) -> None:
        """Send the buckets of a request. If this fails, it fails in the receivers too, which report it."""
        timeout = timedelta(seconds=request["timeout_s"])
        store = PrefixStore(request["delivery"], self._store)
        try:
            try:
                files = [bucket_file(self._directory / request["version"], number) for number in request["buckets"]]
                answer = {"sizes": [file.stat().st_size for file in files]}
            except OSError as error:
                store.set("answer", json.dumps({"error": str(error)}))
                raise
            store.set("answer", json.dumps(answer))
            with _group(store, rank=0, size=request["size"] + 1, backend=request["backend"], timeout=timeout) as group:
                for file in files:
                    group.broadcast(_mapped(file))
        except Exception as error:  # noqa: BLE001 - the receivers report it
            _log.warning("a delivery of %s ended early: %s", request["version"], error)
        finally:
            self._ended.append(request["delivery"])


def receive(version: str, seat: Seat, *, into: Path) -> Generator[int]:
    """Write the buckets of a version into a folder and yield the number of each as soon as it is complete.

    The content is not verified. The servers send at the same time.

    Args:
        version: name of the folder of the version.
        seat: place of this process in the delivery.
        into: existing folder on this node. Its spare files are overwritten.

    Raises:
        UpdateError: a bucket did not come; names it and the server.
    """
    arrived: queue.SimpleQueue[int | UpdateError] = queue.SimpleQueue()
    for source in seat.sources:
        receiving = partial(_receive_from, source, version, seat, into=into, arrived=arrived.put)
        threading.Thread(target=receiving, daemon=True).start()  # gloo may end a failed group only after its time-out
    for _ in range(sum(len(source.buckets) for source in seat.sources)):
        found = arrived.get()
        if isinstance(found, UpdateError):
            raise found
        yield found


def end_delivery(seat: Seat, reason: str) -> None:
    """End a delivery for all its members because one of them died.

    A group cannot be relied on for this: a process of gloo that is in the middle of sending to the dead one waits until
    the time-out, and so does each process of NCCL.
    """
    for source in seat.sources:
        with contextlib.suppress(RuntimeError):  # the server may be gone
            server = _connect(source.address, timedelta(seconds=seat.timeout_s))
            PrefixStore(seat.delivery, server).set("failure", reason)


def _receive_from(
    source: Source, version: str, seat: Seat, *, into: Path, arrived: Callable[[int | UpdateError], None]
) -> None:
    """Receive the buckets of one server and report each, or the first error."""
    awaited = f"the group of {source.address} and {seat.size} receivers of {version} did not form"
    try:
        timeout = timedelta(seconds=seat.timeout_s)
        server = _connect(source.address, timeout)
        if seat.index == 0:
            request = {
                "version": version,
                "buckets": source.buckets,
                "delivery": seat.delivery,
                "size": seat.size,
                "backend": seat.backend,
                "timeout_s": seat.timeout_s,
            }
            _ask(server, json.dumps(request))
        store = PrefixStore(seat.delivery, server)
        answer = json.loads(store.get("answer"))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        rank, size = seat.index + 1, seat.size + 1
        with _group(store, rank=rank, size=size, backend=seat.backend, timeout=timeout) as group:
            for number, num_bytes in zip(source.buckets, answer["sizes"], strict=True):
                awaited = f"bucket {number} of {version} did not come from {source.address}"
                file = bucket_file(into, number)
                group.broadcast(torch.from_numpy(bytes_to_fill(file, num_bytes, spare=file.with_suffix(SPARE))))
                arrived(number)
    except Exception as error:  # noqa: BLE001 - the caller waits for each bucket or for an error
        arrived(UpdateError(f"{awaited}: {error}"))


@contextmanager
def _group(store: Store, *, rank: int, size: int, backend: Backend, timeout: timedelta) -> Generator[_Group]:
    """A member of a group, which ends for all members if the block fails."""
    group = _Group(store, rank=rank, size=size, backend=backend, timeout=timeout)
    try:
        yield group
    except Exception as error:
        group.fail(str(error))
        raise


class _Group:
    """The group of a server, which has rank 0, and its receivers. A member that fails ends the group for all."""

    def __init__(self, store: Store, *, rank: int, size: int, backend: Backend, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        if backend == "gloo":
            self._gpu = None
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            self._gpu = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _IDLE  # when it is over, torch ends the process
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def broadcast(self, data: Tensor) -> None:
        """Send CPU bytes of rank 0 to all others.

        Raises:
            RuntimeError: it took longer than the time-out, or a member failed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        held = data
        if self._gpu is not None:
            held = data.to(self._gpu) if self._rank == 0 else torch.empty_like(data, device=self._gpu)
        work, started = self._group.broadcast([held], options), time.monotonic()
        looked = started
        while not work.is_completed():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - started > self._timeout_s:
                raise RuntimeError(f"the broadcast took longer than {self._timeout_s:g} s")
            if now - looked > _LOOK_S:
                looked = now
                if self._store.check(["failure"]):
                    raise RuntimeError(f"another member failed: {self._store.get('failure').decode()}")
        work.wait()  # raises its error
        if held is not data and self._rank:
            data.copy_(held)

    def fail(self, error: str) -> None:
        """End the group. A member that starts to wait after another has left would not notice it otherwise."""
        with contextlib.suppress(RuntimeError):  # the server may be gone
            if not self._store.check(["failure"]):
                self._store.set("failure", error)
        self._group.abort()


def _mapped(file: Path) -> Tensor:
    """Bytes of a file, which is only read here. Raises OSError if it does not exist."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a private mapping that torch accepts would be a copy
    with file.open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0, flags=flags), dtype=torch.uint8)


def _connect(address: str, timeout: timedelta) -> TCPStore:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _ask(server: TCPStore, request: str) -> None:
    server.set(f"request {server.add('requests', 1)}", request)
