"""Rollout workers: how one is built, in this process or in an actor, and the driver side of the actor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError
from transformers import AutoTokenizer

from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.program import ProgramLoop
from agent_loop.tool_use import TOOL_ERRORS
from agent_loop.tools import PauseGate
from agent_loop.user_errors import Failure
from async_rl.cluster.actors import EVENTS_S, RolloutActor
from async_rl.cluster.clients import ReplicaAddress, ReplicaClient
from async_rl.config import ClusterConfig, RunConfig
from async_rl.endpoint.host import Sessions
from async_rl.endpoint.turns import turn_reader
from async_rl.files.logs import log_end
from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.inference.router import ReplicaRouter
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.group_contents import ContentPlace
from async_rl.rollout.recorded import RolloutLog
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.schedule_replay import NoReplay
from async_rl.rollout.task import Task, build_task
from async_rl.rollout.validator import Validator
from async_rl.rollout.worker import LostReplica, RolledGroup, RolledPrompts, RolloutWorker, WorkerEvent
from async_rl.weights.model_info import read_model_info
from message_queue.contract import Admission
from message_queue.ledger import Drop
from message_queue.training_sequence import Content
from message_queue.trajectory import Trajectory

T = TypeVar("T")
GONE_S = 0.05  # time between two looks whether a killed process is dead


def build_worker(
    config: RunConfig, *, name: str, checkpoint: Path, pool: ReplicaPool, schedule_replay: NoReplay | None = None
) -> RolloutWorker:
    """A worker in this process.

    Args:
        checkpoint: its tokenizer is used.
        pool: the replicas, as the worker sees them.
        schedule_replay: keeps the rollouts to a schedule; None lets them run.
    """
    schedule_replay, gate, rollout = schedule_replay or NoReplay(), PauseGate(), config.rollout
    task, engine = build_task(config.task, seed=config.seed), schedule_replay.engine(ReplicaRouter(pool))
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    info = read_model_info(checkpoint)
    sessions = None if task.program is None else Sessions(config.endpoint)

    def build_loop(sampling: SamplingConfig) -> AgentLoop:
        parts: dict[str, Any] = {"engine": engine, "tokenizer": tokenizer, "sampling": sampling}
        if sessions is None:
            return schedule_replay.loop(task.build_loop(**parts, limits=rollout.limits, gate=gate))
        return schedule_replay.loop(_program_loop(task, sessions, **parts, limits=rollout.limits, family=info.family))

    loop = build_loop(rollout.sampling)
    same_sampling = config.validation_sampling == rollout.sampling
    validation_loop = loop if same_sampling else build_loop(config.validation_sampling)
    routing = info.routing if config.captures_routing else None

    def rollouter(log: RolloutLog | None) -> Rollouter:
        return Rollouter(
            loop=loop,
            routing=routing,
            trajectories_per_group=rollout.trajectories_per_group,
            resume_routing=rollout.resume_routing,
            log=log,
            failure=rollout.failure,
            note=lambda failure: worker.report(failure),
            failed=lambda rollout: worker.report(rollout),
            decode=decode if rollout.record.steps else None,
        )

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    validator = Validator(
        loop=validation_loop,
        routing=routing,
        decode=decode,
        resume_routing=rollout.resume_routing,
    )
    worker = RolloutWorker(
        name,
        rollouter=rollouter,
        validator=validator,
        gate=gate,
        pool=pool,
        replies_s=config.cluster.stop_timeout_s / 2,  # the driver waits for a flush as long as for a stop
        sessions=sessions,
    )
    TOOL_ERRORS.handlers = [_Reports(worker)]
    return worker


def _program_loop(
    task: Task,
    sessions: Sessions,
    *,
    engine: Engine,
    tokenizer: Any,
    sampling: SamplingConfig,
    limits: TurnLimits,
    family: str,
) -> ProgramLoop:
    """The loop of a task with an agent program."""
    assert task.program is not None
    return ProgramLoop(
        program=task.program,
        gateway=sessions,
        engine=engine,
        chat=task.chat(tokenizer),
        read=turn_reader(tokenizer, family=family),
        reward=task.reward,
        limits=limits,
        sampling=sampling,
        agents=task.agents,
    )


class _Reports(logging.Handler):
    """Reports the messages of a logger to the driver; a record may have `kind` and `line` of a Failure."""

    def __init__(self, worker: RolloutWorker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        kind, line = fields.get("kind", record.name), fields.get("line", "")
        self._worker.report(Failure(kind=kind, line=line, text=record.getMessage()))


def addresses(replicas: Sequence[PoolReplica]) -> dict[str, ReplicaAddress]:
    """Addresses of replicas that are actors, by name."""
    return {replica.name: cast(ReplicaClient, replica).address for replica in replicas}


class WorkerReplicaPool(ReplicaPool):
    """The replicas as a worker sees them. The driver names them, and hears of those that the worker finds lost."""

    def __init__(self, replicas: Sequence[ReplicaClient]) -> None:
        super().__init__(replicas)
        self.supervise()  # the driver starts others: a request waits for one
        self.report: Callable[[WorkerEvent], None] = lambda _event: None

    def lose(self, member: Member, *, reason: str, notes: Sequence[str] = ()) -> None:
        """See ReplicaPool."""
        if member.lost is None:
            self.report(LostReplica(name=member.name, reason=reason, notes=tuple(notes)))
        super().lose(member, reason=reason, notes=notes)

    def follow(self, replicas: Mapping[str, ReplicaAddress], *, client: str) -> None:
        """Use exactly these, without those that this worker found lost."""
        for member in self.members:
            if member.name not in replicas:
                super().lose(member, reason="the driver has taken it out")
        known = {member.name for member in self.members}
        for name, address in replicas.items():
            if name not in known:
                self.join(ReplicaClient(address, client=client), slot=0)


def build_remote_worker(
    config: RunConfig, *, name: str, checkpoint: Path, replicas: Mapping[str, ReplicaAddress]
) -> tuple[RolloutWorker, WorkerReplicaPool]:
    """A worker in the process of an actor, and the replicas as it sees them."""
    pool = WorkerReplicaPool([ReplicaClient(address, client=name) for address in replicas.values()])
    worker = build_worker(config, name=name, checkpoint=checkpoint, pool=pool)
    pool.report = worker.report
    return worker, pool


class WorkerClient:
    """Driver side of a worker in another process; see `RolloutWorker` for each call.

    Args:
        timeout_s: silence after which the worker counts as lost.
        stop_timeout_s: the same while rollouts end: a tool or reward that blocks the worker does not hold up a stop.
        log: file with the output of the process; its end becomes a note of an error.

    Raises:
        WorkerLostError: from every call, if the worker is dead or silent.
    """

    def __init__(
        self,
        actor: ActorHandle[Any],
        *,
        name: str,
        timeout_s: float,
        stop_timeout_s: float,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._actor = actor
        self._timeout_s = timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._log = log
        self._is_lost = False

    @classmethod
    def create(
        cls, config: ClusterConfig, *, name: str, options: dict[str, Any], log: Path | None = None
    ) -> WorkerClient:
        """Start the process, which imports for seconds. `start` comes before all other calls."""
        actor = RolloutActor.options(**options, max_restarts=0).remote(log=log)
        return cls(actor, name=name, timeout_s=config.call_timeout_s, stop_timeout_s=config.stop_timeout_s, log=log)

    async def start(self, config: RunConfig, *, checkpoint: Path, replicas: Sequence[PoolReplica]) -> None:
        """Build the worker in the process.

        Raises:
            WorkerLostError: the process did not start. Exception: an error of the task.
        """
        started = self._actor.start.remote(config, name=self.name, checkpoint=checkpoint, replicas=addresses(replicas))
        try:
            await self._answer("start", started, timeout_s=config.cluster.start_timeout_s)
        except BaseException:
            ray.kill(self._actor)
            raise

    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory] = (), *, handout: int
    ) -> tuple[RolledGroup, Content]:
        """The second value is a reference to the content, which stays on the node of the worker."""
        rolled, content = cast(list[Any], self._actor.roll.remote(prompt, admission, list(existing), handout=handout))
        try:
            return await self._answer("roll", rolled), content
        except asyncio.CancelledError:
            self._actor.stop.remote(admission.group)
            raise

    async def pid(self) -> int:
        """Process id of the actor."""
        return await self._answer("pid", self._actor.pid.remote(), timeout_s=self._timeout_s)

    async def follow(self, replicas: Sequence[PoolReplica]) -> None:
        """Use exactly these replicas from now on."""
        await self._answer("follow", self._actor.follow.remote(addresses(replicas)), timeout_s=self._timeout_s)

    async def open(self, place: ContentPlace, *, writer: str) -> None:
        await self._answer("open", self._actor.open.remote(place, writer=writer), timeout_s=self._timeout_s)

    async def cancel(self, group: int, *, reason: Drop) -> None:
        await self._answer("cancel", self._actor.cancel.remote(group, reason=reason), timeout_s=self._timeout_s)

    async def flush(self) -> None:
        await self._answer("flush", self._actor.flush.remote(), timeout_s=self._stop_timeout_s)

    async def forget(self, groups: Collection[int]) -> None:
        await self._answer("forget", self._actor.forget.remote(groups), timeout_s=self._timeout_s)

    async def pause_tools(self) -> None:
        await self._answer("pause_tools", self._actor.pause_tools.remote(), timeout_s=self._timeout_s)

    async def resume_tools(self) -> None:
        await self._answer("resume_tools", self._actor.resume_tools.remote(), timeout_s=self._timeout_s)

    async def avoid(self, names: Collection[str]) -> None:
        await self._answer("avoid", self._actor.avoid.remote(names), timeout_s=self._timeout_s)

    async def validate(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> RolledPrompts:
        return await self._answer("validate", self._actor.validate.remote(prompts, number=number))

    async def events(self) -> list[WorkerEvent]:
        return await self._answer("events", self._actor.events.remote(), timeout_s=EVENTS_S + self._timeout_s)

    async def end(self) -> None:
        await self._answer("end", self._actor.end.remote(), timeout_s=self._stop_timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """End the rollouts of a worker that answers, then the process; returns once it is dead."""
        try:
            if not self._is_lost:
                await self.end()
        finally:
            ray.kill(self._actor)
            await self._gone(timeout_s)

    async def _gone(self, timeout_s: float) -> None:
        """Return once Ray knows that the killed process is dead, at the latest after `timeout_s`.

        A process that Ray cannot reach is not dead: it may write and send requests until the kill arrives. Its records
        replace nothing of its successor (see `content_reader`), but its requests would have the same names.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self._may_live():  # noqa: ASYNC110 - Ray has no event for it
                    await asyncio.sleep(GONE_S)

    async def _may_live(self) -> bool:
        try:
            await cast(Awaitable[int], self._actor.pid.remote())
        except RayActorError as error:
            return isinstance(error, ActorUnavailableError)
        return True

    async def _answer(self, what: str, ref: Awaitable[T], *, timeout_s: float | None = None) -> T:
        """The actor's answer. A worker that is silent in a call without a bound is noticed by `events`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await ref
        except TimeoutError as error:
            raise self._lost(f"{self.name}: {what} took longer than {timeout_s} s") from error
        except RayActorError as error:
            raise self._lost(f"{self.name}: process died during {what}") from error
        except RayTaskError as error:
            raise error.cause from None  # Ray raises a subclass that has it
        except ObjectLostError as error:
            raise self._lost(f"{self.name}: its answer to {what} was on a node that died") from error

    def _lost(self, text: str) -> WorkerLostError:
        self._is_lost = True
        error = WorkerLostError(text)
        if self._log is not None:
            error.add_note(log_end(self._log))
        return error
