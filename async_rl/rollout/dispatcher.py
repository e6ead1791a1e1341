"""Dispatches each group to the rollout worker with the fewest groups; another worker continues those of a failed one.

admitted prompt ──> worker with the fewest groups ──> head and content
                          │ dies
                          └──> its records are read ──> the next worker continues with these tokens

Each hand-out of a group has a number. Numbers increase, also across restarts of the run. A worker that was declared
dead but still writes overwrites nothing of its successor; see `content.reader`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol

from agent_loop.loop import Prompt
from agent_loop.user_errors import Failure
from async_rl.files.logs import with_notes
from async_rl.files.rollouts import FailedRollout
from async_rl.inference.notifier import Notifier
from async_rl.inference.pool import Member, ReplicaPool
from async_rl.inference.stub import Stub
from async_rl.inference.supervisor import RestartLimit, SupervisionConfig
from async_rl.metrics.trace import Trace
from async_rl.metrics.validation import ValidationResult, ValidationRollout, validation_result
from async_rl.rollout.content.reader import remove_settled
from async_rl.rollout.group_contents import ContentPlace, StoredContent, next_writer, read_stored, writer_name
from async_rl.rollout.recorded import TokenCount
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.teachers import ScoringCounts
from async_rl.rollout.worker import LostReplica, RolloutWorker
from message_queue.errors import AsyncRLError
from message_queue.heads import GroupHead
from message_queue.ledger import Drop
from message_queue.training_sequence import Content
from message_queue.trajectory import Admission, Trajectory

P = ParamSpec("P")
MAX_HANDOUTS = 1 << 32  # from one `open` of the dispatcher to the next


class WorkerLostError(AsyncRLError):
    """A rollout worker is dead or silent; another one continues its groups."""


Worker = Stub[RolloutWorker]
"""A worker in this process or another one. Each call raises WorkerLostError if the worker is dead or silent."""


class WorkerFactory(Protocol):
    """Starts and ends the processes of workers."""

    async def remove_worker(self, lost: Worker, *, pool: ReplicaPool) -> None:
        """End the process of a failed worker and its requests in the engines of `pool`; then both are gone."""
        ...

    async def start_worker(self, *, slot: int, name: str, pool: ReplicaPool) -> Worker:
        """Start a worker on the engines of `pool` in the place of a failed one."""
        ...


@dataclass(slots=True, eq=False)
class _Member:
    """A worker and its groups."""

    worker: Worker
    """Live worker; for a failed one, the process to remove."""
    slot: int
    """Index among the initial workers; a successor has the same one."""
    groups: dict[int, Admission] = field(default_factory=dict[int, Admission])
    """Groups in its rollouts, by id."""
    may_restart: bool = False
    """Whether the restart of this failed worker was counted; an interrupted restart is counted once."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a failed worker's process has ended, and its requests have left the engines."""


