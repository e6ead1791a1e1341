"""Ray actors of a run and their placement; `clients.py` and the other modules here have the typed driver side of each.

The classes are plain and tested without Ray; an actor only wraps one. Queue and replica are async actors: Ray runs up
to 1,000 messages at a time on one event loop. Each client has one waiting message and one that brings calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_loop.boundary import USER_THREADS
from async_rl.cluster.queue_host import QueueHost
from async_rl.cluster.rpc import BatchingServer, Call, Reply
from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.files.logs import log_failure, open_log
from async_rl.inference.nodes import NodePlace, NodeProcess, bring, reserve_ports
from async_rl.inference.replica import EngineReplica
from async_rl.inference.select import EngineConfig, start_node, start_replica
from async_rl.weights.remote import download, driver_problem, remove, upload
from async_rl.weights.store import LocalStore, remove_unused
from async_rl.weights.transport import Backend, Seat, UpdateError, WeightUpdate
from message_queue.errors import AsyncRLError, EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from agent_loop.loop import Prompt
    from agent_loop.timeline import TimeSpan
    from async_rl.cluster.clients import ReplicaAddress
    from async_rl.cluster.rollout_workers import WorkerReplicaPool
    from async_rl.config import ClusterConfig, RunConfig
    from async_rl.files.rollouts import RecordConfig
    from async_rl.rollout.group_contents import ContentPlace
    from async_rl.rollout.worker import RolledGroup, RolledPrompts, RolloutWorker, WorkerEvent
    from async_rl.trainer.batch.training_batch import TrainingBatch
    from async_rl.trainer.loss.losses import LossConfig
    from async_rl.trainer.model.model import TrainerConfig
    from async_rl.trainer.planning import BatchPlan
    from async_rl.trainer.state.optimizer import OptimizerConfig
    from message_queue.contract import Admission
    from message_queue.ledger import Drop
    from message_queue.training_sequence import GroupContent
    from message_queue.trajectory import Trajectory

T = TypeVar("T")
_remote, _method = cast(Any, ray.remote), cast(Any, ray.method)  # whose stubs do not know all of their arguments
MAX_ROLLOUTS = 1 << 16  # concurrent calls of a rollout worker: one per group that it rolls out
EVENTS_S = 10.0  # longest wait of a rollout worker for something to report
NODES_S = 5.0  # time between two looks at the nodes of a run


def start_ray(config: ClusterConfig) -> None:
    """Join the cluster at `address`, or start one on this machine, also if another one runs here."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # actors without a reserved GPU see none
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the actors do the work: nothing else should go first
    # The GCS would keep an event of each call, for a dashboard that is not started: 130 kB for each train step.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    if config.address is not None:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        return
    ray.init(
        address="local",
        num_cpus=config.num_cpus,
        object_store_memory=config.object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


class PlacementError(AsyncRLError):
    """The run does not fit the nodes of the cluster; names the field and the way out."""


def by_node(nodes: Sequence[str]) -> list[int]:
    """Places in `nodes`, those of one node next to each other.

    a b a b gives 0 2 1 3.
    """
    return sorted(range(len(nodes)), key=lambda place: nodes.index(nodes[place]))


class Placement:
    """One bundle per actor: trainer ranks first, then replicas, then rollout workers, then the queue.

    A replica over several nodes has a bundle for each, one after another, with its part of the CPUs and GPUs. Trainer
    ranks take their bundles in the order of the nodes once these are known, as Ray does not place bundle by bundle.

    Args:
        gpus_per_replica: of one replica; see ClusterConfig.
        nodes_per_replica: see `engine.nodes`.

    Raises:
        PlacementError: an actor needs more than any node has.
        TimeoutError: from `ready`, when the cluster cannot hold the run.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        ranks: int,
        replicas: int,
        workers: int,
        gpus_per_replica: float,
        nodes_per_replica: int = 1,
    ) -> None:
        rank = _without_zero({"CPU": config.cpus_per_rank, "GPU": config.gpus_per_rank})
        self._replica_cpus = config.cpus_per_replica / nodes_per_replica
        self._replica_gpus = gpus_per_replica / nodes_per_replica
        replica = _without_zero({"CPU": self._replica_cpus, "GPU": self._replica_gpus})
        if ranks:
            _require_node(rank, fields="cluster.cpus_per_rank and gpus_per_rank")
        _require_node(
            replica,
            fields="cluster.cpus_per_replica and gpus_per_replica (engine.tensor_parallel x data_parallel) for each of "
            "engine.nodes",
        )
        self._ranks, self._nodes_per_replica = ranks, nodes_per_replica
        self._workers = ranks + replicas * nodes_per_replica  # first bundle of a rollout worker
        self._queue = self._workers + workers
        self._rank_bundles = list(range(ranks))
        self._config = config
        self._bundles = [*[rank] * ranks, *[replica] * (self._workers - ranks), *[{"CPU": 1.0}] * (workers + 1)]
        self._group: PlacementGroup = placement_group(self._bundles, strategy=config.strategy)

    def shortage(self) -> str | None:
        """Resources of the run that the nodes of the cluster do not have together; None if they have all."""
        asked: dict[str, float] = {}
        for bundle in self._bundles:
            for name, amount in bundle.items():
                asked[name] = asked.get(name, 0.0) + amount
        there: Mapping[str, float] = ray.cluster_resources()
        missing = [
            f"{amount:g} {name}, of which the nodes have {there.get(name, 0.0):g}"
            for name, amount in asked.items()
            if amount > there.get(name, 0.0) + 1e-6
        ]
        return f"the run needs {' and '.join(missing)}" if missing else None

    async def ready(self) -> None:
        """Wait until the cluster has reserved every bundle."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await cast(Awaitable[object], self._group.ready())
        except TimeoutError as error:
            raise TimeoutError(
                f"the cluster has {ray.cluster_resources()} and cannot hold {self._bundles} within "
                f"cluster.start_timeout_s={self._config.start_timeout_s}; ask for fewer ranks or replicas"
            ) from error
        nodes = self._nodes()
        self._rank_bundles = by_node([nodes[bundle] for bundle in range(self._ranks)])

    def split_groups(self, size: int) -> int:
        """Groups of `size` consecutive trainer ranks that are on more than one node; call it after `ready`."""
        nodes = self._nodes()
        ranks = [nodes[bundle] for bundle in self._rank_bundles]
        return sum(len({*ranks[first : first + size]}) > 1 for first in range(0, len(ranks), size))

    def require_shared_memory(self) -> None:
        """Check that all ranks and replicas are on one node, in whose shared memory the ranks write the weights.

        Raises:
            PlacementError: one is not.
        """
        nodes = self._nodes()
        away = [self._name(i) for i in range(self._workers) if nodes[i] != nodes[0]]
        if away:
            raise PlacementError(
                f"sync.route is 'memory', but {len(away)} of the ranks and replicas ({', '.join(away[:3])}) are on "
                "other nodes than trainer rank 0, whose shared memory they cannot use; set sync.route=broadcast, or "
                "sync.route=folder sync.directory=<a directory that all nodes see>"
            )

    async def require_visible(self, directory: Path, *, field: str) -> None:
        """Check that every node of the run sees what this process writes to `directory`, which exists here.

        Args:
            field: of the config, for the error.

        Raises:
            PlacementError: a node does not.
        """
        here = ray.get_runtime_context().get_node_id()
        bundles = {node: bundle for bundle, node in self._nodes().items() if node != here}
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
            calls = [
                _exists.options(**self._options(bundle, cpus=0.0, gpus=0.0)).remote(Path(probe.name))
                for bundle in bundles.values()
            ]
            seen: list[bool] = await asyncio.gather(*calls)
        if blind := [node for node, sees in zip(bundles, seen, strict=True) if not sees]:
            raise PlacementError(
                f"{field} is {directory}, which node {blind[0]} of the cluster does not see ({len(blind)} of "
                f"{len(bundles) + 1} nodes); give a directory that all nodes share"
            )

    async def require_store(self, url: str, *, field: str) -> None:
        """Check that every node of the run reads, writes and removes objects below `url`.

        Args:
            field: of the config, for the error.

        Raises:
            PlacementError: a node does not, or not within `cluster.start_timeout_s`.
        """
        bundles = {node: bundle for bundle, node in self._nodes().items()}
        probes = {node: f"{url}/.probe-{uuid.uuid4().hex}" for node in bundles}
        for step in (_write_probe, _read_probes, _remove_probe):
            calls = {
                node: step.options(**self._options(bundle, cpus=0.0, gpus=0.0), max_retries=0).remote(
                    probes[node], list(probes.values())
                )
                for node, bundle in bundles.items()
            }
            answers: dict[str, asyncio.Future[str]] = {
                node: asyncio.ensure_future(call) for node, call in calls.items()
            }
            _, late = await asyncio.wait(answers.values(), timeout=self._config.start_timeout_s)
            for node, answer in answers.items():
                if answer in late:
                    answer.cancel()
                    ray.cancel(calls[node], force=True)
                    problem = f"it did not answer within cluster.start_timeout_s={self._config.start_timeout_s}"
                else:
                    problem = await answer
                if problem:
                    raise PlacementError(
                        f"{field} is {url}, which node {_address(node)} cannot use: {problem}; give its driver and its "
                        "credentials to all nodes in the way that fsspec documents, or give a directory that all "
                        "nodes share"
                    )

    async def wait_for_node(self, options: dict[str, Any], *, timeout_s: float) -> None:
        """Wait until the place of an actor is on a node that lives.

        Ray detects the death of a node only after some seconds; an actor that is started there before that fails.

        Args:
            options: of the actor.

        Raises:
            TimeoutError: its node died, and no other has room.
        """
        call = _answer.options(**options | {"num_cpus": 0.0, "num_gpus": 0.0}, max_retries=-1).remote()
        try:
            async with asyncio.timeout(timeout_s):
                await call
        finally:
            ray.cancel(call)

    async def watch(self, note: Callable[[str], None]) -> None:
        """Report nodes that leave the cluster, with the places of the run on them, and places without a node; forever.

        Ray moves a place to another node as soon as one has room for it; the start of an actor waits for that.
        """
        known = self._nodes()
        while True:
            await asyncio.sleep(NODES_S)
            nodes = self._nodes()
            left = {bundle: node for bundle, node in known.items() if node and nodes[bundle] != node}
            for node in dict.fromkeys(left.values()):
                places = ", ".join(self._name(bundle) for bundle in sorted(left) if left[bundle] == node)
                note(f"node {_address(node)} left the cluster; the run had there: {places}")
            for bundle in sorted(nodes):
                if known[bundle] and not nodes[bundle]:
                    asked = f"{self._name(bundle)} {self._bundles[bundle]}"
                    note(f"no node has room for {asked}; its restart waits for one")
                elif nodes[bundle] and nodes[bundle] != known[bundle]:
                    note(f"{self._name(bundle)} has a place on node {_address(nodes[bundle])}")
            known = nodes

    def _nodes(self) -> dict[int, str]:
        """Bundle -> node id; empty if its node died and no other has room."""
        return placement_group_table(self._group)["bundles_to_node_id"]

    def _name(self, bundle: int) -> str:
        """Which actor a bundle is for; it keeps the number when the actor is replaced."""
        if bundle < self._ranks:
            return f"trainer rank {self._rank_bundles.index(bundle)}"
        if bundle < self._workers:
            slot, node = divmod(bundle - self._ranks, self._nodes_per_replica)
            return f"replica slot {slot}" if self._nodes_per_replica == 1 else f"replica slot {slot} node {node}"
        if bundle < self._queue:
            return f"rollout worker slot {bundle - self._workers}"
        return "the queue"

    def rank(self, index: int) -> dict[str, Any]:
        """Actor options of trainer rank `index`."""
        bundle = self._rank_bundles[index]
        return self._options(bundle, cpus=self._config.cpus_per_rank, gpus=self._config.gpus_per_rank)

    def replica(self, index: int) -> list[dict[str, Any]]:
        """Actor options of each node of replica `index`."""
        first = self._ranks + index * self._nodes_per_replica
        return [
            self._options(bundle, cpus=self._replica_cpus, gpus=self._replica_gpus)
            for bundle in range(first, first + self._nodes_per_replica)
        ]

    def worker(self, index: int) -> dict[str, Any]:
        """Actor options of rollout worker `index`."""
        return self._options(self._workers + index, cpus=1.0, gpus=0.0)

    def queue(self) -> dict[str, Any]:
        """Actor options of the queue."""
        return self._options(self._queue, cpus=1.0, gpus=0.0)

    def _options(self, bundle: int, *, cpus: float, gpus: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


# ---- queue

QueueActor = _remote(QueueHost)


# ---- replica


class ReplicaHost:
    """A replica in a process of its own, called through `BatchingClient`. Runs in one event loop.

    Args:
        log: file for its output and that of its engine; None leaves it to Ray.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        self._log = log
        open_log(log)

    async def start(
        self,
        config: EngineConfig,
        *,
        name: str,
        checkpoint: Path,
        capture_routing: bool,
        force_routing: bool,
        capture_support: bool,
        store: Path | None = None,
        followers: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Start the engine, before any other call. store, followers: see `ReplicaClient.start`."""
        common = {"checkpoint": checkpoint, "capture_routing": capture_routing, "capture_support": capture_support}
        starting = partial(start_replica, config, name=name, force_routing=force_routing, **common)
        with no_collections():
            if followers:
                replica = await self._start_over_nodes(config, starting, store=store, places=followers, **common)
            else:
                replica = await starting()
        make_collections_rare()
        if store is not None:
            replica.store = open_store(store_of_node(store), host=ray.util.get_node_ip_address())
        self._serve(replica)

    async def _start_over_nodes(
        self,
        config: EngineConfig,
        start: Callable[..., Coroutine[Any, Any, EngineReplica[Any]]],
        *,
        store: Path | None,
        places: Sequence[dict[str, Any]],
        **options: Any,
    ) -> EngineReplica[Any]:
        """The replica that `start` starts, with followers in `places`; it fails when one of them ends."""
        from async_rl.cluster.followers import start_followers  # which imports this module

        host = ray.util.get_node_ip_address()
        reserved, port = reserve_ports(host)
        here = None if store is None else store_of_node(store)
        place = NodePlace(index=0, size=1 + len(places), host=host, leader=host, port=port, store=here)
        followers = await start_followers(config, place, store=store, places=places, log=self._log, **options)
        ends = [asyncio.create_task(follower.until_dead()) for follower in followers]
        replica = await _unless_ended(start(place=place), ends)
        for each in reserved:
            each.close()
        replica.followers = followers
        for end in ends:
            end.add_done_callback(lambda ended: replica.fail(ended.result()))
        self._ends = ends  # the event loop itself keeps no task alive
        return replica

    def _serve(self, replica: EngineReplica[Any]) -> None:
        self._server = BatchingServer(replica, refusals=(EngineError,))

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    async def node(self) -> str:
        """Id of the node in the Ray cluster."""
        return ray.get_runtime_context().get_node_id()

    async def exchange(self, client: str, calls: Sequence[Call], cancelled: Sequence[int]) -> list[Reply]:
        """See `BatchingServer`."""
        return await self._server.exchange(client, calls, cancelled)

    async def collect(self, client: str) -> list[Reply]:
        """See `BatchingServer`."""
        return await self._server.collect(client)

    async def forget_client(self, client: str) -> None:
        """Abort the requests of a client that died; they are gone from the engine when this returns."""
        if calls := self._server.forget_client(client):
            await asyncio.wait(calls)


async def _unless_ended(start: Coroutine[Any, Any, EngineReplica[Any]], ends: Sequence[asyncio.Task[str]]) -> Any:
    """The started replica; raises EngineError if another of its nodes ends first."""
    starting = asyncio.create_task(start)
    await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return await starting
    starting.cancel()
    reasons = [end.result() for end in ends if end.done()]
    raise EngineError(f"the engine did not start: {reasons[0]}")


ReplicaActor = _remote(ReplicaHost)


class FollowerHost:
    """The ranks of a replica on one node, in processes of their own. Runs in one event loop.

    Args:
        log: file for the output of this process and of the engine's; None leaves it to Ray.
    """

    def __init__(self, *, log: Path | None) -> None:
        open_log(log)
        self._process: NodeProcess | None = None
        self._store: LocalStore | None = None
        self._load_timeout_s = 0.0

    async def start(
        self,
        config: EngineConfig,
        place: NodePlace,
        *,
        store: Path | None,
        checkpoint: Path,
        capture_routing: bool,
        capture_support: bool,
    ) -> str:
        """Start the processes of the engine, which then meet those of node 0; returns the address of this node.

        Args:
            place: with index and size of this node, and address and port of node 0.
            store: see `ReplicaClient.start`.
        """
        host = ray.util.get_node_ip_address()
        self._place = replace(place, host=host, store=None if store is None else store_of_node(store))
        self._load_timeout_s = config.load_timeout_s
        self._process = await start_node(
            config,
            self._place,
            checkpoint=checkpoint,
            capture_routing=capture_routing,
            capture_support=capture_support,
        )
        return host

    async def until_dead(self) -> str:
        """Return the reason when the engine's process of this node has ended."""
        assert self._process is not None
        return await self._process.until_dead()

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        """See `async_rl.inference.nodes.Follower`."""
        assert self._place.store is not None
        if self._store is None:  # not at the start, which may fail: nothing would remove it
            self._store = open_store(self._place.store, host=self._place.host)
        try:
            await bring(self._store, update, seat, timeout_s=self._load_timeout_s)
        except (UpdateError, OSError) as error:
            raise UpdateError(str(error)) from error

    async def close(self) -> None:
        """End the engine's processes of this node and leave the store."""
        if self._process is not None:
            await self._process.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.release)


FollowerActor = _remote(FollowerHost)


def store_of_node(store: Path) -> Path:
    """Directory of published versions of this process's node; nodes that are on one machine have their own, too."""
    return store.with_name(f"{store.name}-{ray.get_runtime_context().get_node_id()[:8]}")


def open_store(directory: Path, *, host: str) -> LocalStore:
    """The store of this node, after those of killed runs are removed."""
    remove_unused(directory.parent)
    return LocalStore(directory, host=host)


# ---- rollout worker


class RolloutHost:
    """A worker in a process of its own. log: file for its output; None leaves it to Ray.

    For each call without a text see `RolloutWorker`.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        open_log(log)
        with no_collections():
            from async_rl.cluster.rollout_workers import build_remote_worker  # which imports this module
        self._build = build_remote_worker

    async def start(
        self, config: RunConfig, *, name: str, checkpoint: Path, replicas: Mapping[str, ReplicaAddress]
    ) -> None:
        """Build the worker."""
        asyncio.get_running_loop().set_default_executor(USER_THREADS)  # as user code may call asyncio.to_thread
        with no_collections():
            self.serve(*self._build(config, name=name, checkpoint=checkpoint, replicas=replicas))
        make_collections_rare()

    def serve(self, worker: RolloutWorker, pool: WorkerReplicaPool) -> None:
        """Take calls for a worker, and for the replicas as it sees them."""
        self._worker, self._pool = worker, pool

    async def pid(self) -> int:
        return os.getpid()

    async def follow(self, replicas: Mapping[str, ReplicaAddress]) -> None:
        """Use exactly these replicas from now on."""
        self._pool.follow(replicas, client=self._worker.name)

    async def open(self, place: ContentPlace, *, writer: str) -> None:
        await self._worker.open(place, writer=writer)

    @_method(num_returns=2)
    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory], *, handout: int
    ) -> tuple[RolledGroup, GroupContent | None]:
        return await self._worker.roll(prompt, admission, existing, handout=handout)

    async def stop(self, group: int) -> None:
        """End the rollouts of a group whose caller is gone."""
        self._worker.stop(group)

    async def cancel(self, group: int, *, reason: Drop) -> None:
        await self._worker.cancel(group, reason=reason)

    async def flush(self) -> None:
        await self._worker.flush()

    async def forget(self, groups: Collection[int]) -> None:
        await self._worker.forget(groups)

    async def pause_tools(self) -> None:
        await self._worker.pause_tools()

    async def resume_tools(self) -> None:
        await self._worker.resume_tools()

    async def avoid(self, names: Collection[str]) -> None:
        await self._worker.avoid(names)

    async def validate(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> RolledPrompts:
        return await self._worker.validate(prompts, number=number)

    async def events(self) -> list[WorkerEvent]:
        try:
            async with asyncio.timeout(EVENTS_S):
                return await self._worker.events()
        except TimeoutError:
            return []

    async def end(self) -> None:
        await self._worker.end()


RolloutActor = _remote(max_concurrency=MAX_ROLLOUTS)(RolloutHost)


# ---- trainer


@_remote(concurrency_groups={"save": 1})
class TrainerActor:
    """One trainer rank in a process of its own. log: file for its output; None leaves it to Ray.

    Calls run one after another in one thread, and `saved` beside them.
    """

    def __init__(self, *, log: Path | None = None) -> None:
        open_log(log)

    def open_rendezvous(self) -> str:
        """host:port on this node at which ranks can meet while this actor lives."""
        with no_collections():
            from async_rl.trainer.distributed import open_store

        self._store = open_store(ray.util.get_node_ip_address())
        return f"{self._store.host}:{self._store.port}"

    def start(
        self,
        *,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        checkpoint: Path,
        rank: int,
        rendezvous: str,
        rollouts: Path | None,
        record: RecordConfig | None,
        delta: bool,
        broadcast: bool,
        direct: Backend | None,
        temperature: float,
    ) -> None:
        """rollouts: folder in which the first rank writes rollouts within the bounds of `record`; None for none.

        delta, direct, temperature: see `TrainerRank`. broadcast: whether published versions are served from the memory
        of this node.
        """
        with log_failure(), no_collections():
            from transformers import AutoTokenizer

            from async_rl.trainer.rank import TrainerRank  # megatron is only imported in the process of a rank
            from async_rl.trainer.recording import RolloutRecorder

        with log_failure():
            recorder = None
            if rank == 0 and rollouts is not None and record is not None:
                recorder = RolloutRecorder(rollouts, config=record, tokenizer=AutoTokenizer.from_pretrained(checkpoint))
            self._rank = TrainerRank(
                config=config,
                optimizer=optimizer,
                loss=loss,
                checkpoint=checkpoint,
                rank=rank,
                world_size=config.ranks,
                rendezvous=rendezvous,
                delta=delta,
                host=ray.util.get_node_ip_address() if broadcast or direct else None,
                direct=direct,
                recorder=recorder,
                temperature=temperature,
            )

    # Each call returns its answer, and the time spans of this rank that ended since the last call.

    def train(self, plan: BatchPlan, contents: Sequence[Any]) -> tuple[dict[str, float], list[TimeSpan]]:
        """contents: [G], a reference to the content of each group of the plan."""
        return self._answer(lambda: self._train(self._with_contents(plan, contents)))

    def train_supervised(self, plan: BatchPlan, contents: Sequence[Any]) -> tuple[dict[str, float], list[TimeSpan]]:
        return self._answer(lambda: self._rank.train_supervised(self._with_contents(plan, contents)))

    def snapshot_weights(self) -> tuple[None, list[TimeSpan]]:
        return self._answer(self._rank.snapshot_weights)

    def score(self, batch: TrainingBatch) -> tuple[list[Tensor], list[TimeSpan]]:
        return self._answer(lambda: self._rank.score(batch))

    def export(
        self, directory: Path | str, *, version: int, keep_version: int
    ) -> tuple[WeightUpdate | None, list[TimeSpan]]:
        return self._answer(lambda: self._rank.export(directory, version=version, keep_version=keep_version))

    def remove_updates(self, directory: Path | str) -> tuple[None, list[TimeSpan]]:
        return self._answer(lambda: self._rank.remove_updates(directory))

    def save_pretrained(self, folder: Path, *, like: Path) -> tuple[None, list[TimeSpan]]:
        return self._answer(lambda: self._rank.save_pretrained(folder, like=like))

    def save(self, directory: Path) -> tuple[None, list[TimeSpan]]:
        return self._answer(lambda: self._begin_save(directory))

    @_method(concurrency_group="save")
    def saved(self) -> tuple[None, list[TimeSpan]]:
        with log_failure():
            return self._written.result(), []

    def restore(self, directory: Path) -> tuple[None, list[TimeSpan]]:
        return self._answer(lambda: self._rank.restore(directory))

    def reset_optimizer(self, optimizer: OptimizerConfig) -> tuple[None, list[TimeSpan]]:
        return self._answer(lambda: self._rank.reset_optimizer(optimizer))

    def close(self) -> tuple[None, list[TimeSpan]]:
        return self._answer(self._rank.close)

    def _answer(self, call: Callable[[], T]) -> tuple[T, list[TimeSpan]]:
        with log_failure():
            return call(), self._rank.timeline.take()

    def _train(self, plan: BatchPlan) -> dict[str, float]:
        started = time.monotonic()
        metrics = self._rank.train(plan)
        return metrics | self._rank.throughput(plan, seconds=time.monotonic() - started)

    def _begin_save(self, directory: Path) -> None:
        self._written = self._rank.save(directory)

    def _with_contents(self, plan: BatchPlan, contents: Sequence[Any]) -> BatchPlan:
        """The plan with the content of the groups that this rank trains or records; only these are fetched."""
        groups = plan.groups_of(self._rank.data_rank)
        if self._rank.records and plan.batch.recorded is not None:
            groups = sorted({*groups, *plan.batch.recorded.heads})
        with self._rank.timeline.span("fetch", groups=len(groups)):
            fetched: dict[int, Any] = dict(zip(groups, ray.get([contents[group] for group in groups]), strict=True))
        here = [fetched.get(group, ()) for group in range(len(contents))]
        return replace(plan, batch=replace(plan.batch, contents=here))

    def pid(self) -> int:
        return os.getpid()


@_remote
def _answer() -> None:
    """Show that the node of this task lives."""


@_remote
def _exists(path: Path) -> bool:
    """Whether the node of this task sees `path`."""
    return path.exists()


@_remote
def _write_probe(own: str, _others: Sequence[str]) -> str:
    """Write an object; return why that failed, if it did. The same holds for the next functions."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(own)
        file.flush()
        return driver_problem(own) or _error_of(upload, Path(file.name), own)


@_remote
def _read_probes(_own: str, all_probes: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe"
        for url in all_probes:
            if problem := _error_of(download, url, file):
                return problem
            if file.read_text() != url:
                return f"{url} has another content than another node wrote"
    return ""


@_remote
def _remove_probe(own: str, _others: Sequence[str]) -> str:
    return _error_of(remove, own)


def _error_of(call: Callable[..., None], *arguments: Any) -> str:
    try:
        call(*arguments)
    except OSError as error:
        return f"{error}"
    return ""


def _require_node(bundle: dict[str, float], *, fields: str) -> None:
    """Raise PlacementError if no node of the cluster can hold `bundle`, even when it is empty."""
    nodes = [cast(dict[str, float], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes):
        most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in bundle}
        raise PlacementError(f"{fields} ask for {bundle} on one node, but no node has more than {most}; lower them")


def _address(node: str) -> str:
    """Address and start of the id of a node."""
    address = next((each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node), "?")
    return f"{address} ({node[:8]})"


def _without_zero(bundle: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in bundle.items() if amount > 0}
