"""The replicas of a run. Their answers are recorded, and they are disturbed: aborts, publishes, killed processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import psutil

from agent_loop.engine import GenerateRequest
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.stub import InProcess
from async_rl.inference.supervisor import SupervisionConfig, Supervisor
from async_rl.inference.vllm.engine import VllmBackend
from message_queue.tokens import TokenOutput
from message_queue.trajectory import Trajectory
from tests.conformance.checks import whole
from tests.conformance.engines import TIMEOUT_S, EngineUnderTest, Exchange
from tests.helpers.fakes import FakeEngine
from tests.helpers.fakes.rollouts import RolloutsHere

Start = Callable[[str], Awaitable[Any]]
"""Starts a replica of a name."""


class Tap(InProcess):
    """A replica whose calls are counted, and whose answers are recorded by session, together with those of `share`."""

    def __init__(self, replica: Any, *, share: Tap | None = None) -> None:
        self.replica = replica
        self.asked = asyncio.Semaphore(0) if share is None else share.asked
        self.answered: dict[str, list[Exchange]] = defaultdict(list) if share is None else share.answered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        if request.request_id.endswith("-0."):  # the first of a call: an abort must not cause the next one
            self.asked.release()
        answer = await self.replica.generate(request)
        self.answered[request.session].append(Exchange(request, tuple(answer)))
        return answer


class TappedPool:
    """Replicas with the pool, router, publisher and supervisor of a run; `tested` knows their models.

    start: of the replica that takes the place of a killed one.
    """

    def __init__(self, tested: EngineUnderTest, replicas: Sequence[Any], *, start: Start) -> None:
        self._tap = Tap(replicas[0])
        self.answered = self._tap.answered
        self.counts = Counter[str]()
        """Aborts, publishes, killed replicas."""
        taps: Any = [self._tap, *(Tap(replica, share=self._tap) for replica in replicas[1:])]
        self.pool = ReplicaPool(taps)
        self.engine = ReplicaRouter(self.pool)
        self.tested = tested
        self._start = start
        self._num_replicas = len(replicas)
        self._version = -1
        self._publisher = Publisher(self.pool, on_update="resume", rollouts=RolloutsHere(), timeout_s=TIMEOUT_S)
        self._supervisor = Supervisor(
            self.pool,
            self._publisher,
            start=self._replace,
            config=SupervisionConfig(max_restarts=1000),
            note=lambda _text: None,
        )

    async def publish(self) -> None:
        """Load the next version."""
        self._version += 1
        self.counts["publishes"] += 1
        self.tested.kept[self._version] = "recompute"
        await self._publisher.publish(self.tested.update(self._version))

    async def abort(self) -> None:
        """Abort everything in flight."""
        self.counts["aborts"] += 1
        await self._publisher.abort_all()
        await self._publisher.resume()

    async def disturb(self, chance: random.Random) -> None:
        """Abort or publish after every few calls, and replace killed replicas, forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._supervisor.watch(every_s=1.0, timeout_s=TIMEOUT_S))
            while True:
                for _ in range(chance.randint(1, 12)):
                    await self._tap.asked.acquire()
                await chance.choice((self.abort, self.publish))()

    async def kill(self, chance: random.Random) -> None:
        """Kill a process of a replica; the first time and sometimes later of every replica."""
        await self.pool.serving()
        live: list[Any] = [member.replica for member in self.pool.live]
        victims = live if not self.counts["kills"] or chance.random() < 0.3 else [chance.choice(live)]
        for tap in victims:
            self.counts["kills"] += 1
            kill(tap.replica, chance)

    async def until_whole(self) -> None:
        """Return when all killed replicas are replaced."""
        while len(self.pool.live) < self._num_replicas:
            await self.pool.changed.wait()

    async def close(self) -> None:
        live: list[Any] = [member.replica for member in self.pool.live_or_none]
        for tap in live:
            await close(tap.replica)

    async def _replace(self, lost: Any, /, *, slot: int, name: str) -> Any:
        await close(lost.replica)
        return Tap(await self._start(name), share=self._tap)


def kill(replica: Any, chance: random.Random) -> None:
    """Kill a process of the engine: SGLang has a server and schedulers."""
    if isinstance(replica, FakeEngine):
        replica.die()
        return
    if isinstance(replica.backend, VllmBackend):
        pids = [process.pid for process in replica.backend.processes]
    else:
        server = psutil.Process(replica.backend.server.pid)
        pids = [server.pid, *(child.pid for child in server.children() if child.name().endswith("scheduler"))]
    os.kill(chance.choice(pids), signal.SIGKILL)


async def close(replica: Any) -> None:
    """Stop an engine."""
    if not isinstance(replica, FakeEngine):
        await replica.close()


def taken_of(trajectory: Trajectory, *, name: str, answered: dict[str, list[Exchange]]) -> list[Exchange]:
    """Compare what a rollout trains with what the engines were sent and answered; return that and remove it.

    Each sequence equals a request and its answer, token by token, and has a row for each token but the last. Each token
    that was sampled is in one loss.
    """
    names = [name, *(f"{name}-p{path.path}" for path in trajectory.paths[1:])]
    exchanges = [exchange for each in names for exchange in answered.pop(each, [])]
    assert _in_loss(trajectory) == _sampled(exchanges)
    return exchanges


def _sampled(exchanges: list[Exchange]) -> Counter[tuple[int, ...]]:
    """All tokens up to each one that an engine sampled, that one included."""
    found = Counter[tuple[int, ...]]()
    for exchange in exchanges:
        tokens = tuple(whole(exchange).tolist())
        found.update(tokens[: at + 1] for at in range(len(exchange.request.token_ids), len(tokens)))
    return found


def _in_loss(trajectory: Trajectory) -> Counter[tuple[int, ...]]:
    """All tokens up to each one that takes gradient, that one included."""
    found = Counter[tuple[int, ...]]()
    for sequence in trajectory.sequences():
        tokens = tuple(sequence.token_ids.tolist())
        for run in sequence.runs:
            found.update(tokens[: at + 1] for at in range(run.start, run.start + run.tokens))
        assert sequence.rows is not None and len(sequence.rows) == len(tokens) - 1
    return found
