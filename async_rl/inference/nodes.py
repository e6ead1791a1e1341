"""One engine over several nodes: the place of a node, and the process group of the engine on a node but the first.

    node 0    the replica, its engine with ranks 0 and 1    <- requests, control calls
    node 1    a follower, its engine with ranks 2 and 3     <- the engine of node 0

The engine of node 0 leads: it calls the ranks of all nodes. A follower only starts its ranks, ends them, and reports
when they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.weights.digest import STORE_VARIABLE
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import Seat, WeightUpdate

NUM_PORTS = 8  # SGLang takes up to 7 successive ones from the first on, vLLM 2
ADDRESS_VARIABLES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")  # address of this node for the engine's other processes
NODE_VARIABLES = frozenset({STORE_VARIABLE, *ADDRESS_VARIABLES})
_PORTS = range(20_000, 32_000)  # below those that Linux gives to connections


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The place of a node among those of one replica."""

    index: int
    """0 for the node of the replica's own process."""
    size: int
    """Number of nodes."""
    host: str
    """Address of this node for the others."""
    leader: str
    """Address of node 0 for the others."""
    port: int
    """First of NUM_PORTS ports of node 0 that the engine takes."""
    store: Path | None
    """Directory of published versions on this node; None if the replica loads none."""


def node_environment(place: NodePlace) -> dict[str, str]:
    """Environment variables of the engine's processes on a node."""
    store = {} if place.store is None else {STORE_VARIABLE: str(place.store)}
    return dict.fromkeys(ADDRESS_VARIABLES, place.host) | store


async def bring(store: LocalStore, update: WeightUpdate, seat: Seat | None, *, timeout_s: float) -> None:
    """`LocalStore.bring` within `engine.load_timeout_s`.

    Raises:
        TimeoutError: it took longer; names what was awaited.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.to_thread(store.bring, update, seat)
    except TimeoutError as error:
        raise TimeoutError(f"{store.waiting_for} did not come within engine.load_timeout_s={timeout_s}") from error


class Follower(Protocol):
    """Another node of a replica, as its process on node 0 sees it."""

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        """Bring a version to the node; see `async_rl.inference.replica.EngineReplica.fetch`.

        Raises:
            UpdateError: it did not come.
            ReplicaLostError: the node does not answer.
        """
        ...

    async def close(self) -> None:
        """End the engine's processes on the node; do nothing if it does not answer."""
        ...


class NodeProcess:
    """A process of an engine in a separate process group; belongs to one event loop.

    Args:
        pid: id of the process and of its group.
        wait: waits for the end of the process and returns its exit code.
    """

    def __init__(self, pid: int, *, wait: Callable[[], int | None]) -> None:
        self.pid = pid
        self.death: str | None = None
        """Why the process has ended; None until it has."""
        self._wait = wait
        self._on_death: Callable[[str], None] = lambda _: None
        self._dead = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._died)

    async def until_dead(self) -> str:
        """Return the reason when the process has ended; the rest of its group is killed then."""
        await self._dead.wait()
        return str(self.death)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with the reason when the process ends before `stop`."""
        self._on_death = on_death
        if self.death is not None:
            on_death(self.death)

    async def stop(self) -> None:
        """Kill the group and wait for its first process."""
        self._on_death = lambda _: None
        if self.death is None:
            self._kill()
        await self._dead.wait()

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill()
        self.death = f"engine process {self.pid} died, exit code {self._wait()}"
        self._dead.set()
        self._on_death(self.death)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # if it has not made its group yet


def reserve_ports(host: str, *, count: int = NUM_PORTS) -> tuple[Sequence[socket.socket], int]:
    """Sockets that reserve successive free ports until the engine listens on them, and the first port.

    Raises:
        OSError: none are free.
    """
    firsts = list(range(_PORTS.start, _PORTS.stop, count))
    random.shuffle(firsts)
    for first in firsts:
        with contextlib.ExitStack() as stack:
            try:
                sockets = [stack.enter_context(reserve_port(host, port)) for port in range(first, first + count)]
            except OSError:
                continue
            stack.pop_all()
            return sockets, first
    raise OSError(f"{host} has no {count} successive free ports from {_PORTS.start} to {_PORTS.stop}")


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """A socket that reserves a port, or any free one, until a server listens on it.

    Raises:
        OSError: the port is taken.
    """
    reserved = socket.socket()
    # lets the server bind while this socket does not listen
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved
