"""Replicas, trainer and checkpoints without tokens: what they do takes time, by the rates of a description.

Requests have a length, and all running requests of a replica advance by one token per decode step.

Gate and life cycle are those of a real replica (`RequestGate`), so a publish pauses, aborts, freezes or drains it as in
a run. A decode step takes longer with more requests (`Rates.step_s`), requests above `max_running` wait in order, and a
prefill stops the decode of all. So only the start and the end of a request are events, not each of its tokens:

    progress   tokens that a request would have by now if it had run since the start
    a request that starts at progress 10.0 with 5 tokens ends at progress 15.0
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import cast

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.controller.checkpoints import Checkpoints, RunState
from async_rl.controller.parts import Trainer
from async_rl.inference.gate import DraftCounts, KVPolicy
from async_rl.inference.supervisor import Supervisor
from async_rl.metrics.recorder import Recorder
from async_rl.plan.description import Description, Interruptions, Rates
from async_rl.simulator.standins import ScriptedReplica, ScriptedTrainer
from async_rl.trainer.batch.training_batch import Int64Array, TrainingBatch
from message_queue.heads import Span, merged_spans
from message_queue.tokens import TokenOutput, WeightVersion

CLOSE = 1e-6  # tokens or seconds; what is so near to its end has ended


@dataclass(frozen=True, slots=True)
class Scale:
    """Simulated part of a cluster."""

    whole: int
    """Replicas of the cluster."""
    replicas: int
    """Simulated replicas."""
    groups: int
    """Simulated groups of a batch."""
    groups_of: float
    """Groups of the cluster for each simulated one."""
    requests_of: float
    """Requests of a replica for each simulated one."""

    def part_of(self, replicas: int) -> int:
        """Simulated ones of that many replicas of the cluster, at least one."""
        return max(1, round(replicas * self.replicas / self.whole))


@dataclass(slots=True, eq=False)
class Decode:
    """A request, and its tokens so far."""

    request_id: str
    """Unique while in flight."""
    session: str
    """Of the trajectory."""
    tokens: int
    """To be sampled."""
    context: float
    """Prompt and tokens so far; they are prefilled."""
    replica: str = ""
    """That it was sent to last."""
    spans: list[Span] = field(default_factory=list[Span])
    """Tokens by version, once it has ended."""
    aborted: bool = False
    """Whether it ended before its last token."""
    started: float = 0.0
    """Progress of the replica when it started, or when its newest version was loaded."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended."""

    @property
    def sampled(self) -> int:
        """Tokens so far."""
        return sum(tokens for _, tokens in self.spans)


class PlannedReplica(ScriptedReplica):
    """A replica whose requests are `Decode`s.

    Attributes:
        busy_s: time with a running request.
        tokens: tokens sampled.

    Args:
        slow: seconds of its decode steps over those of `rates`.
    """

    def __init__(self, name: str, *, rates: Rates, slow: float = 1.0) -> None:
        super().__init__(name, weights=WeightVersion(0, "0"))
        self.load_s, self.transfer_s = rates.load_s, rates.transfer_s
        self.busy_s = self.tokens = 0.0
        self._rates = rates
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._running: list[tuple[float, int, Decode]] = []  # a heap, by progress at the end
        self._waiting: deque[Decode] = deque()
        self._progress = self._updated = self._prefilled = 0.0
        self._frozen = False
        self._slow = slow
        self._speed = 1.0
        self._timer: asyncio.TimerHandle | None = None

    # ---- control

    def _on_abort(self) -> None:
        self.advance()
        for _, _, decode in self._running:
            self._end(decode, aborted=True)
        for decode in self._waiting:
            decode.aborted = True
            decode.ended.set()
        self._running.clear()
        self._waiting.clear()

    def _on_freeze(self) -> None:
        self.advance()
        self._frozen = True
        self._schedule()

    def _on_resume(self) -> None:
        self.advance()
        self._frozen = False
        self._schedule()

    async def _on_load(self, weights: WeightVersion, kv: KVPolicy, *, seconds: float) -> None:
        await asyncio.sleep(seconds)
        context = 0.0
        for end, _, decode in self._running:
            self._sampled(decode)
            context += decode.context + decode.tokens - (end - self._progress)
        if kv == "recompute":
            self._prefill(context)

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        decode = cast(Decode, request)
        decode.replica = self.name
        async with self._gate.admit(decode.request_id):
            self.advance()
            if len(self._running) < self._rates.max_running:
                self._start(decode)
                self._schedule()
            else:
                self._waiting.append(decode)
            try:
                await decode.ended.wait()
            finally:
                if not decode.ended.is_set():
                    self._remove(decode)
        return []

    def share(self, speed: float) -> None:
        """Decode at this share of the full speed from now on."""
        self.advance()
        self._speed = speed
        self._schedule()

    def _step_s(self) -> float:
        return self._rates.step_s(len(self._running)) * self._slow / self._speed

    def _remove(self, decode: Decode) -> None:
        """A request whose caller is cancelled leaves."""
        self.advance()
        if decode in self._waiting:
            self._waiting.remove(decode)
            return
        self._running = [running for running in self._running if running[2] is not decode]
        heapify(self._running)
        self._fill()

    def _fill(self) -> None:
        """Start requests that wait, and look again when the next one ends."""
        while self._waiting and len(self._running) < self._rates.max_running:
            self._start(self._waiting.popleft())
        self._schedule()

    def _start(self, decode: Decode) -> None:
        self._prefill(decode.context)
        decode.started = self._progress
        heappush(self._running, (self._progress + decode.tokens, next(self._numbers), decode))

    def _prefill(self, tokens: float) -> None:
        """The decode stops for these tokens."""
        self._prefilled = max(self._prefilled, self._loop.time()) + tokens / self._rates.prefill_tokens_per_s

    def advance(self) -> None:
        """Progress up to now, at the number of requests since the last call."""
        now = self._loop.time()
        since, self._updated = self._updated, now
        if not self._running or self._frozen:
            return
        self.busy_s += now - since
        elapsed = now - max(since, self._prefilled)
        if elapsed > 0:
            steps = elapsed / self._step_s()
            self._progress += steps
            self.tokens += steps * len(self._running)

    def _schedule(self) -> None:
        """Look again when the next request ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._frozen:
            left = max(0.0, self._running[0][0] - self._progress) * self._step_s()
            self._timer = self._loop.call_at(max(self._loop.time(), self._prefilled) + left, self._on_end)

    def _on_end(self) -> None:
        self._timer = None
        self.advance()
        while self._running and self._running[0][0] <= self._progress + CLOSE:
            _, _, decode = heappop(self._running)
            self._end(decode, aborted=False)
        self._fill()

    def _sampled(self, decode: Decode) -> None:
        """Note the tokens of the version that is loaded now."""
        tokens = min(int(self._progress - decode.started + CLOSE), decode.tokens - decode.sampled)
        if tokens > 0:
            decode.spans.append((self.weights.version, tokens))
            decode.started += tokens

    def _end(self, decode: Decode, *, aborted: bool) -> None:
        if aborted:
            self._sampled(decode)
        elif (left := decode.tokens - decode.sampled) > 0:
            decode.spans.append((self.weights.version, left))
        decode.spans = list(merged_spans(decode.spans))
        decode.aborted = aborted
        decode.ended.set()


class Replicas(Supervisor):
    """The controller's view of replicas that do not fail."""

    def __init__(self, replicas: Sequence[PlannedReplica]) -> None:
        self._replicas = replicas

    async def busy_seconds(self) -> float:
        for replica in self._replicas:
            replica.advance()
        return sum(replica.busy_s for replica in self._replicas) / len(self._replicas)

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts()

    async def watch(self, *, every_s: float, timeout_s: float) -> None:
        await asyncio.Event().wait()


