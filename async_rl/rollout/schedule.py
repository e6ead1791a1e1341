"""Schedule of a run, without its tokens, and a run that keeps to it.

A line of `schedule.jsonl` lists the groups of a batch, in the order of the trainer. Each entry has the prompt, the
optimizer updates in the weights at its admission, and for each trajectory the number of tokens sampled under each
version of the weights. This covers every effect of admissions, aborts, resumes, publishes and batches on the data. A
run under the schedule therefore trains on tokens of the same prompts, with the same age at the same step. `train_step`
is the last optimizer step of the batch, `optimizer_steps` the number of its optimizer steps
(trainer.updates_per_batch).

`ScheduleReplay` times the events of a run; without it each happens as early as possible:

    admit  a group starts on weights with the same number of updates as its counterpart in the schedule
    decode a trajectory samples as many tokens under each version as its counterpart, then waits for the next version;
           under the last version the number is free
    load   weights are loaded after all tokens of the versions before them were sampled
    put    a group reaches the queue after the batches before its own were taken

A trajectory that ends earlier than its counterpart samples fewer tokens. The replay reproduces aborts without
aborting: a decode requests only the tokens that are left under the current weights, and a segment that ends at this
limit counts as aborted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.engine import Engine, GenerateRequest
from agent_loop.loop import AgentLoop, Prompt
from async_rl.files.jsonl import read_lines
from async_rl.inference.notifier import Notifier
from async_rl.inference.stub import Stub
from async_rl.rollout.prompts import PromptOrder
from message_queue.errors import AsyncRLError
from message_queue.heads import GroupHead, merged_spans
from message_queue.ledger import Drop
from message_queue.queue import TrajectoryQueue
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import Admission, PromptGroup, Trajectory

FILE_NAME = "schedule.jsonl"

Span = tuple[int, int]
"""(optimizer updates in the weights, tokens sampled under them)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGroup:
    """A trained group of the recorded run."""

    group: int
    """Id in the recorded run; ids increase in the order of admission."""
    prompt: int
    """Index of the prompt in the recorded run."""
    admitted_update: int
    """Optimizer updates in the weights at its admission."""
    train_step: int
    """Last optimizer step of its batch."""
    spans: tuple[tuple[Span, ...], ...]
    """Spans of each trajectory, in the order of sampling."""


class ScheduleError(AsyncRLError, ValueError):
    """A schedule cannot be read, or does not fit the run."""


class RunSchedule:
    """The trained groups of a run. A position is an index among them in the order of admission.

    Args:
        groups: in any order.
        updates_per_batch: optimizer steps per batch.

    Raises:
        ScheduleError: train steps with a gap or a late start, or batches of different sizes.
    """

    def __init__(self, groups: Sequence[ScheduledGroup], *, updates_per_batch: int = 1) -> None:
        self.groups = tuple(sorted(groups, key=lambda group: group.group))
        self.updates_per_batch = per_batch = updates_per_batch
        steps, sizes = np.unique([group.train_step for group in self.groups], return_counts=True)
        if not self.groups or steps.tolist() != list(range(per_batch, len(steps) * per_batch + 1, per_batch)):
            raise ScheduleError(
                f"a schedule has the train steps {steps.tolist()}; need {per_batch}, {2 * per_batch}, {3 * per_batch} "
                "and so on"
            )
        if len(set(sizes.tolist())) > 1:
            raise ScheduleError(f"a schedule has batches of {sorted(set(sizes.tolist()))} groups; need one size")
        self.train_steps = len(steps) * per_batch
        self.batch_groups = int(sizes[0])
        self.trajectories_per_group = max(len(group.spans) for group in self.groups)

    def batch_of(self, position: int) -> int:
        """Batch number, from 0, of the group at a position."""
        return self.groups[position].train_step // self.updates_per_batch - 1

    @property
    def max_staleness(self) -> int:
        """Highest staleness of a token at the last optimizer step of its batch."""
        return max(g.train_step - 1 - update for g in self.groups for spans in g.spans for update, _ in spans)

    def order(self, order: PromptOrder) -> PromptOrder:
        """The prompts of the schedule: index i is position i; after the end any prompt, never admitted."""
        prompts = [group.prompt for group in self.groups]
        return lambda index: replace(order(prompts[min(index, len(prompts) - 1)]), index=index)


