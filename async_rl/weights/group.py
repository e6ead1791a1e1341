"""Groups of torch.distributed (gloo or NCCL): a server sends the buckets of a version to its receivers.

    trainer rank 0    buckets 0, 2  -> | receiver 0 | receiver 1 |
    trainer rank 8    buckets 1, 3  -> | receiver 0 | receiver 1 |

The receivers meet each server at its TCPStore. The ranks of an engine take the buckets in order of their numbers.

SGLang's server loads this file by its path, so the file must not import from async_rl.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

UNDELIVERED = "did not come from"  # in the error of a receiver that a server, or the way to it, has failed
Layout: TypeAlias = "list[tuple[str, str, list[int], int]]"
"""Name, dtype, shape and first byte of each tensor of a bucket, for example ("norm", "bfloat16", [8], 64)."""
IDLE = timedelta(days=1)  # longest single wait of a server for a request; then it waits once more
_CONNECT = timedelta(seconds=10)  # a server answers at once if it is alive
_POLL_S = 0.001  # time between two looks at a broadcast
_LOOK_S = 0.1  # time between two looks at the other members
_ENDED = "a receiver ended its load"


class _Blocks:
    """Host memory for buckets. A block that no tensor uses takes a later bucket.

    New memory takes longer than the receipt of a bucket, because the kernel clears each page.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Tensor:
        """Bytes uint8 [num_bytes] with any content."""
        fitting = [block for block in self._free if len(block) >= num_bytes]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
        else:
            del self._free[:1]  # a smaller one
            block = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        used = np.frombuffer(block, np.uint8, num_bytes)
        weakref.finalize(used, self._free.append, block).atexit = False
        return torch.from_numpy(used)


_BLOCKS = _Blocks()


def tensors_of(data: Tensor, layout: Sequence[Sequence[Any]]) -> list[tuple[str, Tensor]]:
    """(name, view) of each tensor in the bytes uint8 [n] of a bucket on any device. layout: `Layout`."""
    found: list[tuple[str, Tensor]] = []
    for name, kind, shape, start in layout:
        dtype: torch.dtype = getattr(torch, kind)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        found.append((name, data[start:end].view(dtype).view(shape)))
    return found


def received(
    delivery: Mapping[str, Any], *, rank: int, ranks: int, device: torch.device
) -> Generator[list[tuple[str, Tensor]]]:
    """Receive a version on a rank of an engine: yield (Hugging Face name, tensor) of each bucket, by number.

    The memory of a bucket takes a later one when no tensor uses it. If the generator is closed early, it ends the
    delivery for all.

    Args:
        delivery: see `async_rl.weights.transport.readable_by_ranks`.
        rank: index of this process among the ranks of the engine.
        ranks: number of ranks of the engine; all receive.
        device: GPU of the tensors with NCCL; with gloo they are on the CPU.

    Raises:
        RuntimeError: a bucket did not come; names it and the server.
    """
    if delivery["backend"] == "nccl":
        torch.cuda.set_device(device)
    awaited: tuple[int, str] = (0, "")
    with contextlib.ExitStack() as stack:
        try:
            senders: dict[int, tuple[Group, Mapping[str, Any], str]] = {}
            for address, numbers in delivery["sources"]:
                awaited = numbers[0], address
                group, buckets = stack.enter_context(joined(delivery, address, numbers, index=rank, size=ranks))
                senders |= {n: (group, bucket, address) for n, bucket in zip(numbers, buckets, strict=True)}
            for number in sorted(senders):
                group, bucket, address = senders[number]
                awaited = number, address
                if group.device.type == "cpu":
                    data = _BLOCKS.take(bucket["size"])
                else:
                    data = torch.empty(bucket["size"], dtype=torch.uint8, device=group.device)
                group.broadcast(data)
                yield tensors_of(data, bucket["layout"])
                del data  # before the next bucket takes memory
        except Exception as error:
            if _ENDED in str(error):
                raise RuntimeError(_ENDED) from error
            number, address = awaited
            raise RuntimeError(f"bucket {number} of {delivery['version']} {UNDELIVERED} {address}: {error}") from error


