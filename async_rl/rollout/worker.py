"""A rollout worker: runs the agent loops of its groups, stores what they append, and rolls out held-out prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_loop.loop import Prompt
from agent_loop.programs.endpoint.host import Sessions
from agent_loop.timeline import TimeSpan
from agent_loop.tools.tool import PauseGate
from agent_loop.user_errors import Failure
from async_rl.files.rollouts import FailedRollout
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.inference.stub import InProcess
from async_rl.metrics.validation import ValidationRollout
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.group_contents import ContentPlace
from async_rl.rollout.recorded import RolloutLog
from async_rl.rollout.rollouter import DroppedGroup, Rollouter
from async_rl.rollout.teachers import ScoringCounts, Teachers
from async_rl.rollout.validator import Validator
from async_rl.trainer.batch.forest import prefixes_of
from message_queue.errors import JournalError
from message_queue.heads import GroupHead, head_of
from message_queue.ledger import Drop
from message_queue.training_sequence import Content, content_of
from message_queue.trajectory import Admission, Trajectory

APPEND_TURNS = 20  # event-loop iterations for rollouts to append received answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledGroup:
    """Result of the rollouts of a group, without its content."""

    outcome: GroupHead | DroppedGroup
    """Head of a finished group, or a DroppedGroup."""
    generated: int
    """Number of sampled tokens, including those from before the hand-out."""
    time_spans: Sequence[TimeSpan] = ()
    """Spans of all groups of the worker that ended since its last result."""
    scoring: ScoringCounts | None = None
    """What the teachers of the worker did since its last result; None without any."""


RolledPrompts = tuple[Sequence[ValidationRollout], Sequence[TimeSpan]]
"""Rollouts of held-out prompts, and their time spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostReplica:
    """A replica failure detected by a worker."""

    name: str
    """Name of the replica."""
    reason: str
    """Cause of the failure."""
    notes: tuple[str, ...]
    """Further lines for the user, such as the end of its log."""


WorkerEvent = Failure | FailedRollout | LostReplica
"""Failure of a rollout or tool, a rollout that failed at its last try, or a failed replica."""


class RolloutWorker(InProcess):
    """RecoveryLoop on one event loop; each call is made by the dispatcher.

    Args:
        name: name of the worker.
        rollouter: makes a rollouter that writes to the given log; with None it stores nothing.
        validator: rolls out held-out prompts.
        gate: gate before each tool call.
        pool: this worker's view of the replicas.
        replies_s: longest wait of a flush for the replies of replicas.
        sessions: of agent programs; None if the rollouts are made by agent loops.
        teachers: score the rollouts; None without any.
        teacher_pools: teacher -> this worker's view of its replicas.
    """

    def __init__(
        self,
        name: str,
        *,
        rollouter: Callable[[RolloutLog | None], Rollouter],
        validator: Validator,
        gate: PauseGate,
        pool: ReplicaPool,
        replies_s: float,
        sessions: Sessions | None = None,
        teachers: Teachers | None = None,
        teacher_pools: Mapping[str, ReplicaPool] | None = None,
    ) -> None:
        self._teachers, self._teacher_pools = teachers, teacher_pools or {}
        self.name = name
        self._sessions = sessions
        self._replies_s = replies_s
        self._make_rollouter = rollouter
        self._rollouter = rollouter(None)
        self._validator = validator
        self._gate = gate
        self._pool = pool
        self._writer: ContentWriter | None = None
        self._rolls: dict[int, asyncio.Task[object]] = {}
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()

    async def open(self, place: ContentPlace, *, writer: str) -> None:
        """Store content as writer `writer` from now on.

        Raises:
            JournalError: the disk refuses.
        """
        await self.end()
        self._writer = await ContentWriter.open(place.directory, name=writer, run=place.run, fsync=place.fsync)
        self._rollouter = self._make_rollouter(RolloutLog(self._writer))

    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory] = (), *, handout: int
    ) -> tuple[RolledGroup, Content]:
        """Roll out a group; see `Rollouter.roll`. The second value is the content, empty for a dropped group.

        A caller in another process gets a reference to the content.
        """
        task = asyncio.current_task()
        assert task is not None
        self._rolls[admission.group] = task
        try:
            outcome = await self._rollouter.roll(prompt, admission, existing=existing, handout=handout)
        finally:
            del self._rolls[admission.group]
            generated = self._rollouter.tokens.pop(admission.group)
        given: dict[str, Any] = {"generated": generated, "time_spans": self._rollouter.timeline.take()}
        given["scoring"] = None if self._teachers is None else self._teachers.take_counts()
        if isinstance(outcome, DroppedGroup):
            return RolledGroup(outcome=outcome, **given), ()
        head, content = head_of(outcome), content_of(outcome)
        prefixes = await asyncio.to_thread(prefixes_of, [content[number][at] for number, at in head.trained])
        head = replace(head, prefixes=tuple(prefixes))
        return RolledGroup(outcome=head, **given), content

    async def cancel(self, group: int, *, reason: Drop) -> None:
        """Give up a group; see `Rollouter.cancel`."""
        self._rollouter.cancel(group, reason=reason)

    async def stop(self, group: int) -> None:
        """End the rollouts of a group whose caller is gone."""
        if (task := self._rolls.get(group)) is not None:
            task.cancel()

    async def flush(self) -> None:
        """Return once all engine answers so far are stored, except those of a silent replica."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._replies_s):
                await self._pool.busy_seconds()  # these replies come after those of all requests that have ended
        for _ in range(APPEND_TURNS):
            await asyncio.sleep(0)
        await self._rollouter.flush()

    async def forget(self, groups: Collection[int]) -> None:
        """Remove this worker's stored content of groups that will not be read any more."""
        if self._writer is not None:
            await self._writer.forget(groups)

    async def adopt(self, tools_paused: bool, avoided: Collection[str]) -> None:
        """From now on no tool starts while they are paused; avoided replicas get requests only if no other is live."""
        if tools_paused:
            self._gate.pause()
        else:
            self._gate.resume()
        self._pool.avoid(avoided)

    async def validate(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> RolledPrompts:
        """Roll out held-out prompts, each with its index among all rollouts, in round `number`; results in order."""
        return await self._validator.run(prompts, number=number), self._validator.timeline.take()

    async def follow(self, replicas: Sequence[PoolReplica], *, teacher: str | None = None) -> None:
        """Use exactly these replicas from now on, of a teacher if one is given."""
        (self._pool if teacher is None else self._teacher_pools[teacher]).follow(replicas)

    async def events(self) -> list[WorkerEvent]:
        """Events since the last call, as soon as there is one."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def report(self, event: WorkerEvent) -> None:
        """Queue an event for the driver."""
        self._events.put_nowait(event)

    async def end(self) -> None:
        """End all rollouts immediately, and close the files of their content. Idempotent."""
        rolls = list(self._rolls.values())
        for task in rolls:
            task.cancel()
        if rolls:
            await asyncio.wait(rolls)
        if self._sessions is not None:
            await self._sessions.close()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with contextlib.suppress(JournalError):
                await writer.close()