class Dispatcher:
    """Rollouts of a run, on one or more workers.

    Args:
        pool: the replicas; workers in other processes follow every change.
        processes: starts and ends worker processes; None if no worker can fail.
        config: bounds on restarts, for each worker on its own.
        note: called with each text for the user.
        note_failure: called with each failure of a rollout or tool; None for `note` with its text.
        record_failed: called with each rollout that failed at its last try.
        trace: gets the time spans of the workers; None for none.
        teachers: teacher -> its replicas; workers follow every change of these too.

    Attributes:
        tokens: number of generated tokens, by group.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        pool: ReplicaPool,
        processes: WorkerFactory | None = None,
        config: SupervisionConfig | None = None,
        note: Callable[[str], None] = lambda _text: None,
        note_failure: Callable[[Failure], None] | None = None,
        record_failed: Callable[[FailedRollout], None] = lambda _rollout: None,
        trace: Trace | None = None,
        teachers: Mapping[str, ReplicaPool] | None = None,
    ) -> None:
        self._pools: dict[str | None, ReplicaPool] = {None: pool}
        self._pools.update(teachers or {})
        self._scoring = ScoringCounts()
        self._live = [_Member(worker, slot) for slot, worker in enumerate(workers)]
        self._limits = [RestartLimit(config or SupervisionConfig()) for _ in workers]
        self._num_names = len(workers)
        self._processes = processes
        self._note = note
        self._note_failure = note_failure or (lambda failure: note(failure.text))
        self._record_failed = record_failed
        self._trace = trace or Trace(None)
        self._pool = pool
        self._followed: dict[str | None, tuple[Member, ...]] = {}  # replicas known to all workers, by teacher
        self._lost: asyncio.Queue[tuple[_Member, dict[int, Admission], WorkerLostError]] = asyncio.Queue()
        self._recovered: dict[int, Sequence[Trajectory]] = {}  # content of groups of failed workers, once read
        self._changed = Notifier()
        self._place: ContentPlace | None = None
        self._num_writers = self._num_awaited = 0
        self._handouts = itertools.count()
        self._tools_paused = False
        self._avoided: frozenset[str] = frozenset()
        self._ending = asyncio.Event()
        self._cancels: set[asyncio.Task[None]] = set()
        self.tokens = TokenCount()

    async def open(self, place: ContentPlace, *, live: Collection[int]) -> None:
        """Have each worker store content at `place`, in its own files. Files of settled groups are removed.

        Args:
            live: groups that may still be read.

        Raises:
            JournalError: the disk refuses.
        """
        self._place, self.tokens = place, TokenCount()
        self._ending.clear()
        self._num_writers = await asyncio.to_thread(next_writer, place.directory)
        self._handouts = itertools.count(self._num_writers * MAX_HANDOUTS)  # above those of all earlier writers
        names = [writer_name(self._num_writers + number) for number in range(len(self._live))]
        self._num_writers += len(names)
        opened = zip(self._live, names, strict=True)
        await asyncio.gather(*(self._call(each, RolloutWorker.open, place, writer=name) for each, name in opened))
        await asyncio.to_thread(remove_settled, place.directory, live, keep=set(names))

    async def roll(
        self, prompt: Prompt, admission: Admission, *, existing: Sequence[Trajectory] = ()
    ) -> tuple[GroupHead | DroppedGroup, Content]:
        """Roll out a group; see `Rollouter.roll`. If its worker fails, another one continues from the records.

        Returns:
            Head and content of a finished group, or a DroppedGroup and empty content.
        """
        group = admission.group
        while True:
            member = await self._least()
            member.groups[group] = admission
            try:
                rolled, content = await member.worker.call(
                    RolloutWorker.roll, prompt, admission, existing, handout=next(self._handouts)
                )
            except WorkerLostError as error:
                self._lose(member, error)
                existing = await self._stored(group)
            else:
                self.tokens.add(group, rolled.generated)
                self._scoring += rolled.scoring or ScoringCounts()
                self._trace.add(member.worker.name, rolled.time_spans)
                return rolled.outcome, content
            finally:
                member.groups.pop(group, None)

    def take_scoring(self) -> dict[str, float]:
        """Metrics of the teachers since the last call; none without teachers."""
        counts, self._scoring = self._scoring, ScoringCounts()
        return counts.metrics() if len(self._pools) > 1 else {}

    def cancel(self, group: int, *, reason: Drop) -> None:
        """Give up a group in rollout; its `roll` returns a DroppedGroup. No effect on other groups."""
        for member in self._live:
            if group in member.groups:
                cancel = asyncio.create_task(self._call(member, RolloutWorker.cancel, group, reason=reason))
                self._cancels.add(cancel)
                cancel.add_done_callback(self._cancels.discard)

    async def flush(self) -> None:
        """Return once all answers of engines so far are stored."""
        await self._all(RolloutWorker.flush)

    async def forget(self, groups: Collection[int]) -> None:
        """Remove the content of groups that will not be read any more."""
        await self._all(RolloutWorker.forget, groups)

    async def pause(self) -> None:
        """No tool starts until `resume`."""
        self._tools_paused = True
        await self._control()

    async def resume(self) -> None:
        """Tools may start from now on."""
        self._tools_paused = False
        await self._control()

    async def avoid(self, replicas: Collection[str]) -> None:
        """Return once every worker sends requests to these replicas only if no other is live."""
        self._avoided = frozenset(replicas)
        await self._control()

    def end_soon(self) -> None:
        """Note that `end` follows: `pause`, `resume` and `avoid` wait for a blocked worker as long as `flush` does."""
        self._ending.set()

    async def validate(
        self, held_out: Mapping[str, Sequence[Prompt]], number: int, *, samples: int = 1
    ) -> ValidationResult:
        """Roll out held-out prompts in round `number`, in equal parts on all workers.

        Args:
            held_out: name of a set -> its prompts.
            samples: rollouts of each prompt.

        Raises:
            ExceptionGroup: of EngineError and ContractError: the engines cannot serve.
        """
        prompts = [prompt for each in held_out.values() for prompt in each for _ in range(samples)]
        placed, count = list(enumerate(prompts)), max(1, len(self._live))
        parts = [part for first in range(count) if (part := placed[first::count])]
        rounds = await asyncio.gather(*(self._validate(part, number, slot) for slot, part in enumerate(parts)))
        found = {place: rollout for part in map(zip, parts, rounds) for (place, _), rollout in part}
        ordered = (found[place] for place in range(len(prompts)))
        return validation_result(
            {name: [list(itertools.islice(ordered, samples)) for _ in each] for name, each in held_out.items()}
        )

    async def watch(self) -> None:
        """Receive the reports of workers, and replace failed ones, forever.

        Raises:
            WorkerLostError: no worker is left, and none may be started.
        """
        async with asyncio.TaskGroup() as tasks:
            for teacher, pool in self._pools.items():
                tasks.create_task(self._follow(pool, teacher))
            for member in self._live:
                tasks.create_task(self._listen(member))
            while True:
                member, groups, error = await self._lost.get()
                tasks.create_task(self._replace(member, groups, error, tasks))

    async def end(self) -> None:
        """End all rollouts immediately, and close the files of their content."""
        await self._all(RolloutWorker.end)
        self._recovered.clear()
        for _ in range(self._lost.qsize()):
            member, _, error = self._lost.get_nowait()
            self._lost.put_nowait((member, {}, error))  # a restart reads the groups

    # ---- inside

    async def _least(self) -> _Member:
        while not self._live:
            await self._changed.wait()
        return min(self._live, key=lambda member: len(member.groups))

    async def _stored(self, group: int) -> Sequence[Trajectory]:
        """The stored trajectories of a group whose worker failed."""
        while group not in self._recovered:
            await self._changed.wait()
        return self._recovered.pop(group)

    async def _validate(
        self, prompts: Sequence[tuple[int, Prompt]], number: int, slot: int
    ) -> Sequence[ValidationRollout]:
        while True:
            await self._least()
            member = self._live[slot % len(self._live)]
            try:
                rollouts, spans = await member.worker.call(RolloutWorker.validate, prompts, number=number)
            except WorkerLostError as error:
                self._lose(member, error)
                await member.gone.wait()  # the next worker makes requests of the same names
            else:
                self._trace.add(member.worker.name, spans)
                return rollouts

    def _lose(self, member: _Member, error: WorkerLostError) -> None:
        """Remove a worker permanently; `watch` replaces it."""
        if member in self._live:
            self._live.remove(member)
            self._lost.put_nowait((member, dict(member.groups), error))
            groups = f"{len(member.groups)} groups continue at another"
            self._note(f"rollout worker {member.worker.name} is lost, {groups}: {with_notes(error)}")

    async def _listen(self, member: _Member) -> None:
        while True:
            try:
                events = await member.worker.call(RolloutWorker.events)
            except WorkerLostError as error:
                self._lose(member, error)
                return
            for event in events:
                match event:
                    case LostReplica():
                        self._lose_replica(event)
                    case FailedRollout():
                        self._record_failed(event)
                    case Failure():
                        self._note_failure(event)

    def _lose_replica(self, lost: LostReplica) -> None:
        for pool in self._pools.values():
            for replica in pool.members:
                if replica.name == lost.name:
                    pool.lose(replica, reason=lost.reason, notes=lost.notes)

    async def _follow(self, pool: ReplicaPool, teacher: str | None) -> None:
        """Have the workers use the live replicas."""
        while True:
            live = pool.live_or_none
            if live == self._followed.get(teacher):
                await pool.changed.wait()
            else:
                self._followed[teacher] = live
                await self._all(RolloutWorker.follow, [member.replica for member in live], teacher=teacher)

    async def _replace(
        self, lost: _Member, groups: Mapping[int, Admission], error: WorkerLostError, tasks: asyncio.TaskGroup
    ) -> None:
        """Start a worker in place of a failed one. The old process ends before its files are read."""
        name = lost.worker.name
        if self._processes is None:
            raise error
        self._num_awaited += 1
        try:
            await self._processes.remove_worker(lost.worker, pool=self._pool)
            lost.gone.set()
            await self._read(groups)
            member = await self._start_successor(self._processes, lost)
        except asyncio.CancelledError:
            self._lost.put_nowait((lost, {}, error))  # for the next `watch`
            raise
        finally:
            self._num_awaited -= 1
        if member is not None:
            tasks.create_task(self._listen(member))
            return
        self._note(f"rollout worker {name} is not restarted (supervision.max_restarts)")
        if not self._live and not self._num_awaited:
            raise error

    async def _start_successor(self, processes: WorkerFactory, lost: _Member) -> _Member | None:
        """A live worker in the place of a failed one; None if no restart is left."""
        while lost.may_restart or self._limits[lost.slot].allows_one_more():
            lost.may_restart = True
            name = f"{lost.worker.name.rpartition('-')[0]}-{self._num_names}"
            self._num_names += 1
            try:
                worker = await processes.start_worker(slot=lost.slot, name=name, pool=self._pool)
                lost.worker = worker  # if this is cancelled, the next `watch` removes it
                if self._place is not None:
                    number, self._num_writers = self._num_writers, self._num_writers + 1
                    await worker.call(RolloutWorker.open, self._place, writer=writer_name(number))
                await self._adopt_publish(worker)
            except WorkerLostError as error:
                self._note(f"rollout worker {name} did not start: {with_notes(error)}")
                lost.may_restart = False
                await processes.remove_worker(lost.worker, pool=self._pool)
                continue
            self._live.append(member := _Member(worker, lost.slot))
            self._followed.clear()
            for pool in self._pools.values():
                pool.changed.notify_all()
            self._changed.notify_all()
            return member
        return None

    async def _adopt_publish(self, worker: Worker) -> None:
        """Have a new worker pause its tools and avoid replicas, as the others do; both may change meanwhile."""
        adopted = False, frozenset[str]()
        while adopted != (wanted := (self._tools_paused, self._avoided)):
            await worker.call(RolloutWorker.adopt, *wanted)
            adopted = wanted

    async def _read(self, groups: Mapping[int, Admission]) -> None:
        stored = StoredContent() if self._place is None else await read_stored(self._place, groups.values())
        for line in stored.notes:
            self._note(line)
        for group in groups:
            self._recovered[group] = stored.groups[group].trajectories if group in stored.groups else ()
        self._changed.notify_all()

    async def _all(
        self, method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, None]], *args: P.args, **kw: P.kwargs
    ) -> None:
        """Call all live workers."""
        await asyncio.gather(*(self._call(member, method, *args, **kw) for member in list(self._live)))

    async def _control(self) -> None:
        """Have all live workers adopt a publish; after `end_soon`, one that does not answer a `flush` is lost."""
        state = self._tools_paused, self._avoided

        async def ask(member: _Member) -> None:
            answer = asyncio.create_task(self._call(member, RolloutWorker.adopt, *state))
            ending = asyncio.create_task(self._ending.wait())
            try:
                await asyncio.wait((answer, ending), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    await self._call(member, RolloutWorker.flush)
                if answer.done() or member in self._live:
                    await answer
            finally:
                answer.cancel()
                ending.cancel()

        await asyncio.gather(*map(ask, list(self._live)))

    async def _call(
        self,
        member: _Member,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Return once a worker has answered or failed."""
        try:
            await member.worker.call(method, *args, **kwargs)
        except WorkerLostError as error:
            self._lose(member, error)
