"""A rollout worker whose rollouts have lengths and durations only.

A trajectory of 300 tokens in 3 turns makes three requests of 100 tokens, with the time of a tool between them. An
aborted request is repeated with the tokens that are left, so it may continue at another replica with other weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Prompt
from agent_loop.timeline import Timeline, enclosing, timed
from agent_loop.tools.tool import PauseGate
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.inference.stub import InProcess
from async_rl.metrics.validation import ValidationRollout
from async_rl.plan.description import Description, Workload
from async_rl.plan.parts import Decode, OpenTrajectories, Scale
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.worker import RolledGroup, RolledPrompts, WorkerEvent
from message_queue.heads import GroupHead, SequenceHead, Span, TrajectoryHead, merged_spans
from message_queue.ledger import Drop, DropKind
from message_queue.tokens import StopReason
from message_queue.training_sequence import GroupContent
from message_queue.trajectory import Admission, Trajectory

HELD_OUT = ValidationRollout(
    reward=0.0, tokens=0, cut_off=False, error=None, prompt="", response="", min_version=0, max_version=0
)


class GroupLengths:
    """Lengths of each prompt's trajectories, the same for every admission of the prompt.

    A simulated group stands for `scale.groups_of` groups of the cluster. Those are drawn and sorted by their longest
    trajectory, and of each `groups_of` neighbours one is simulated: of the last ones the longest, so that the longest
    trajectory of a batch is as long as without that. The others are shortened in proportion, so that the mean length is
    too.

    """

    def __init__(self, workload: Workload, scale: Scale, *, seed: int) -> None:
        self._workload = workload
        self._groups = scale.groups
        self._all = max(scale.groups, round(scale.groups * scale.groups_of))
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


class PlannedWorker(InProcess):
    """See `async_rl.rollout.worker.RolloutWorker`.

    Args:
        seed: for lengths, tools and failures.
        opened: is told of trajectories that start and end.

    Attributes:
        drawn: group -> lengths of its trajectories, unless it failed. The caller removes a group that has ended.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        description: Description,
        scale: Scale,
        *,
        seed: int,
        opened: OpenTrajectories,
    ) -> None:
        self.name = "worker-0"
        self.drawn: dict[int, NDArray[np.int64]] = {}
        self._pool = pool
        self._router = ReplicaRouter(pool)
        self._gate = PauseGate()
        self._workload = description.workload
        self._failed = description.interruptions.failed
        self._lengths = GroupLengths(description.workload, scale, seed=seed)
        self._draw, self._failures = np.random.default_rng(seed), np.random.default_rng((seed, 1))
        self._opened = opened
        self._timeline = Timeline("rollout", clock=asyncio.get_running_loop().time)
        self._rolls: dict[int, tuple[asyncio.Task[object], list[list[Span]]]] = {}
        self._given_up: dict[int, Drop] = {}

    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory] = (), *, handout: int
    ) -> tuple[RolledGroup, GroupContent]:
        group, lengths = admission.group, self._lengths.of(prompt.index)
        spans: list[list[Span]] = [[] for _ in lengths]
        task = asyncio.current_task()
        assert task is not None
        self._rolls[group], self.drawn[group] = (task, spans), lengths
        self._opened.change(len(lengths))
        try:
            rolled = (
                self._trajectory(int(length), of, "trajectory", group=group, trajectory=number)
                for number, (length, of) in enumerate(zip(lengths, spans, strict=True))
            )
            trajectories = await asyncio.gather(*rolled)
        except asyncio.CancelledError:
            if group not in self._given_up:
                raise
            task.uncancel()
            outcome = _dropped(group, spans, reason=self._given_up.pop(group))
        else:
            outcome = self._ended(admission, trajectories, spans)
        finally:
            self._opened.change(-len(lengths))
            del self._rolls[group]
        generated = sum(tokens for each in spans for _, tokens in each)
        return RolledGroup(outcome=outcome, generated=generated, time_spans=self._timeline.take()), ()

    def _ended(
        self, admission: Admission, trajectories: Sequence[TrajectoryHead], spans: Sequence[Sequence[Span]]
    ) -> GroupHead | DroppedGroup:
        """The head of a group, or its failure."""
        if self._failures.random() < self._failed:
            del self.drawn[admission.group]
            return _dropped(admission.group, spans, reason=Drop(DropKind.ROLLOUT_FAILED, "as often as in the run"))
        return GroupHead(
            group=admission.group,
            prompt=admission.prompt,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=tuple(trajectories),
        )

    async def validate(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> RolledPrompts:
        lengths = np.maximum(self._workload.lengths.sample(self._draw, (len(prompts),)), self._workload.turns)
        await asyncio.gather(
            *(
                self._trajectory(int(length), [], "validation", round=number, rollout=place)
                for length, (place, _) in zip(lengths, prompts, strict=True)
            )
        )
        return [HELD_OUT] * len(prompts), self._timeline.take()

    async def _trajectory(self, length: int, spans: list[Span], kind: str, **place: Any) -> TrajectoryHead:
        """A trajectory; time spans in it have the arguments `place`."""
        workload, requests = self._workload, 0
        session = "/".join(f"{key}{value}" for key, value in place.items())
        with self._timeline.span(kind, **place) as whole, enclosing(whole):
            for turn in range(workload.turns):
                if turn:
                    await self._gate.passed()
                    with timed("tool", name="tool"):
                        await asyncio.sleep(float(workload.tool_s.sample(self._draw, ())))
                until = length * (turn + 1) // workload.turns
                while (done := sum(tokens for _, tokens in spans)) < until:
                    context = workload.prompt_tokens + done
                    decode = Decode(f"{session}/{requests}", session=session, tokens=until - done, context=context)
                    requests += 1
                    with timed("generate") as shown:
                        await self._router.generate(cast(GenerateRequest, decode))
                        shown |= {"replica": decode.replica, "tokens": decode.sampled, "aborted": decode.aborted}
                    spans += decode.spans
            if reward_s := float(workload.reward_s.sample(self._draw, ())):
                with timed("reward"):
                    await asyncio.sleep(reward_s)
        total = max(2, int(workload.prompt_tokens) + length)  # the first token of a sequence is never sampled
        sampled = merged_spans(spans)
        ends = np.cumsum([tokens for _, tokens in sampled]).tolist()
        return TrajectoryHead(
            length=total,
            sequences=(SequenceHead(total, sampled, ends=tuple(total - length + end for end in ends)),),
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

    async def adopt(self, tools_paused: bool, avoided: Collection[str]) -> None:
        if tools_paused:
            self._gate.pause()
        else:
            self._gate.resume()
        self._pool.avoid(avoided)

    async def events(self) -> list[WorkerEvent]:
        await asyncio.Event().wait()
        return []

    async def _nothing(self, *_args: object, **_options: object) -> None:
        """There is no content, and the pool is that of the driver."""

    open = flush = forget = follow = end = _nothing


def _dropped(group: int, spans: Sequence[Sequence[Span]], *, reason: Drop) -> DroppedGroup:
    lengths = tuple((sum(tokens for _, tokens in each), False) for each in spans)
    return DroppedGroup(group=group, reason=reason, segments=sum(map(len, spans)), lengths=lengths)
