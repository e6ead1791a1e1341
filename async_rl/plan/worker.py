"""A rollout worker whose rollouts have lengths and durations only.

A trajectory of 300 tokens in 3 turns makes three requests of 100 tokens, with the time of a tool between them. An
aborted request is made again with the tokens that are left, so it may continue at another replica with other weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Prompt
from agent_loop.tools import PauseGate
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.plan.description import Workload
from async_rl.plan.replica import Decode, TracedSpan
from async_rl.rollout.group_contents import ContentPlace
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.worker import RolledGroup, RolledPrompts, WorkerEvent
from message_queue.contract import Admission
from message_queue.heads import GroupHead, SequenceHead, Span, TrajectoryHead, merged_spans
from message_queue.ledger import Drop
from message_queue.tokens import StopReason
from message_queue.training_sequence import GroupContent
from message_queue.trajectory import Trajectory


class GroupLengths:
    """Lengths of each prompt's trajectories, the same for every admission of the prompt.

    A simulated group stands for `scale` groups of the cluster. Those are drawn and sorted by their longest trajectory,
    and of each `scale` neighbours one is simulated: of the last ones the longest, so that the longest trajectory of a
    batch is as long as without the scale. The others are shortened in proportion, so that the mean length is too.

    Args:
        groups: simulated groups of a batch.
        scale: groups that one stands for, at least 1.
    """

    def __init__(self, workload: Workload, *, groups: int, scale: float, seed: int) -> None:
        self._workload = workload
        self._groups = groups
        self._all = max(groups, round(groups * scale))
        self._seed = seed
        self._batch, self._drawn = -1, np.zeros((0, 0), np.int64)

    def of(self, prompt: int) -> NDArray[np.int64]:
        """int64 [trajectories], tokens, at least one per turn."""
        batch, place = divmod(prompt, self._groups)
        if batch != self._batch:
            self._batch, self._drawn = batch, self._draw(batch)
        return self._drawn[place]

    def _draw(self, batch: int) -> NDArray[np.int64]:
        draw, workload = np.random.default_rng((self._seed, batch)), self._workload
        lengths = workload.lengths.sample(draw, (self._all, workload.trajectories_per_group))
        if self._all > self._groups:
            lengths = lengths[lengths.max(axis=1).argsort(kind="stable")]
            edges = np.linspace(0, self._all, self._groups + 1).astype(np.int64)
            chosen = draw.integers(edges[:-1], edges[1:])
            rest, longest = lengths[chosen[:-1]], lengths[-1:]
            rest *= max(0.0, lengths.mean() * self._groups * lengths.shape[1] - longest.sum()) / rest.sum()
            lengths = draw.permutation(np.concatenate([rest, longest]))
        return np.maximum(lengths.round(), workload.turns).astype(np.int64)


class PlannedWorker:
    """See `async_rl.rollout.worker.RolloutWorker`. `spans` gets tools, requests and trajectories."""

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        workload: Workload,
        lengths: GroupLengths,
        seed: int,
        on_open: Callable[[int], None],
        spans: list[TracedSpan],
    ) -> None:
        self.name = "worker-0"
        self._pool = pool
        self._router = ReplicaRouter(pool)
        self._gate = PauseGate()
        self._workload = workload
        self._lengths = lengths
        self._draw = np.random.default_rng(seed)
        self._on_open = on_open
        self._spans = spans
        self._rolls: dict[int, tuple[asyncio.Task[object], list[list[Span]]]] = {}
        self._given_up: dict[int, Drop] = {}

    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory] = (), *, handout: int
    ) -> tuple[RolledGroup, GroupContent]:
        group, lengths = admission.group, self._lengths.of(prompt.index)
        spans: list[list[Span]] = [[] for _ in lengths]
        task = asyncio.current_task()
        assert task is not None
        self._rolls[group] = task, spans
        self._on_open(len(lengths))
        try:
            places = [{"group": group, "trajectory": number} for number in range(len(lengths))]
            rolled = map(self._trajectory, lengths.tolist(), spans, places)
            trajectories = await asyncio.gather(*rolled)
        except asyncio.CancelledError:
            if group not in self._given_up:
                raise
            task.uncancel()
            outcome = _dropped(group, self._given_up.pop(group), spans)
        else:
            outcome = GroupHead(
                group=group,
                prompt=prompt.index,
                admitted_version=admission.admitted_version,
                admitted_update=admission.admitted_update,
                trajectories=tuple(trajectories),
            )
        finally:
            self._on_open(-len(lengths))
            del self._rolls[group]
        return RolledGroup(outcome=outcome, generated=sum(t for each in spans for _, t in each)), ()

    async def roll_held_out(self, trajectories: int, *, number: int) -> None:
        """Roll out trajectories of a validation, which no batch has."""
        lengths = np.maximum(self._workload.lengths.sample(self._draw, (trajectories,)), self._workload.turns)
        places = ({"round": number, "rollout": n} for n in range(trajectories))
        await asyncio.gather(*(self._trajectory(int(t), [], place) for t, place in zip(lengths, places, strict=True)))

    async def _trajectory(self, length: int, spans: list[Span], place: Mapping[str, int]) -> TrajectoryHead:
        """A trajectory; the time spans in it have the arguments `place`."""
        workload, requests, loop = self._workload, 0, asyncio.get_running_loop()
        name, started = "/".join(f"{key}{value}" for key, value in place.items()), loop.time()

        def trace(kind: str, since: float, **args: Any) -> None:
            self._spans.append(TracedSpan(self.name, kind, since, loop.time(), {**place, **args}))

        for turn in range(workload.turns):
            if turn:
                await self._gate.passed()
                called = loop.time()
                await asyncio.sleep(float(workload.tool_s.sample(self._draw, ())))
                trace("tool", called, name="tool")
            until = length * (turn + 1) // workload.turns
            while (done := sum(tokens for _, tokens in spans)) < until:
                context = workload.prompt_tokens + done
                decode = Decode(f"{name}/{requests}", session=name, tokens=until - done, context=context)
                requests, called = requests + 1, loop.time()
                await self._router.generate(cast(GenerateRequest, decode))
                spans += decode.spans
                trace("generate", called, replica=decode.replica, tokens=decode.sampled, aborted=decode.aborted)
        trace("trajectory" if "group" in place else "validation", started)
        total = int(workload.prompt_tokens) + length
        return TrajectoryHead(
            length=total,
            sequences=(SequenceHead(total, merged_spans(spans)),),
            num_segments=requests,
            num_aborts=requests - workload.turns,
            row_bytes=0,
            missing_rows=0,
            reward=0.0,
            stop_reason=StopReason.STOP,
        )

    async def cancel(self, group: int, *, reason: Drop) -> None:
        if group in self._rolls and group not in self._given_up:
            self._given_up[group] = reason
            self._rolls[group][0].cancel()

    async def pause_tools(self) -> None:
        self._gate.pause()

    async def resume_tools(self) -> None:
        self._gate.resume()

    async def avoid(self, names: Collection[str]) -> None:
        self._pool.avoid(names)

    async def open(self, place: ContentPlace, *, writer: str) -> None:
        """There is no content."""

    async def flush(self) -> None:
        """There is no content."""

    async def forget(self, groups: Collection[int]) -> None:
        """There is no content."""

    async def validate(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> RolledPrompts:
        raise NotImplementedError("a plan has no validation")

    async def follow(self, replicas: Sequence[PoolReplica]) -> None:
        """The pool is that of the driver."""

    async def events(self) -> list[WorkerEvent]:
        await asyncio.Event().wait()
        return []

    async def end(self) -> None:
        """The plan ends its tasks."""


def _dropped(group: int, reason: Drop, spans: Sequence[Sequence[Span]]) -> DroppedGroup:
    lengths = tuple((sum(tokens for _, tokens in each), False) for each in spans)
    return DroppedGroup(group=group, reason=reason, segments=sum(map(len, spans)), lengths=lengths)
