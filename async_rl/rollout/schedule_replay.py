"""Timing of a run's events: as early as possible (`NoReplay`), or as in another run's schedule (`ScheduleReplay`).

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_loop.engine import Engine, GenerateRequest
from agent_loop.loop import AgentLoop, Prompt
from async_rl.inference.notifier import Notifier
from async_rl.rollout.schedule import RunSchedule, ScheduleError, Span, spans_of
from message_queue.contract import Admission
from message_queue.ledger import Drop
from message_queue.tokens import StopReason, TokenOutput
from message_queue.trajectory import PromptGroup, Trajectory


class NoReplay:
    """Calls of the controller before and after each event of a run. Here every event happens as early as possible.

    Prompts are named by their index, weights by the number of optimizer updates they hold.
    """

    free = True
    """Whether events happen as early as possible, so that there is a schedule to record."""

    def resume(
        self, groups: Sequence[PromptGroup], *, train_step: int, cursor: int, updates: Mapping[int, int]
    ) -> None:
        """Continue open `groups`, after `train_step` and the admission of all prompts before `cursor`.

        Args:
            updates: `param_version` -> optimizer updates.
        """

    async def may_admit(self, prompt: int) -> None:
        """Wait until the prompt may be admitted."""

    def admitted(self, admission: Admission) -> None:
        """A group was admitted."""

    async def may_put(self, prompt: int) -> None:
        """Wait until the finished group of a prompt may be put."""

    def taken(self) -> None:
        """A batch was taken."""

    async def may_load(self, update: int) -> None:
        """Wait until the weights may be loaded."""

    def loaded(self, update: int) -> None:
        """Every replica serves the weights."""

    def dropped(self, group: int, *, reason: Drop) -> None:
        """A group was dropped."""

    def finish(self) -> None:
        """Admissions have ended; weights that wait may be loaded."""

    def engine(self, engine: Engine) -> Engine:
        """Engine on which rollouts decode."""
        return engine

    def loop(self, loop: AgentLoop) -> AgentLoop:
        """Agent loop that rolls out prompts."""
        return loop


@dataclass(slots=True)
class _Part:
    """A part of a trajectory, sampled under one version of the weights."""

    update: int
    """Optimizer updates in the weights."""
    left: int
    """Tokens still to be sampled under these weights."""


class ScheduleReplay(NoReplay):
    """Keeps a run to a schedule. A prompt's index is its position in it; see `RunSchedule.order`.

    Args:
        session: (group, number of the trajectory) -> session name of the rollout.
    """

    free = False

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

    # ---- calls of the controller

    def resume(
        self, groups: Sequence[PromptGroup], *, train_step: int, cursor: int, updates: Mapping[int, int]
    ) -> None:
        """See NoReplay."""
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
        """See NoReplay."""
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