def read_schedule(path: Path) -> RunSchedule:
    """Read the schedule of a run directory, or a schedule file.

    Raises:
        ScheduleError: the file is missing or malformed; names file, line and cause.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule is {path}, which has no {FILE_NAME} to read: {error}") from error
    groups: list[ScheduledGroup] = []
    per_batch: set[int] = set()
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
            per_batch.add(int(step.get("optimizer_steps", 1)))
            groups += [
                ScheduledGroup(
                    group=int(entry["group"]),
                    prompt=int(entry["prompt"]),
                    admitted_update=int(entry["admitted_update"]),
                    train_step=int(step["train_step"]),
                    spans=tuple(tuple((int(update), int(n)) for update, n in spans) for spans in entry["spans"]),
                )
                for entry in step["groups"]
            ]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"line {number} of {file} is not a train step of a schedule: {error!r}") from error
    if len(per_batch) > 1:
        raise ScheduleError(f"{file}: batches of {sorted(per_batch)} optimizer steps; need one number")
    try:
        return RunSchedule(groups, updates_per_batch=min(per_batch, default=1))
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from error


def scheduled_groups(groups: Sequence[GroupHead], *, version_updates: Mapping[int, int]) -> list[dict[str, Any]]:
    """`groups` of a line of `schedule.jsonl`.

    Args:
        version_updates: `param_version` -> optimizer updates in it.
    """
    return [
        {
            "group": group.group,
            "prompt": group.prompt,
            "admitted_update": group.admitted_update,
            "spans": [spans_of(t.spans, version_updates) for t in group.trajectories if not t.failed],
        }
        for group in groups
    ]


def spans_of(sampled: Iterable[tuple[int, int]], version_updates: Mapping[int, int]) -> tuple[Span, ...]:
    """Tokens sampled under each number of updates, from (`param_version`, tokens) in order."""
    return merged_spans((version_updates[version], tokens) for version, tokens in sampled if tokens)


@dataclass(slots=True)
class _Part:
    """A part of a trajectory, sampled under one version of the weights."""

    update: int
    """Optimizer updates in the weights."""
    left: int
    """Tokens still to be sampled under these weights."""


class ScheduleReplay:
    """Keeps a run to a schedule. A prompt's index is its position in it; see `RunSchedule.order`.

    Args:
        session: (group, number of the trajectory) -> session name of the rollout.
    """

    def __init__(self, schedule: RunSchedule, *, session: Callable[[int, int], str]) -> None:
        self._schedule = schedule
        self._groups = schedule.groups
        self._session = session
        self._changed = Notifier()
        self._served = 0
        self._num_admitted = 0
        self._num_taken = 0
        self._finished = False
        self._parts: dict[str, list[_Part]] = {}

    # ---- calls of the controller, those about the queue by `_ReplayedQueue`

    def queue(self, queue: Stub[TrajectoryQueue], *, updates: Mapping[int, int]) -> Stub[TrajectoryQueue]:
        """A queue whose calls wait for their place in the schedule.

        Args:
            updates: `param_version` -> optimizer updates; may grow.
        """
        return _ReplayedQueue(queue, self, updates)

    def resume(
        self, groups: Sequence[PromptGroup], *, train_step: int, cursor: int, updates: Mapping[int, int]
    ) -> None:
        """Continue open `groups`, after `train_step` and the admission of all prompts before `cursor`.

        Args:
            updates: `param_version` -> optimizer updates.
        """
        self._num_taken, self._num_admitted = train_step // self._schedule.updates_per_batch, cursor
        self._parts.clear()
        for group in groups:
            for number, trajectory in enumerate(group.trajectories):
                if not trajectory.closed:
                    sampled = spans_of(((s.weights.version, len(s)) for s in trajectory.segments), updates)
                    spans = _rest(self._groups[group.prompt].spans[number], sampled)
                    self._start_session(group.group, number, spans, admitted_update=group.admitted_update)

    async def may_admit(self, prompt: int) -> None:
        """Return when the weights of the scheduled admission at this position serve; never after the last position."""
        await self._until(lambda: prompt < len(self._groups) and self._groups[prompt].admitted_update <= self._served)

    def admitted(self, admission: Admission) -> None:
        """A group starts; its trajectories receive their scheduled spans."""
        scheduled = self._groups[admission.prompt]
        self._num_admitted = max(self._num_admitted, admission.prompt + 1)
        for number, spans in enumerate(scheduled.spans):
            self._start_session(admission.group, number, spans, admitted_update=admission.admitted_update)
        self._changed.notify_all()

    async def may_put(self, prompt: int) -> None:
        """Return when all batches before that of the group were taken."""
        await self._until(lambda: self._num_taken >= self._schedule.batch_of(prompt))

    def taken(self) -> None:
        """The next batch was taken."""
        self._num_taken += 1
        self._changed.notify_all()

    async def may_load(self, update: int) -> None:
        """Return when all groups and tokens of weights before `update` were admitted and sampled."""
        await self._until(lambda: self._finished or self._done_before(update))

    def loaded(self, update: int) -> None:
        """All replicas serve weights of `update` updates."""
        self._served = update
        self._changed.notify_all()

    def dropped(self, group: int, *, reason: Drop) -> None:
        """Refuse to continue.

        Raises:
            ScheduleError: always; a batch of the schedule would never be complete.
        """
        raise ScheduleError(f"group {group} was dropped in a run that keeps to a schedule: {reason}")

    def finish(self) -> None:
        """Admissions have ended; weights that wait may be loaded."""
        self._finished = True
        self._changed.notify_all()

    # ---- calls of rollouts

    def engine(self, engine: Engine) -> Engine:
        """An engine that stops each trajectory at its scheduled token counts, and waits for the next weights."""
        return _ReplayedEngine(engine, self)

    def loop(self, loop: AgentLoop) -> AgentLoop:
        """An agent loop that reports the end of each trajectory."""
        return _ReplayedLoop(loop, self)

    async def generate(self, engine: Engine, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine.generate`. Sessions without a schedule pass unchanged."""
        parts = self._parts.get(request.session)
        if parts is None:
            return await engine.generate(request)
        while len(parts) > 1 and parts[0].update < self._served:  # a restart passed them
            parts.pop(0)
        part = parts[0]
        await self._until(lambda: self._served >= part.update)
        budget = request.max_new_tokens if len(parts) == 1 else min(request.max_new_tokens, part.left)
        answer = await engine.generate(replace(request, max_new_tokens=budget))
        part.left -= sum(map(len, answer))
        if len(parts) > 1 and part.left <= 0:
            parts.pop(0)
            self._changed.notify_all()
        last = answer[-1]
        if last.stop_reason is StopReason.LENGTH and budget < request.max_new_tokens:
            answer = [*answer[:-1], replace(last, stop_reason=StopReason.ABORT)]
        return answer

    def ended(self, session: str) -> None:
        """A trajectory has ended."""
        if self._parts.pop(session, None) is not None:
            self._changed.notify_all()

    # ---- inside

    def _start_session(self, group: int, number: int, spans: Sequence[Span], *, admitted_update: int) -> None:
        parts = [_Part(update, tokens) for update, tokens in spans] or [_Part(admitted_update, 0)]
        self._parts[self._session(group, number)] = parts

    def _done_before(self, update: int) -> bool:
        waiting = self._groups[self._num_admitted :]
        if waiting and waiting[0].admitted_update < update:
            return False
        return all(parts[0].update >= update for parts in self._parts.values())

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            await self._changed.wait()


