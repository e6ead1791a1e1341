"""Brings a new version of the weights into every replica. Owns nothing of the trainer and nothing of the rollouts.

resume: pause -> abort (partials return to their agent loops) -> load -> resume (the loops go on, on new weights)
drain:  pause -> what is in flight finishes                   -> load -> resume
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

from agent_loop.engine import EngineError
from agent_loop.tools import PauseGate
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion

OnUpdate = Literal["resume", "drain"]


class ReplicaControl(Protocol):
    """The control side of a replica; see `async_rl.engines.replica` for the contract of each call."""

    name: str

    async def pause(self) -> None: ...
    async def abort(self) -> int: ...
    async def drain(self) -> None: ...
    async def load(self, update: WeightUpdate) -> WeightVersion: ...
    async def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """seconds: first pause to last resume. pause_seconds: longest pause of one replica. aborted: partial segments."""

    seconds: float
    pause_seconds: float
    aborted: int


class Publisher:
    """Loads a version on all replicas side by side.

    Args:
        tools: gate that every rollout passes before it starts a tool; shut while the replicas are paused.
        timeout_s: bound on one replica's pause, abort or drain, load and resume together.
    """

    def __init__(
        self, replicas: Sequence[ReplicaControl], *, on_update: OnUpdate, tools: PauseGate, timeout_s: float
    ) -> None:
        self._replicas = replicas
        self._tools = tools
        self._on_update: OnUpdate = on_update
        self._timeout_s = timeout_s

    async def publish(self, update: WeightUpdate) -> PublishReport:
        """Return when every replica serves `update`.

        Raises:
            EngineError: a replica did not take the version in time, or loaded something else.
        """
        begun = time.monotonic()
        self._tools.pause()
        try:
            async with asyncio.TaskGroup() as loads:
                tasks = [loads.create_task(self._load(replica, update)) for replica in self._replicas]
        finally:
            self._tools.resume()
        done = [task.result() for task in tasks]
        return PublishReport(
            seconds=time.monotonic() - begun,
            pause_seconds=max(seconds for seconds, _ in done),
            aborted=sum(aborted for _, aborted in done),
        )

    async def _load(self, replica: ReplicaControl, update: WeightUpdate) -> tuple[float, int]:
        begun, aborted = time.monotonic(), 0
        try:
            async with asyncio.timeout(self._timeout_s):
                await replica.pause()
                match self._on_update:
                    case "resume":
                        aborted = await replica.abort()
                    case "drain":
                        await replica.drain()
                    case _:
                        assert_never(self._on_update)
                loaded = await replica.load(update)
                await replica.resume()
        except TimeoutError as error:
            raise EngineError(
                f"{replica.name} did not load version {update.weights.version} within sync.timeout_s={self._timeout_s}"
            ) from error
        if loaded != update.weights:
            raise EngineError(f"{replica.name} loaded {loaded}, but {update.weights} was published")
        return time.monotonic() - begun, aborted