@contextmanager
def joined(
    delivery: Mapping[str, Any], address: str, numbers: Sequence[int], *, index: int, size: int
) -> Generator[tuple[Group, list[Mapping[str, Any]]]]:
    """The group with a server, and size and layout of its buckets. The first receiver asks for the delivery.

    Args:
        delivery: fields `version`, `delivery`, `backend` and `timeout_s`.
        address: host:port of the server.
        numbers: buckets that it sends.
        index: place among the receivers.
        size: number of receivers.

    Raises:
        RuntimeError: the server does not have them, or a member did not come.
    """
    timeout = timedelta(seconds=delivery["timeout_s"])
    server = connect(address, timeout)
    store = PrefixStore(delivery["delivery"], server)
    if index == 0:
        ask(server, {**delivery, "sources": None, "buckets": numbers, "size": size})
    buckets = answer_of(store)
    with member(store, rank=index + 1, size=size + 1, backend=delivery["backend"], timeout=timeout) as group:
        yield group, buckets


def connect(address: str, timeout: timedelta) -> TCPStore:
    """Store of a server. timeout: bound on each later call."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=min(timeout, _CONNECT))
    store.set_timeout(timeout)
    return store


def ask(server: TCPStore, request: Mapping[str, Any] | None) -> None:
    """Ask a server for a delivery, or to stop."""
    server.set(f"request {server.add('requests', 1)}", json.dumps(request))


def answer_of(delivery: Store) -> list[Mapping[str, Any]]:
    """Size, and layout if it is known, of each bucket that a server is asked for.

    Raises:
        RuntimeError: the server does not have it, or does not answer.
    """
    answer = json.loads(delivery.get("answer"))
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["buckets"]


@contextmanager
def member(store: Store, *, rank: int, size: int, backend: str, timeout: timedelta) -> Generator[Group]:
    """A member of a group. The group ends for all members if the block does not end by itself."""
    group = None
    try:
        group = Group(store, rank=rank, size=size, backend=backend, timeout=timeout)
        group.until_complete(size)
        yield group
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the server may be gone
            if not store.check(["failure"]):
                store.set("failure", str(error) if isinstance(error, Exception) else _ENDED)
        if group is not None:
            group.abort()
        raise


class Group:
    """The group of a server (rank 0) and its receivers. A member that fails ends the group for all.

    Args:
        backend: gloo or nccl.
        timeout: bound on the start of the group and on each broadcast.

    Attributes:
        device: CPU or GPU; tensors there are sent and received without a further copy.
    """

    def __init__(self, store: Store, *, rank: int, size: int, backend: str, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        if backend == "gloo":
            self.device = torch.device("cpu")
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = IDLE  # when it is over, torch ends the process
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def until_complete(self, size: int) -> None:
        """Return when all members are connected to all others.

        A member that has received all bytes closes its connections. If another one were still connecting, gloo would
        take that for a failure.
        """
        if self._store.add("connected", 1) == size:
            self._store.set("complete", "")
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(["complete"]):
            self._require_all()
            if time.monotonic() > deadline:
                raise RuntimeError(f"a member did not connect within {self._timeout_s:g} s")
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait(["complete"], timedelta(seconds=_LOOK_S))

    def broadcast(self, data: Tensor) -> None:
        """Send bytes of rank 0 to all others.

        Raises:
            RuntimeError: it took longer than the time-out, or a member failed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        held = data
        if data.device != self.device:
            held = data.to(self.device) if self._rank == 0 else torch.empty_like(data, device=self.device)
        work, started = self._group.broadcast([held], options), time.monotonic()
        looked = started
        while not work.is_completed():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - started > self._timeout_s:
                raise RuntimeError(f"the broadcast took longer than {self._timeout_s:g} s")
            if now - looked > _LOOK_S:
                looked = now
                self._require_all()
        try:
            work.wait()
        except RuntimeError:
            with contextlib.suppress(dist.DistNetworkError):  # the server may be gone
                self._require_all()  # the connection may be closed because another member failed
            raise
        if held is not data and self._rank:
            data.copy_(held)

    def _require_all(self) -> None:
        """Raise RuntimeError with the reason if a member failed."""
        if self._store.check(["failure"]):
            raise RuntimeError(f"another member failed: {self._store.get('failure').decode()}")

    def abort(self) -> None:
        """End the group. A member that starts to wait after another has left would not notice it otherwise.

        Gloo may end a failed group only after its time-out, so a thread waits for this.
        """
        held, self._group = [self._group], None
        threading.Thread(target=lambda: held.pop().abort(), daemon=True).start()  # frees it too