class _ReplayedQueue:
    name = "the queue"

    def __init__(
        self, queue: Stub[TrajectoryQueue], schedule_replay: ScheduleReplay, updates: Mapping[int, int]
    ) -> None:
        self._queue = queue
        self._schedule_replay = schedule_replay
        self._updates = updates

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        replay = self._schedule_replay
        if method == TrajectoryQueue.admit:
            await replay.may_admit(*args)
        elif method == TrajectoryQueue.put:
            await replay.may_put(args[0].prompt)
        elif method == TrajectoryQueue.drop:
            replay.dropped(*args, reason=kwargs["reason"])
        elif method == TrajectoryQueue.loaded:
            replay.loaded(self._updates[args[0]])
        answer = await self._queue.call(method, *args, **kwargs)
        if method == TrajectoryQueue.admit:
            replay.admitted(answer)
        elif method == TrajectoryQueue.take:
            replay.taken()
        return answer


class _ReplayedEngine:
    def __init__(self, engine: Engine, schedule_replay: ScheduleReplay) -> None:
        self._engine = engine
        self._schedule_replay = schedule_replay

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        return await self._schedule_replay.generate(self._engine, request)


class _ReplayedLoop:
    def __init__(self, loop: AgentLoop, schedule_replay: ScheduleReplay) -> None:
        self._loop = loop
        self._schedule_replay = schedule_replay

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)
        self._schedule_replay.ended(session)


def _rest(spans: Sequence[Span], sampled: Sequence[Span]) -> list[Span]:
    """The rest of `spans` after `sampled`: the part under the newest weights in `sampled`, and all later spans.

    `spans` [(0, 10), (1, 5)] and `sampled` [(0, 4)] -> [(0, 6), (1, 5)].
    """
    if not sampled:
        return list(spans)
    now, done = sampled[-1]
    left = [(update, tokens - done if update == now else tokens) for update, tokens in spans if update >= now]
    kept = [(update, tokens) for update, tokens in left if tokens > 0]
    return kept or [(now, 0)]
