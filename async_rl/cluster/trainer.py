"""The processes of the trainer's ranks: the host of each, and the driver's client of all together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from agent_loop.timeline import TimeSpan
from async_rl.cluster.placement import Placement
from async_rl.cluster.rpc import ActorClient, Ref
from async_rl.compat.garbage import no_collections
from async_rl.files.logs import log_failure, open_log
from async_rl.files.rollouts import FOLDER
from async_rl.metrics.trace import Trace
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.model.families import read_shape
from async_rl.trainer.model.flops import pair_cost
from async_rl.trainer.model.model import LoraConfig, TrainerConfig, rank_environment
from async_rl.trainer.planning import BatchPlan, Planner
from async_rl.trainer.rank_methods import TrainerRank
from message_queue.errors import AsyncRLError

if TYPE_CHECKING:
    from async_rl.config import RunConfig
    from message_queue.training_sequence import GroupContent

P = ParamSpec("P")
T = TypeVar("T")
_method = cast(Any, ray.method)  # whose stubs do not know all of its arguments


class TrainerError(AsyncRLError):
    """A trainer rank failed; names the rank, the call and the cause."""


class TrainerLostError(TrainerError):
    """A trainer rank is dead, silent or did not start; another set of ranks may continue from a checkpoint."""


class TrainerHost:
    """One trainer rank in its process. Calls run one after another in one thread, and `saved` in another one.

    Args:
        log: file for the output of the process; None leaves it to Ray.
    """

    _rank: TrainerRank
    _written: Future[None]

    def __init__(self, *, log: Path | None = None) -> None:
        open_log(log)

    def open_rendezvous(self) -> str:
        """host:port on this node at which ranks can meet while this actor lives."""
        with no_collections():
            from async_rl.trainer.distributed import open_store

        self._store = open_store(ray.util.get_node_ip_address())
        return f"{self._store.host}:{self._store.port}"

    def start(self, config: RunConfig, *, checkpoint: Path, rank: int, rendezvous: str, warm_start: bool) -> int:
        """Build the rank; returns the process id. Rank 0 writes the recorded rollouts of each batch."""
        with log_failure(), no_collections():
            from transformers import AutoTokenizer

            from async_rl.trainer.old_policy.old_policy import OldPolicyConfig
            from async_rl.trainer.rank import TrainerRank  # megatron is only imported in the process of a rank
            from async_rl.trainer.recording import RolloutRecorder

        with log_failure():
            sync, record, recorder = config.sync, config.rollout.record, None
            if rank == 0 and record.steps:
                tokenizer = AutoTokenizer.from_pretrained(checkpoint)
                recorder = RolloutRecorder(config.output_dir.resolve() / FOLDER, config=record, tokenizer=tokenizer)
            serves, dtypes = sync.route in ("broadcast", "direct"), (config.engine.dtype, config.trainer.dtype)
            self._rank = TrainerRank(
                config=trainer_of(config, warm_start=warm_start),
                optimizer=config.warm_start.optimizer if warm_start else config.optimizer,
                loss=config.loss,
                checkpoint=checkpoint,
                rank=rank,
                world_size=config.trainer.ranks,
                rendezvous=rendezvous,
                delta=sync.delta,
                host=ray.util.get_node_ip_address() if serves else None,
                direct=sync.backend if sync.route == "direct" else None,
                old_policy=OldPolicyConfig(
                    max_staleness=config.staleness.max_staleness,
                    bound=lambda noise: config.mismatch.bound(dtypes=dtypes, noise=noise),
                )
                if config.walks_versions
                else None,
                critic=config.critic if config.has_critic else None,
                recorder=recorder,
                teaches=config.teaches,
            )
        return os.getpid()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Any, list[TimeSpan]]:
        """Result of a method of this class, else of the rank; and the time spans that ended since the last call."""
        with log_failure():
            result = (getattr(self, method, None) or getattr(self._rank, method))(*args, **kwargs)
            return result, self._rank.timeline.take()

    def train(self, plan: BatchPlan, contents: Sequence[Ref[GroupContent]]) -> dict[str, float]:
        """See TrainerRank. contents: [G], a reference to the content of each group of the plan."""
        plan = self._with_contents(plan, contents)
        started = time.monotonic()
        metrics = self._rank.train(plan)
        return metrics | self._rank.throughput(plan, seconds=time.monotonic() - started)

    def train_supervised(self, plan: BatchPlan, contents: Sequence[Ref[GroupContent]]) -> dict[str, float]:
        """See TrainerRank; contents as for `train`."""
        return self._rank.train_supervised(self._with_contents(plan, contents))

    def save(self, directory: Path) -> None:
        """Begin to save; `saved` waits for the end."""
        self._written = self._rank.save(directory)

    @_method(concurrency_group="save")
    def saved(self) -> tuple[None, list[TimeSpan]]:
        """Wait until all that `save` began is written; other calls run meanwhile."""
        with log_failure():
            return self._written.result(), []

    def _with_contents(self, plan: BatchPlan, contents: Sequence[Any]) -> BatchPlan:
        """The plan with the content of the groups that this rank trains or records; only these are fetched."""
        groups = plan.groups_of(self._rank.data_rank)
        if self._rank.records:
            groups = sorted({*groups, *plan.batch.recorded.heads})
        with self._rank.timeline.span("fetch", groups=len(groups)):
            fetched: dict[int, Any] = dict(zip(groups, ray.get([contents[group] for group in groups]), strict=True))
        here = [fetched.get(group, ()) for group in range(len(contents))]
        return replace(plan, batch=replace(plan.batch, contents=here))


_HERE = cast(Any, TrainerHost)  # its methods take the place of the rank's
TrainerActor = cast(Any, ray.remote)(concurrency_groups={"save": 1})(TrainerHost)


def trainer_of(config: RunConfig, *, warm_start: bool) -> TrainerConfig:
    """Settings of the ranks; a warm start trains all weights, without adapters."""
    return replace(config.trainer, lora=LoraConfig()) if warm_start else config.trainer


class TrainerClient:
    """All trainer ranks as one; every call goes to every rank and rank 0 answers.

    Args:
        actors: handle of the `TrainerHost` of each rank.
        planner: decides which rank trains which sequence of a batch.
        timeout_s: bound on each call.
        logs: folder with the output of each rank, whose end becomes a note of an error of that rank.
        trace: gets the time spans of the ranks; None for none.

    Attributes:
        pids: process ids of the ranks, once they have started.

    Raises:
        TrainerError: from every call, if it failed on a rank.
        TrainerLostError: from every call, if a rank is dead or silent.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        planner: Planner,
        timeout_s: float,
        logs: Path | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._ranks = [
            ActorClient(
                actor,
                name=f"trainer rank {rank}",
                lost=TrainerLostError,
                failed=TrainerError,
                log=_log_of_rank(logs, rank),
            )
            for rank, actor in enumerate(actors)
        ]
        self._trace = trace or Trace(None)
        self._planner = planner
        self._timeout_s = timeout_s
        self._saving = Path()
        self.pids: list[int] = []

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        *,
        checkpoint: Path,
        placement: Placement,
        logs: Path | None = None,
        trace: Trace | None = None,
        warm_start: bool = False,
    ) -> TrainerClient:
        """Start all ranks; they meet at an address of rank 0.

        Args:
            warm_start: whether they train all weights, with the optimizer of the warm start.

        Raises:
            TrainerLostError: a rank did not start; all are killed.
        """
        trainer = trainer_of(config, warm_start=warm_start)
        environment = {"env_vars": {**config.cluster.rank_env, **rank_environment(trainer)}}
        actors = [
            TrainerActor.options(**placement.rank(i), runtime_env=environment, max_restarts=0).remote(
                log=_log_of_rank(logs, i)
            )
            for i in range(trainer.ranks)
        ]
        cost, walks = pair_cost(read_shape(checkpoint)), config.walks_versions
        teaches = config.teaches is not None
        planner = Planner(config=trainer, loss=config.loss, walks=walks, pair_cost=cost, teaches=teaches)
        client = cls(actors, planner=planner, timeout_s=config.cluster.call_timeout_s, logs=logs, trace=trace)
        failed = TrainerLostError  # also if a rank raises, perhaps because another one died
        try:
            (rendezvous,) = await client._all("open_rendezvous", [actors[0].open_rendezvous.remote()], failed=failed)
            meeting = {"checkpoint": checkpoint, "rendezvous": rendezvous, "warm_start": warm_start}
            starts = [actor.start.remote(config, rank=rank, **meeting) for rank, actor in enumerate(actors)]
            client.pids = await client._all("start", starts, failed=failed)
        except BaseException:
            client.kill()  # the ranks that started hold the places of the next ones
            raise
        return client

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        """One batch; see TrainerRank.train. Each rank fetches the content of the groups of its sequences."""
        return await self.call(_HERE.train, *await asyncio.to_thread(_stored, self._planner.policy, batch))

    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]:
        """One supervised step; see TrainerRank.train_supervised."""
        return await self.call(
            _HERE.train_supervised, *await asyncio.to_thread(_stored, self._planner.supervised, batch)
        )

    async def save(self, directory: Path) -> None:
        """Copy the state of all ranks, and start to write it; see TrainerRank.save."""
        await self.call(_HERE.save, directory)
        self._saving = directory

    async def saved(self) -> None:
        """Return when this process sees all that the last `save` writes; other calls may run meanwhile.

        Raises:
            TrainerError: a rank failed, or has written to a directory that this process does not see.
        """
        await self._all("saved", [rank.actor.saved.remote() for rank in self._ranks])
        await asyncio.to_thread(_require_complete, self._saving)

    async def call(self, method: Callable[Concatenate[TrainerRank, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call every rank; the answer of rank 0. The time spans of all go into the trace."""
        name = method.__name__
        answers = await self._all(name, [rank.actor.call.remote(name, *args, **kwargs) for rank in self._ranks])
        for rank, (_, spans) in enumerate(answers):
            self._trace.add(f"trainer-{rank}", spans)
        return answers[0][0]

    async def close(self, *, timeout_s: float, remove_updates: Path | str | None = None) -> None:
        """Close every rank, after `remove_updates` if given; a rank that does not answer is killed."""
        try:
            async with asyncio.timeout(timeout_s):
                if remove_updates is not None:
                    await self.call(TrainerRank.remove_updates, remove_updates)
                await self.call(TrainerRank.close)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes of all ranks."""
        for rank in self._ranks:
            rank.kill()

    async def _all(self, what: str, refs: Sequence[Ref[T]], *, failed: type[Exception] | None = None) -> list[T]:
        """Answers of all ranks; the first failure is raised at once, though other ranks may still wait for it."""
        answers = [
            asyncio.ensure_future(rank.answer(what, ref, timeout_s=self._timeout_s, failed=failed))
            for rank, ref in zip(self._ranks, refs, strict=False)
        ]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()


def _stored(
    plan: Callable[[TrainingBatch], BatchPlan], batch: TrainingBatch
) -> tuple[Ref[BatchPlan], list[Ref[GroupContent]]]:
    """References to the plan of a batch, stored once for all ranks, and to the content of each of its groups."""
    contents = [each if isinstance(each, ray.ObjectRef) else ray.put(each) for each in batch.contents]
    return cast(Any, ray.put(plan(replace(batch, contents=())))), cast(Any, contents)


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
