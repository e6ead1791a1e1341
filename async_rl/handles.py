"""Typed driver side of the actors: every call is bounded, every failure names who failed at what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from agent_loop.engine import EngineError, GenerateRequest, ReplicaLostError
from async_rl.actors import Placement, ReplicaActor, TrainerActor
from async_rl.batch.training_batch import TrainingBatch
from async_rl.engines.inbox import Answer
from async_rl.engines.replica import KeptKV, ReplicaStats
from async_rl.engines.select import EngineConfig, actor_environment
from async_rl.logs import log_end
from async_rl.train.losses import LossConfig
from async_rl.train.model import TrainerConfig, rank_environment
from async_rl.train.optimizer import OptimizerConfig
from async_rl.train.planning import BatchPlan, Planner
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import TokenOutput, WeightVersion

T = TypeVar("T")
COLLECT_S = 10.0  # longest wait for answers in one call


class TrainerError(RuntimeError):
    """A trainer rank failed; names the rank, the call and the cause."""


class TrainerLostError(TrainerError):
    """A trainer rank is dead or silent; another set of ranks may go on from a checkpoint."""


class ReplicaHandle:
    """Driver side of a replica: an Engine, and the control calls of the publisher.

    Requests made in one turn of the event loop travel in one call, and answers that stand together in another.

    Args:
        log: file with the output of the process; its end becomes a note of an error of a start or a death.
    """

    def __init__(
        self,
        actor: ActorHandle[Any],
        *,
        name: str,
        generate_timeout_s: float,
        control_timeout_s: float,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._log_end = ""
        self._actor = actor
        self._generate_timeout_s = generate_timeout_s
        self._control_timeout_s = control_timeout_s
        self._outbox: list[GenerateRequest] = []
        self._withdrawn: list[str] = []
        self._waiting: dict[str, asyncio.Future[list[TokenOutput]]] = {}
        self._collecting: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        name: str,
        checkpoint: Path,
        capture_routing: bool,
        force_routing: bool = False,
        capture_support: bool = False,
        options: dict[str, Any],
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> ReplicaHandle:
        """Start the actor and its engine.

        variables: of the environment, beside those that the engine needs. log: file of its output.
        """
        environment = {"env_vars": {**(variables or {}), **actor_environment(config)}}
        actor = ReplicaActor.options(**options, runtime_env=environment, max_restarts=0).remote(log=log)
        handle = cls(
            actor,
            name=name,
            generate_timeout_s=config.generate_timeout_s,
            control_timeout_s=config.load_timeout_s,
            log=log,
        )
        started = actor.start.remote(
            config,
            name=name,
            checkpoint=checkpoint,
            capture_routing=capture_routing,
            force_routing=force_routing,
            capture_support=capture_support,
        )
        try:
            await handle._call("start", started, config.start_timeout_s)
        except BaseException:
            ray.kill(actor)  # it holds the place of the next one
            raise
        return handle

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine`; cancelling the caller aborts the request."""
        name = request.request_id
        if name in self._waiting:
            raise EngineError(f"{self.name}: request {name} is already in flight; ids are unique while in flight")
        answer = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._outbox.append(request)
        self._send_soon()
        try:
            async with asyncio.timeout(self._generate_timeout_s):
                return await answer
        except TimeoutError as error:
            raise EngineError(
                f"{self.name}: request {name} took longer than engine.generate_timeout_s={self._generate_timeout_s}"
            ) from error
        finally:
            del self._waiting[name]
            if not answer.done() or answer.cancelled():
                self._withdrawn.append(name)
                self._send_soon()

    async def pause(self) -> None:
        await self._call("pause", self._actor.pause.remote(), self._control_timeout_s)

    async def abort(self) -> int:
        return await self._call("abort", self._actor.abort.remote(), self._control_timeout_s)

    async def drain(self) -> None:
        await self._call("drain", self._actor.drain.remote(), self._generate_timeout_s)

    async def freeze(self) -> int:
        return await self._call("freeze", self._actor.freeze.remote(), self._control_timeout_s)

    async def load(self, update: WeightUpdate, *, kv: KeptKV = "recompute") -> WeightVersion:
        return await self._call("load", self._actor.load.remote(update, kv), self._control_timeout_s)

    async def checksum(self) -> str:
        return await self._call("checksum", self._actor.checksum.remote(), self._control_timeout_s)

    async def resume(self) -> None:
        await self._call("resume", self._actor.resume.remote(), self._control_timeout_s)

    async def stats(self) -> ReplicaStats:
        return await self._call("stats", self._actor.stats.remote(), self._control_timeout_s)

    async def pid(self) -> int:
        """Process id of the actor."""
        return await self._call("pid", self._actor.pid.remote(), self._control_timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Close the engine; a replica that does not answer is killed."""
        if self._collecting is not None:
            self._collecting.cancel()
        try:
            await self._call("close", self._actor.close.remote(), timeout_s)
        finally:
            ray.kill(self._actor)

    # ---- in bulk

    def _send_soon(self) -> None:
        """Hand over what this turn of the event loop brings, and have somebody wait for the answers."""
        if len(self._outbox) + len(self._withdrawn) == 1:
            asyncio.get_running_loop().call_soon(self._send)
        if self._waiting and (self._collecting is None or self._collecting.done()):
            self._collecting = asyncio.create_task(self._collect())

    def _send(self) -> None:
        requests = [r for r in self._outbox if r.request_id in self._waiting]
        unsent = {r.request_id for r in self._outbox}
        withdrawn = [name for name in self._withdrawn if name not in unsent]
        self._outbox, self._withdrawn = [], []
        if requests:
            self._actor.submit.remote(requests)
        if withdrawn:
            self._actor.cancel.remote(withdrawn)

    async def _collect(self) -> None:
        """Hand every answer to its caller while anyone waits; a replica that cannot be asked fails them all."""
        try:
            while self._waiting:
                asked = self._actor.collect.remote(COLLECT_S)
                for name, answer in await self._call("collect", asked, COLLECT_S + self._control_timeout_s):
                    self._settle(name, answer)
        except EngineError as error:
            for name in list(self._waiting):
                self._settle(name, type(error)(str(error)))

    def _settle(self, name: str, answer: Answer) -> None:
        waiting = self._waiting.get(name)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, EngineError):
            self._explain(answer)
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    async def _call(self, what: str, ref: Awaitable[T], timeout_s: float) -> T:
        try:
            return await _answer(
                ref, who=self.name, what=what, timeout_s=timeout_s, error=EngineError, dead=ReplicaLostError
            )
        except EngineError as error:
            self._explain(error, starting=what == "start")
            raise

    def _explain(self, error: EngineError, *, starting: bool = False) -> None:
        """Add the end of the log to the error of a replica that did not start or died; it is read once."""
        if self._log is not None and (starting or isinstance(error, ReplicaLostError)):
            self._log_end = self._log_end or log_end(self._log)
            error.add_note(self._log_end)


class TrainerHandle:
    """All trainer ranks as one; every call goes to every rank and rank 0 answers.

    Args:
        planner: decides which rank trains which sequence of a batch.
        logs: folder with the output of each rank, whose end becomes a note of an error of that rank.
    """

    def __init__(
        self,
        actors: list[ActorHandle[Any]],
        *,
        planner: Planner,
        timeout_s: float,
        logs: Path | None = None,
    ) -> None:
        self._actors = actors
        self._logs = logs
        self._planner = planner
        self._timeout_s = timeout_s

    @classmethod
    async def start(
        cls,
        config: TrainerConfig,
        *,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        checkpoint: Path,
        placement: Placement,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> TrainerHandle:
        """Start all ranks; they meet at an address of rank 0.

        variables: of the environment, beside those that a rank needs.
        """
        environment = {"env_vars": {**(variables or {}), **rank_environment(config)}}
        actors = [
            TrainerActor.options(**placement.rank(i), runtime_env=environment, max_restarts=0).remote(
                log=_log_of_rank(logs, i)
            )
            for i in range(config.ranks)
        ]
        handle = cls(actors, planner=Planner(config=config, loss=loss), timeout_s=timeout_s, logs=logs)
        rendezvous = await handle._bounded("open_rendezvous", 0, actors[0].open_rendezvous.remote())
        common = {
            "config": config,
            "optimizer": optimizer,
            "loss": loss,
            "checkpoint": checkpoint,
            "rendezvous": rendezvous,
        }
        await handle._all("start", [a.start.remote(rank=i, **common) for i, a in enumerate(actors)])
        return handle

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        """One batch; see TrainerRank.train. Each rank fetches the content of the groups of its sequences."""
        plan, contents = await asyncio.to_thread(_stored, self._planner.policy, batch)
        return await self._first("train", lambda actor: actor.train.remote(plan, contents))

    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]:
        """One supervised step; see TrainerRank.train_supervised."""
        plan, contents = await asyncio.to_thread(_stored, self._planner.supervised, batch)
        return await self._first("train_supervised", lambda actor: actor.train_supervised.remote(plan, contents))

    async def export(self, directory: Path, *, version: int, keep_version: int = 0) -> WeightUpdate:
        """Write the current weights as `version`, on the node of rank 0; remove those before `keep_version` there."""
        return await self._first(
            "export", lambda actor: actor.export.remote(directory, version=version, keep_version=keep_version)
        )

    async def hold(self) -> None:
        """Keep a copy of the current weights, which `score` uses until the next `hold`."""
        await self._first("hold", lambda actor: actor.hold.remote())

    async def score(self, batch: TrainingBatch) -> list[Tensor]:
        """Logprobs of the tokens in the loss under the weights of `hold`; see TrainerRank.logprobs."""
        return await self._first("score", lambda actor: actor.score.remote(batch))

    async def remove_updates(self, directory: Path) -> None:
        """Remove what `export` wrote."""
        await self._first("remove_updates", lambda actor: actor.remove_updates.remote(directory))

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        """Write a Hugging Face checkpoint; see `async_rl.weights.pretrained.save_pretrained`."""
        await self._first("save_pretrained", lambda actor: actor.save_pretrained.remote(folder, like=like))

    async def save(self, directory: Path) -> None:
        """Write the state of all ranks; return when this process sees all of it.

        Raises:
            TrainerError: a rank failed, or has written to a directory that this process does not see.
        """
        await self._first("save", lambda actor: actor.save.remote(directory))
        await asyncio.to_thread(_require_complete, directory)

    async def restore(self, directory: Path) -> None:
        await self._first("restore", lambda actor: actor.restore.remote(directory))

    async def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        await self._first("reset_optimizer", lambda actor: actor.reset_optimizer.remote(optimizer))

    async def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return await self._all("pid", [a.pid.remote() for a in self._actors])

    async def close(self, *, timeout_s: float, remove_updates: Path | None = None) -> None:
        """Close every rank, after `remove_updates` if given; a rank that does not answer is killed."""
        try:
            async with asyncio.timeout(timeout_s):
                if remove_updates is not None:
                    await self.remove_updates(remove_updates)
                await self._first("close", lambda actor: actor.close.remote())
        finally:
            for actor in self._actors:
                ray.kill(actor)

    async def _first(self, what: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """Answer of rank 0 to a call of every rank."""
        return (await self._all(what, [call(actor) for actor in self._actors]))[0]

    async def _all(self, what: str, refs: list[Awaitable[T]]) -> list[T]:
        """Answers of all ranks; the first failure is raised at once, though other ranks may still wait for it."""
        tasks = [asyncio.ensure_future(self._bounded(what, i, ref)) for i, ref in enumerate(refs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _bounded(self, what: str, rank: int, ref: Awaitable[T]) -> T:
        who = f"trainer rank {rank}"
        try:
            return await _answer(
                ref, who=who, what=what, timeout_s=self._timeout_s, error=TrainerError, dead=TrainerLostError
            )
        except TrainerError as error:
            if (log := _log_of_rank(self._logs, rank)) is not None:
                error.add_note(log_end(log))
            raise


def _stored(plan: Callable[[TrainingBatch], BatchPlan], batch: TrainingBatch) -> tuple[Any, list[Any]]:
    """References to the plan of a batch and to the content of each of its groups."""
    contents = [each if isinstance(each, ray.ObjectRef) else ray.put(each) for each in batch.contents]
    return ray.put(plan(replace(batch, contents=()))), contents


def _log_of_rank(logs: Path | None, rank: int) -> Path | None:
    return None if logs is None else logs / f"trainer-{rank}.log"


def _require_complete(directory: Path) -> None:
    """Raise TrainerError unless this process sees all that the ranks have saved."""
    from async_rl.train.checkpoint import TrainerCheckpointError, require_complete  # imports megatron

    try:
        require_complete(directory)
    except TrainerCheckpointError as error:
        raise TrainerError(
            f"the ranks have saved a checkpoint that is not complete here: {error}; "
            "give an output_dir that every node shares"
        ) from error


async def _answer(
    ref: Awaitable[T], *, who: str, what: str, timeout_s: float, error: type[Exception], dead: type[Exception]
) -> T:
    """What an actor answers within `timeout_s`, else `error` (`dead`: silent or no process) with who failed at what."""
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError as cause:
        raise dead(f"{who}: {what} took longer than {timeout_s} s") from cause
    except RayActorError as cause:
        raise dead(f"{who}: process died during {what}") from cause
    except RayTaskError as cause:
        kind = dead if isinstance(cause.cause, dead) else error
        raise kind(f"{who}: {what} failed: {cause.cause}") from cause.cause  # Ray's own text repeats the traceback
