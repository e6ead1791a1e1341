"""Typed client side of the actors: every call is bounded, every failure names who failed at what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from torch import Tensor

from agent_loop.engine import GenerateRequest
from agent_loop.timeline import TimeSpan
from async_rl.cluster.actors import Placement, ReplicaActor, TrainerActor
from async_rl.cluster.rpc import BatchingClient
from async_rl.files.logs import log_end
from async_rl.files.rollouts import RecordConfig
from async_rl.inference.replica import EngineReplica, KVPolicy, ReplicaStats
from async_rl.inference.select import EngineConfig, actor_environment
from async_rl.metrics.trace import Trace
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.loss.losses import LossConfig
from async_rl.trainer.model.model import TrainerConfig, rank_environment
from async_rl.trainer.planning import BatchPlan, Planner
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.transport import Backend, Seat, Source, WeightUpdate
from message_queue.errors import AsyncRLError, EngineError, ReplicaLostError
from message_queue.tokens import TokenOutput, WeightVersion

P = ParamSpec("P")
T = TypeVar("T")
_STARTING = ("open_rendezvous", "start")  # calls of a trainer rank that may fail because another one died


class TrainerError(AsyncRLError):
    """A trainer rank failed; names the rank, the call and the cause."""


class TrainerLostError(TrainerError):
    """A trainer rank is dead, silent or did not start; another set of ranks may continue from a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """How to reach a replica; may be sent to other processes."""

    actor: Any
    """Handle of a `ReplicaHost`."""
    name: str
    """Of the replica."""
    timeout_s: float
    """Silence after which the replica counts as dead."""
    log: Path | None = None
    """File with the output of its process; its end becomes a note of an error of a start or a death."""


