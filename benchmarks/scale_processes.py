"""Processes of `scale.py`: fake replicas and a fake trainer rank, and meters of event-loop lag for the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from agent_loop.timeline import TimeSpan
from async_rl.cluster.replica import REFUSALS, ReplicaHost
from async_rl.cluster.trainer import TrainerClient
from async_rl.cluster.worker import RolloutHost
from async_rl.inference.replica import InflightRequest, KVPolicy, ReplicaStats, RequestGate, until_finished
from async_rl.inference.spans import cut_into_segments
from async_rl.trainer.planning import BatchPlan
from async_rl.weights.transport import Seat, WeightUpdate
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion

PROMPT_TOKENS = 16  # of a prompt of the calculator, about
TICK_S = 0.01
PARTS = 16  # an abort ends a decode after this part of its tokens
DIGEST = "0" * 16
FIRST_WORD = 40  # tokens from here on end no turn


class LagMeter:
    """How late a task is that wants to run every `TICK_S`. A late run counts once for each time that it missed."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._task = asyncio.create_task(self._tick())

    def take(self) -> NDArray[np.float64]:
        """float64 [n, 3] since the last call: time at which the task was due, seconds late, seconds of own CPU.

        The time is that of `time.monotonic`, which is the same in all processes of a machine. Own CPU is the part of
        the lag in which the thread of the event loop ran; in the rest other threads or processes had the core.
        """
        samples, self._samples = self._samples, []
        return np.array(samples, np.float64).reshape(-1, 3)

    async def _tick(self) -> None:
        due = ran = time.monotonic()
        cpu = time.thread_time()
        while True:
            due += TICK_S
            await asyncio.sleep(due - time.monotonic())
            before, cpu_before = ran, cpu
            ran, cpu = time.monotonic(), time.thread_time()
            own = min(1.0, (cpu - cpu_before) / max(ran - before, 1e-9))
            while due <= ran:
                self._samples.append((due, ran - due, own * (ran - due)))
                due += TICK_S
            due -= TICK_S


class Metered:
    """An actor with a meter; `meter` starts it."""

    async def meter(self) -> None:
        self._meter = LagMeter()

    async def lags(self) -> NDArray[np.float64]:
        """See `LagMeter.take`."""
        return self._meter.take()


class MeteredRolloutHost(Metered, RolloutHost):
    """The process of a rollout worker, with a meter."""


class IdleHost(Metered):
    """A process that only has a meter: the lag of the machine."""