class OpenTrajectories:
    """Trajectories in rollout: their number now, and the seconds with any.

    Attributes:
        turned: set when the first one opens, or the last one ends.
    """

    def __init__(self) -> None:
        self.turned = asyncio.Event()
        self._count = 0
        self._seconds = self._since = 0.0

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def seconds(self) -> float:
        """Seconds with an open trajectory so far."""
        return self._seconds + (asyncio.get_running_loop().time() - self._since if self._count else 0.0)

    def change(self, by: int) -> None:
        """Open `by` trajectories; a negative number ends as many."""
        self._seconds, self._since = self.seconds, asyncio.get_running_loop().time()
        if bool(self._count) != bool(self._count + by):
            self.turned.set()
        self._count += by


class PlannedTrainer(ScriptedTrainer):
    """A trainer with measured rates.

    Args:
        gpus: number of GPUs.
        replicas: get slower while it trains, if they share its cores.
        opened: trajectories in rollout; they make it slower then.
    """

    def __init__(
        self,
        description: Description,
        scale: Scale,
        *,
        gpus: int,
        replicas: Sequence[PlannedReplica],
        opened: OpenTrajectories,
    ) -> None:
        self._workload, self._rates = description.workload, description.rates
        self.export_s = self._rates.export_s
        self._token_s = scale.groups_of / (self._rates.train_tokens_per_s * gpus)
        self._replicas = replicas
        self._opened = opened

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        tokens = self._computed(batch.lengths, batch.index[:, 0]) * (1 + self._workload.critic)
        for update in batch.sampled_at if self._workload.old_policy else ():
            part = batch.of_update(update)
            scored = (part.num_loss_tokens > 0) & ((update < batch.current_update) | (batch.mini_batch > 0))
            tokens += self._computed(part.lengths[scored], batch.index[scored, 0]) / 3
        await self._train(self._rates.train_s + tokens * self._token_s)
        await asyncio.sleep(self._rates.switch_s)
        return {}

    def _computed(self, lengths: Int64Array, groups: Int64Array) -> float:
        """Tokens of sequences of groups; the prompt of a group counts once if the trainer shares it."""
        shared = self._workload.prompt_tokens if self._workload.prefix_sharing else 0.0
        return float(lengths.sum()) - (len(groups) - len(np.unique(groups))) * shared

    async def _train(self, seconds: float) -> None:
        """Train for `seconds` at full speed; slower while a trajectory is open, if both share cores."""
        loop, shared = asyncio.get_running_loop(), self._rates.shared_speed
        if shared == 1:
            await asyncio.sleep(seconds)
            return
        for replica in self._replicas:
            replica.share(shared)
        while seconds > CLOSE:
            started, speed = loop.time(), shared if self._opened else 1.0
            self._opened.turned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds / speed):
                    await self._opened.turned.wait()
            seconds -= speed * (loop.time() - started)
        for replica in self._replicas:
            replica.share(1.0)


class PlannedCheckpoints(Checkpoints):
    """Checkpoints that stop the trainer, and are not written."""

    def __init__(self, interruptions: Interruptions) -> None:
        self._interruptions = interruptions

    @property
    def every(self) -> int:
        return self._interruptions.checkpoint_every

    async def begin(self, train_step: int, *, trainer: Trainer) -> None:
        await asyncio.sleep(self._interruptions.checkpoint_s)

    async def finish(self, state: RunState, *, trainer: Trainer, records: Recorder) -> Path:
        return Path()
