"""Sends versions from memory to memory: files to other nodes, or buckets of trainer ranks to the ranks of engines.

With `sync.route=broadcast`, a process that has the files of versions in the memory of its node serves them: one trainer
rank of each node, and a replica if another one comes late. One process of each other node receives and writes files:

    trainer rank 0    buckets 0, 2  -> | node A | node B | node C |
    trainer rank 8    buckets 1, 3  -> | node A | node B | node C |

With `sync.route=direct`, each trainer rank that owns buckets serves a copy in its own memory. The ranks of an engine
receive it while they load (`async_rl.weights.group.received`), each engine in a delivery for itself:

    trainer rank 0    buckets 0, 2  -> | rank 0 | rank 1 |  of replica-0, later of replica-1
    trainer rank 1    buckets 1, 3  -> | rank 0 | rank 1 |

A server sends in separate threads, and only reads, so that its trainer trains meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import queue
import threading
import uuid
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.weights.group import IDLE, UNDELIVERED, answer_of, ask, connect, joined, member
from async_rl.weights.overwrite import bytes_to_fill
from async_rl.weights.snapshots import Snapshots
from async_rl.weights.transport import SPARE, Direct, Seat, Source, UpdateError, bucket_file

_log = logging.getLogger(__name__)


class VersionServer:
    """Sends versions to the processes that ask, until `close`.

    Args:
        host: address of this node for the others.
        held: parent of the folders of the versions, or the buckets in this process.

    Attributes:
        address: host:port.
    """

    def __init__(self, host: str, held: Path | Snapshots) -> None:
        self._held = held
        self._ended: list[str] = []  # names of deliveries
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"
        self._thread = threading.Thread(target=self._serve, name="weights server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further request; deliveries under way continue."""
        ask(connect(self.address, IDLE), None)
        self._thread.join()

    def _serve(self) -> None:
        store = connect(self.address, IDLE)
        number = 1
        while True:
            try:
                request = json.loads(store.get(f"request {number}"))
            except dist.DistStoreError:  # no request came for a day
                continue
            if request is None:
                return
            store.delete_key(f"request {number}")
            self._forget_ended(store)
            threading.Thread(target=self._send, args=(request,), daemon=True).start()
            number += 1

    def _forget_ended(self, store: TCPStore) -> None:
        """Remove the keys of the deliveries that had ended when another one was asked for."""
        ended, self._ended = self._ended, []
        for key in store.list_keys() if ended else []:
            if key.partition("/")[0] in ended:
                store.delete_key(key)

    def _send(self, request: dict[str, Any]) -> None:
        """Send the buckets of a request. If this fails, it fails in the receivers too, and they report it."""
        timeout = timedelta(seconds=request["timeout_s"])
        store = PrefixStore(request["delivery"], self._store)
        version, numbers, size = request["version"], request["buckets"], request["size"]
        try:
            try:
                buckets = [self._described(version, number) for number in numbers]
            except (OSError, UpdateError) as error:
                store.set("answer", json.dumps({"error": str(error)}))
                raise
            store.set("answer", json.dumps({"buckets": buckets}))
            if not size:
                return
            with member(store, rank=0, size=size + 1, backend=request["backend"], timeout=timeout) as group:
                for number in numbers:
                    group.broadcast(self._data(version, number))
        except Exception as error:  # noqa: BLE001 - the receivers report it
            _log.warning("a delivery of %s ended early: %s", version, error)
        finally:
            self._ended.append(request["delivery"])

    def _described(self, version: str, number: int) -> dict[str, Any]:
        """Size of a bucket in bytes, and its layout if it is in this process."""
        if isinstance(self._held, Path):
            return {"size": bucket_file(self._held / version, number).stat().st_size}
        bucket = self._held.bucket(version, number)
        return {"size": len(bucket.data), "layout": bucket.layout}

    def _data(self, version: str, number: int) -> Tensor:
        if isinstance(self._held, Path):
            return _mapped(bucket_file(self._held / version, number))
        return self._held.bucket(version, number).data


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


def described(version: str, direct: Direct, *, timeout_s: float) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor of a version that trainer ranks have in their memory.

    Args:
        version: name of its folder.
        direct: the ranks.
        timeout_s: bound on the answer of each.

    Raises:
        UpdateError: a rank does not have it, or does not answer.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for address, numbers in direct.sources:
        name = uuid.uuid4().hex
        request = {"version": version, "buckets": numbers, "delivery": name, "size": 0, "timeout_s": timeout_s}
        try:
            server = connect(address, timedelta(seconds=timeout_s))
            ask(server, request)
            for bucket in answer_of(PrefixStore(name, server)):
                shapes |= {name: tuple(shape) for name, _, shape, _ in bucket["layout"]}
        except RuntimeError as error:
            raise UpdateError(f"bucket {numbers[0]} of {version} {UNDELIVERED} {address}: {error}") from error
    return shapes


def end_delivery(seat: Seat, reason: str) -> None:
    """End a delivery for all its members because one member died.

    A group cannot be relied on for this: a process of gloo that is in the middle of sending to the dead one waits until
    the time-out, and so does each process of NCCL.
    """
    for source in seat.sources:
        with contextlib.suppress(RuntimeError):  # the server may be gone
            server = connect(source.address, timedelta(seconds=seat.timeout_s))
            PrefixStore(seat.delivery, server).set("failure", reason)


def _receive_from(
    source: Source, version: str, seat: Seat, *, into: Path, arrived: Callable[[int | UpdateError], None]
) -> None:
    """Receive the buckets of one server and report each, or the first error."""
    awaited = f"the group of {source.address} and {seat.size} receivers of {version} did not form"
    delivery = {
        "version": version,
        "delivery": seat.delivery,
        "backend": seat.backend,
        "timeout_s": seat.timeout_s,
    }
    try:
        with joined(delivery, source.address, source.buckets, index=seat.index, size=seat.size) as (group, buckets):
            for number, bucket in zip(source.buckets, buckets, strict=True):
                awaited = f"bucket {number} of {version} {UNDELIVERED} {source.address}"
                file = bucket_file(into, number)
                group.broadcast(torch.from_numpy(bytes_to_fill(file, bucket["size"], spare=file.with_suffix(SPARE))))
                arrived(number)
    except Exception as error:  # noqa: BLE001 - the caller waits for each bucket or for an error
        arrived(UpdateError(f"{awaited}: {error}"))


def _mapped(file: Path) -> Tensor:
    """Bytes of a file, for reading only. Raises OSError if it does not exist."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a private mapping that torch accepts would be a copy
    with file.open("r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0, flags=flags), dtype=torch.uint8)