class ScriptedReplica:
    """See `inference.replica.EngineReplica`. Its requests decode until their group is released, or are aborted.

    The gate is the real one. Tokens, logprobs and rows are parts of arrays that are made once.
    """

    def __init__(self, name: str, *, routing: RoutingSpec, stop_token: int, vocab_size: int, max_tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.name = name
        self._stop_token = stop_token
        self._token_ids = rng.integers(FIRST_WORD, vocab_size, size=max_tokens, dtype=np.int32)
        self._logprobs = -rng.random(max_tokens, dtype=np.float32)
        first = rng.integers(routing.num_experts, size=(max_tokens, len(routing.layers), 1))
        self._rows = ((first + np.arange(routing.top_k)) % routing.num_experts).astype(routing.dtype)
        self._gate = RequestGate(name)
        self._changed: dict[str, asyncio.Event] = {}  # set if something changed that ends the wait of a request
        self.begin(tokens=max_tokens - PROMPT_TOKENS)

    def begin(self, *, tokens: int) -> None:
        """Serve version 0, and give each trajectory about `tokens` tokens; none ends before its group is released."""
        self.weights = WeightVersion(0, DIGEST)
        self._length = PROMPT_TOKENS + tokens
        self._released = 0  # groups with smaller ids may end

    def release(self, groups: int) -> None:
        """Let the requests of groups with smaller ids end."""
        self._released = groups
        self._wake()

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        group = int(request.session.partition("-")[0].removeprefix("g"))
        async with self._gate.admit(request.request_id) as inflight:
            changed = self._changed[request.request_id] = asyncio.Event()
            try:
                while group >= self._released and not inflight.abort_requested:
                    changed.clear()
                    await changed.wait()
                    self._gate.check_alive()
            finally:
                del self._changed[request.request_id]
            inflight.result = self._answer(request, inflight)
            return inflight.result

    def _wake(self) -> None:
        for changed in self._changed.values():
            changed.set()

    def _answer(self, request: GenerateRequest, inflight: InflightRequest) -> list[TokenOutput]:
        start = len(request.token_ids)
        left, part = self._length - start, self._length // PARTS
        count = max(0, min(left - 1, part)) if inflight.abort_requested else left
        token_ids, end = self._token_ids[start : start + count].copy(), start + count - 1
        if not inflight.abort_requested:
            token_ids[-1] = self._stop_token
        rows = RoutedExperts(first_position=request.existing_rows, experts=self._rows[request.existing_rows : end])
        return cut_into_segments(
            request,
            token_ids=token_ids,
            logprobs=self._logprobs[start : start + count],
            routed_experts=rows if count else None,
            spans=[(self.weights, count)],
            stop_reason=StopReason.ABORT if inflight.abort_requested else StopReason.STOP,
            replica=self.name,
        )

    async def pause(self) -> None:
        self._gate.pause()

    async def abort(self) -> int:
        requests = self._gate.request_abort()
        self._wake()
        await until_finished(requests)
        return len(requests)

    async def drain(self) -> None:
        await self._gate.drain()

    async def freeze(self) -> int:
        return self._gate.freeze()

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        self._gate.require_quiet("load")
        self.weights = update.weights
        return self.weights

    async def fetch(self, update: WeightUpdate, seat: Seat | None = None) -> None:
        pass

    async def checksum(self) -> str:
        return self.weights.digest

    async def resume(self) -> None:
        self._gate.resume()

    async def stats(self) -> ReplicaStats:
        return self._gate.stats()

    async def close(self) -> None:
        self._gate.fail("closed")
        self._wake()


class ScriptedReplicaHost(ReplicaHost):
    """The process of a replica, with a fake one."""

    async def serve_scripted(self, name: str, **options: Any) -> None:
        """options: of ScriptedReplica."""
        self._replica = ScriptedReplica(name, **options)
        self.serve(self._replica, refusals=REFUSALS)

    async def begin(self, *, tokens: int) -> None:
        self._replica.begin(tokens=tokens)

    async def release(self, groups: int) -> None:
        self._replica.release(groups)

    async def in_flight(self) -> int:
        """Requests past the gate."""
        return (await self._replica.stats()).in_flight


class FakeRank:
    """A trainer rank that fetches the content of its batch and makes no gradient."""

    def call(self, _method: str, _plan: BatchPlan, contents: Sequence[Any]) -> tuple[dict[str, float], list[TimeSpan]]:
        for group in ray.get(list(contents)):
            for trajectory in group:
                for sequence in trajectory:
                    sequence.token_ids.sum()
        return {"loss": 0.0, "grad_norm": 1.0, "entropy": 1.0}, []


class FakeTrainer(TrainerClient):
    """The real handle for `train`, so that the driver plans and hands out each batch; nothing else is called.

    exported: set at each export, with the time.
    """

    exported: asyncio.Event
    exported_at = 0.0

    async def call(self, method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        if method.__name__ != "export":
            return None
        self.exported_at, version = time.monotonic(), options["version"]
        self.exported.set()
        return WeightUpdate(path=Path(args[0]) / f"weights-{version}", weights=WeightVersion(version, DIGEST))

    async def save(self, directory: Path) -> None:
        directory.mkdir()  # noqa: ASYNC240 - one call

    async def saved(self) -> None: ...


def percentile(samples: NDArray[np.float64], windows: Sequence[tuple[float, float]], *, column: int) -> float:
    """99th percentile in milliseconds of a column of `LagMeter.take`, over what was due in one of `windows`."""
    due = samples[:, 0]
    inside = np.zeros(len(due), bool)
    for begin, end in windows:
        inside |= (begin <= due) & (due < end)
    return 1e3 * float(np.quantile(samples[inside, column], 0.99)) if inside.any() else float("nan")