class ReplicaClient:
    """Calls the `EngineReplica` in another process: an Engine, and the control calls of the publisher.

    A call takes as long as the replica gives signs of life: the replica bounds its control calls by
    `engine.load_timeout_s`, callers bound the rest. If a caller is cancelled, its call is cancelled in the replica too.

    Args:
        address: of the replica.
        client: name of this client, unique among all clients of the replica.

    Raises:
        ReplicaLostError: from every method, if the process is dead or silent.
        EngineError: from every method, if the call failed.
    """

    def __init__(self, address: ReplicaAddress, *, client: str = "driver") -> None:
        self.address = address
        self.name = address.name
        self.node = ""  # id of its node in the Ray cluster; only `start` knows it
        self._log_end = ""
        self._calls: BatchingClient[EngineReplica[Any]] = BatchingClient(
            address.actor,
            name=client,
            server=address.name,
            timeout_s=address.timeout_s,
            lost=ReplicaLostError,
        )

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
        store: Path | None = None,
        followers: Sequence[dict[str, Any]] = (),
    ) -> ReplicaClient:
        """Start the actor and its engine.

        Args:
            options: of the actor.
            variables: of the environment, beside those that the engine needs.
            log: file of its output; each further node has one beside it.
            store: directory of its node to which it brings published versions; None if it reads them where the trainer
                writes them.
            followers: actor options of its further nodes (`engine.nodes`).
        """
        environment = {"env_vars": {**(variables or {}), **actor_environment(config)}}
        actor = ReplicaActor.options(**options, runtime_env=environment, max_restarts=0).remote(log=log)
        client = cls(ReplicaAddress(actor=actor, name=name, timeout_s=config.load_timeout_s, log=log))
        started = actor.start.remote(
            config,
            name=name,
            checkpoint=checkpoint,
            capture_routing=capture_routing,
            force_routing=force_routing,
            capture_support=capture_support,
            store=store,
            followers=followers,
        )
        try:
            await client._answer_of_host("start", started, config.start_timeout_s + config.load_timeout_s)
            client.node = await client._answer_of_host("node", actor.node.remote(), config.start_timeout_s)
        except BaseException:
            ray.kill(actor)  # it holds the place of the next one
            raise
        return client

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine`."""
        return await self._call(EngineReplica.generate, request)

    async def pause(self) -> None:
        await self._call(EngineReplica.pause)

    async def abort(self) -> int:
        return await self._call(EngineReplica.abort)

    async def drain(self) -> None:
        await self._call(EngineReplica.drain)

    async def freeze(self) -> int:
        return await self._call(EngineReplica.freeze)

    async def fetch(self, update: WeightUpdate, seat: Seat | None = None) -> None:
        await self._call(EngineReplica.fetch, update, seat)

    async def offer(self, update: WeightUpdate) -> Source:
        return await self._call(EngineReplica.offer, update)

    async def stage(self, update: WeightUpdate) -> None:
        await self._call(EngineReplica.stage, update)

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        return await self._call(EngineReplica.load, update, kv=kv)

    async def checksum(self) -> str:
        return await self._call(EngineReplica.checksum)

    async def resume(self) -> None:
        await self._call(EngineReplica.resume)

    async def stats(self) -> ReplicaStats:
        return await self._call(EngineReplica.stats)

    async def pid(self) -> int:
        """Process id of the actor."""
        return await self._answer_of_host("pid", self.address.actor.pid.remote(), self.address.timeout_s)

    async def forget_client(self, client: str) -> None:
        """Abort the requests of a client that died; they are gone from the engine when this returns."""
        actor, timeout_s = self.address.actor, self.address.timeout_s
        await self._answer_of_host("forget_client", actor.forget_client.remote(client), timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Close the engine, and end the process whether it answers or not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(EngineReplica.close)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process."""
        ray.kill(self.address.actor)

    async def _call(
        self,
        method: Callable[Concatenate[EngineReplica[Any], P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        try:
            return await self._calls.call(method, *args, **kwargs)
        except EngineError as error:
            self._explain(error)
            raise
        except Exception as cause:
            last_line = str(cause).rstrip().rpartition("\n")[2]  # of a traceback: the error
            raise EngineError(f"{self.name}: {method.__name__} failed: {last_line}") from cause

    async def _answer_of_host(self, what: str, ref: Awaitable[T], timeout_s: float) -> T:
        try:
            return await answer(
                ref, who=self.name, what=what, timeout_s=timeout_s, error=EngineError, dead=ReplicaLostError
            )
        except EngineError as error:
            self._explain(error, starting=what == "start")
            raise

    def _explain(self, error: EngineError, *, starting: bool = False) -> None:
        """Add the end of the log to the error of a replica that did not start or died; it is read once."""
        log = self.address.log
        if log is not None and (starting or isinstance(error, ReplicaLostError)):
            self._log_end = self._log_end or log_end(log)
            error.add_note(self._log_end)


class TrainerClient:
    """All trainer ranks as one; every call goes to every rank and rank 0 answers.

    Args:
        planner: decides which rank trains which sequence of a batch.
        logs: folder with the output of each rank, whose end becomes a note of an error of that rank.
        trace: gets the time spans of the ranks; None for none.

    Attributes:
        pids: process ids of the ranks, once they have started.
    """

    def __init__(
        self,
        actors: list[ActorHandle[Any]],
        *,
        planner: Planner,
        timeout_s: float,
        logs: Path | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._actors = actors
        self._logs = logs
        self._trace = trace or Trace(None)
        self._planner = planner
        self._timeout_s = timeout_s
        self._saving = Path()
        self.pids: list[int] = []

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
        rollouts: Path | None = None,
        record: RecordConfig | None = None,
        delta: bool = False,
        broadcast: bool = False,
        direct: Backend | None = None,
        temperature: float = 1.0,
        trace: Trace | None = None,
    ) -> TrainerClient:
        """Start all ranks; they meet at an address of rank 0.

        Args:
            delta: whether most versions are published as changes of the version before.
            broadcast: whether published versions stay in the memory of the nodes of the ranks, which serve them.
            direct: backend by which the ranks serve versions from their own memory; None if they write files.
            rollouts: folder in which rank 0 writes the recorded groups of each batch; None if there are none.
            record: bounds on these files; None if there are none.
            temperature: sampling temperature of the engine.
            variables: of the environment, beside those that a rank needs.

        Raises:
            TrainerLostError: a rank did not start; all are killed.
        """
        environment = {"env_vars": {**(variables or {}), **rank_environment(config)}}
        actors = [
            TrainerActor.options(**placement.rank(i), runtime_env=environment, max_restarts=0).remote(
                log=_log_of_rank(logs, i)
            )
            for i in range(config.ranks)
        ]
        planner = Planner(config=config, loss=loss)
        client = cls(actors, planner=planner, timeout_s=timeout_s, logs=logs, trace=trace)
        try:
            rendezvous = await client._bounded("open_rendezvous", 0, actors[0].open_rendezvous.remote())
            common = {
                "config": config,
                "optimizer": optimizer,
                "loss": loss,
                "checkpoint": checkpoint,
                "rendezvous": rendezvous,
                "rollouts": rollouts,
                "record": record,
                "delta": delta,
                "broadcast": broadcast,
                "direct": direct,
                "temperature": temperature,
            }
            await client._all("start", [a.start.remote(rank=i, **common) for i, a in enumerate(actors)])
            client.pids = await client._all("pid", [a.pid.remote() for a in actors])
        except BaseException:
            client.kill()  # the ranks that started hold the places of the next ones
            raise
        return client

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        """One batch; see TrainerRank.train. Each rank fetches the content of the groups of its sequences."""
        plan, contents = await asyncio.to_thread(_stored, self._planner.policy, batch)
        return await self._first("train", lambda actor: actor.train.remote(plan, contents))

    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]:
        """One supervised step; see TrainerRank.train_supervised."""
        plan, contents = await asyncio.to_thread(_stored, self._planner.supervised, batch)
        return await self._first("train_supervised", lambda actor: actor.train_supervised.remote(plan, contents))

    async def export(self, directory: Path | str, *, version: int, keep_version: int = 0) -> WeightUpdate:
        """Write the current weights as `version`; remove those before `keep_version` where the ranks have them."""
        return await self._first(
            "export", lambda actor: actor.export.remote(directory, version=version, keep_version=keep_version)
        )

    async def snapshot_weights(self) -> None:
        """Keep a copy of the current weights, which `score` uses until the next call."""
        await self._first("snapshot_weights", lambda actor: actor.snapshot_weights.remote())

    async def score(self, batch: TrainingBatch) -> list[Tensor]:
        """Logprobs of the tokens in the loss under the weights of `snapshot_weights`; see TrainerRank.logprobs."""
        return await self._first("score", lambda actor: actor.score.remote(batch))

    async def remove_updates(self, directory: Path | str) -> None:
        """Remove what `export` wrote."""
        await self._first("remove_updates", lambda actor: actor.remove_updates.remote(directory))

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        """Write a Hugging Face checkpoint; see `async_rl.weights.pretrained.save_pretrained`."""
        await self._first("save_pretrained", lambda actor: actor.save_pretrained.remote(folder, like=like))

    async def save(self, directory: Path) -> None:
        """Copy the state of all ranks, and start to write it; see TrainerRank.save."""
        await self._first("save", lambda actor: actor.save.remote(directory))
        self._saving = directory

    async def saved(self) -> None:
        """Return when this process sees all that the last `save` writes; other calls may run meanwhile.

        Raises:
            TrainerError: a rank failed, or has written to a directory that this process does not see.
        """
        await self._first("saved", lambda actor: actor.saved.remote())
        await asyncio.to_thread(_require_complete, self._saving)

    async def restore(self, directory: Path) -> None:
        await self._first("restore", lambda actor: actor.restore.remote(directory))

    async def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        await self._first("reset_optimizer", lambda actor: actor.reset_optimizer.remote(optimizer))

    async def close(self, *, timeout_s: float, remove_updates: Path | str | None = None) -> None:
        """Close every rank, after `remove_updates` if given; a rank that does not answer is killed."""
        try:
            async with asyncio.timeout(timeout_s):
                if remove_updates is not None:
                    await self.remove_updates(remove_updates)
                await self._first("close", lambda actor: actor.close.remote())
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes of all ranks."""
        for actor in self._actors:
            ray.kill(actor)

    async def _first(self, what: str, call: Callable[[Any], Awaitable[tuple[T, Sequence[TimeSpan]]]]) -> T:
        """Answer of rank 0 to a call of every rank; the time spans of all go into the trace."""
        answers = await self._all(what, [call(actor) for actor in self._actors])
        for rank, (_, spans) in enumerate(answers):
            self._trace.add(f"trainer-{rank}", spans)
        return answers[0][0]

    async def _all(self, what: str, refs: list[Awaitable[T]]) -> list[T]:
        """Answers of all ranks; the first failure is raised at once, though other ranks may still wait for it."""
        tasks = [asyncio.ensure_future(self._bounded(what, i, ref)) for i, ref in enumerate(refs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _bounded(self, what: str, rank: int, ref: Awaitable[T]) -> T:
        who, failed = f"trainer rank {rank}", TrainerLostError if what in _STARTING else TrainerError
        try:
            return await answer(ref, who=who, what=what, timeout_s=self._timeout_s, error=failed, dead=TrainerLostError)
        except TrainerError as error:
            by_node = isinstance(error.__cause__, ObjectLostError)  # which the log of a rank explains no better
            if not by_node and (log := _log_of_rank(self._logs, rank)) is not None:
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
    from async_rl.trainer.state.checkpoint import TrainerCheckpointError, require_complete  # imports megatron

    try:
        require_complete(directory)
    except TrainerCheckpointError as error:
        raise TrainerError(
            f"the ranks have saved a checkpoint that is not complete here: {error}; "
            "give an output_dir that every node shares"
        ) from error


async def answer(
    ref: Awaitable[T], *, who: str, what: str, timeout_s: float, error: type[Exception], dead: type[Exception]
) -> T:
    """What an actor answers within `timeout_s`, else `error` (`dead`: silent or no process) with who failed at what.

    An actor that counts as dead may only be out of reach (`ActorUnavailableError`). Whoever starts another in its place
    kills it before, so that it does not come back.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError as cause:
        raise dead(f"{who}: {what} took longer than {timeout_s} s") from cause
    except RayActorError as cause:
        raise dead(f"{who}: process died during {what}") from cause
    except RayTaskError as cause:
        if isinstance(cause.cause, ObjectLostError):
            raise dead(f"{who}: {what} failed: an object that it needs was on a node that died") from cause.cause
        kind = dead if isinstance(cause.cause, dead) else error
        raise kind(f"{who}: {what} failed: {cause.cause}") from cause.cause  # Ray's own text repeats the traceback
    except ObjectLostError as cause:
        raise dead(f"{who}: its answer to {what} was on a node that died") from cause
