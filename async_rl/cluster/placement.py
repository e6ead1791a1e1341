"""Start of Ray, the places of a run's actors on its nodes, and probes of these nodes."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_rl.files.user_code import imported_files
from async_rl.weights.remote import download, driver_problem, remove, upload
from message_queue.errors import AsyncRLError

if TYPE_CHECKING:
    from async_rl.config import ClusterConfig

_remote = cast(Any, ray.remote)  # whose stubs do not know all of its arguments
_NOTHING = {"num_cpus": 0.0, "num_gpus": 0.0}  # resources of a probe in the place of an actor
NODES_S = 5.0  # time between two looks at the nodes of a run


def start_ray(config: ClusterConfig) -> None:
    """Join the cluster at `address`, or start one on this machine, also if another one runs here.

    Ray gives a node 30 s to start. On a machine that is busy for longer, a second start succeeds.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # actors without a reserved GPU see none
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the actors do the work: nothing else should go first
    # The GCS would keep an event of each call, for a dashboard that is not started: 130 kB for each train step.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    for module in imported_files():
        cast(Any, ray).cloudpickle.register_pickle_by_value(module)  # Ray has its own copy of cloudpickle
    if config.address is not None:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        return
    start = partial(
        ray.init,
        address="local",
        num_cpus=config.num_cpus,
        object_store_memory=config.object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        start()
    except Exception as error:  # of no class of its own
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start()


class PlacementError(AsyncRLError):
    """The run does not fit the nodes of the cluster; names the field and the way out."""


def by_node(nodes: Sequence[str]) -> list[int]:
    """Places in `nodes`, those of one node next to each other.

    a b a b gives 0 2 1 3.
    """
    return sorted(range(len(nodes)), key=lambda place: nodes.index(nodes[place]))


class Placement:
    """One bundle per actor: trainer ranks first, then replicas, rollout workers, the queue and replicas of teachers.

    A replica over several nodes has a bundle for each, one after another, with its part of the CPUs and GPUs. Trainer
    ranks take their bundles in the order of the nodes once these are known, as Ray does not place bundle by bundle.

    Args:
        gpus_per_replica: of one replica; see ClusterConfig.
        nodes_per_replica: see `engine.nodes`.
        teachers: teacher and GPUs of each replica of the teachers.

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
        teachers: Sequence[tuple[str, float]] = (),
    ) -> None:
        rank = _without_zero({"CPU": config.cpus_per_rank, "GPU": config.gpus_per_rank})
        cpus, gpus = config.cpus_per_replica / nodes_per_replica, gpus_per_replica / nodes_per_replica
        replica = _without_zero({"CPU": cpus, "GPU": gpus})
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
        self._teachers = [name for name, _ in teachers]  # of each bundle after the queue
        scoring = [_without_zero({"CPU": config.cpus_per_replica, "GPU": of_one}) for _, of_one in teachers]
        for bundle in scoring:
            _require_node(bundle, fields="cluster.cpus_per_replica and the GPUs of teachers.NAME.engine")
        self._rank_bundles = list(range(ranks))
        self._config = config
        of_driver = [{"CPU": 1.0}] * (workers + 1)
        self._bundles = [*[rank] * ranks, *[replica] * (self._workers - ranks), *of_driver, *scoring]
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
        """Check that every node of the run sees the files that this process writes to `directory`, an existing folder.

        Args:
            field: config field that an error names.

        Raises:
            PlacementError: a node does not.
        """
        here = ray.get_runtime_context().get_node_id()
        bundles = {node: bundle for bundle, node in self._nodes().items() if node != here}
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
            places = [self._options(bundle) | _NOTHING for bundle in bundles.values()]
            calls = [_exists.options(**place).remote(Path(probe.name)) for place in places]
            seen: list[bool] = await asyncio.gather(*calls)
        if blind := [node for node, sees in zip(bundles, seen, strict=True) if not sees]:
            raise PlacementError(
                f"{field} is {directory}, which node {blind[0]} of the cluster does not see ({len(blind)} of "
                f"{len(bundles) + 1} nodes); give a directory that all nodes share"
            )

    async def require_store(self, url: str, *, field: str) -> None:
        """Check that every node of the run reads, writes and removes objects below `url`.

        Args:
            field: config field that an error names.

        Raises:
            PlacementError: a node does not, or not within `cluster.start_timeout_s`.
        """
        places = {node: self._options(bundle) | _NOTHING for bundle, node in self._nodes().items()}
        probes = {node: f"{url}/.probe-{uuid.uuid4().hex}" for node in places}
        for step in ("write", "read", "remove"):
            calls = {
                node: _probe.options(**place, max_retries=0).remote(step, probes[node], list(probes.values()))
                for node, place in places.items()
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
            options: Ray's options of the actor.

        Raises:
            TimeoutError: its node died, and no other has room.
        """
        call = _answer.options(**options | _NOTHING, max_retries=-1).remote()
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
        if bundle > self._queue:
            name = self._teachers[place := bundle - self._queue - 1]
            return f"teacher {name} slot {place - self._teachers.index(name)}"
        return "the queue"

    def rank(self, index: int) -> dict[str, Any]:
        """Actor options of trainer rank `index`."""
        return self._options(self._rank_bundles[index])

    def replica(self, index: int, *, teacher: str | None = None) -> list[dict[str, Any]]:
        """Actor options of each node of replica `index` of the policy, or of the one node of that of a teacher."""
        if teacher is not None:
            return [self._options(self._queue + 1 + self._teachers.index(teacher) + index)]
        first = self._ranks + index * self._nodes_per_replica
        return [self._options(bundle) for bundle in range(first, first + self._nodes_per_replica)]

    def worker(self, index: int) -> dict[str, Any]:
        """Actor options of rollout worker `index`."""
        return self._options(self._workers + index)

    def queue(self) -> dict[str, Any]:
        """Actor options of the queue."""
        return self._options(self._queue)

    def _options(self, bundle: int) -> dict[str, Any]:
        cpus, gpus = (self._bundles[bundle].get(name, 0.0) for name in ("CPU", "GPU"))
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


@_remote
def _answer() -> None:
    """Show that the node of this task lives."""


@_remote
def _exists(path: Path) -> bool:
    """Whether the node of this task sees `path`."""
    return path.exists()


@_remote
def _probe(step: str, own: str, probes: Sequence[str]) -> str:
    """Write the own object, read all, or remove the own one; returns why that failed, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe"
        try:
            if step == "remove":
                remove(own)
            elif step == "write":
                file.write_text(own)
                if problem := driver_problem(own):
                    return problem
                upload(file, own)
            for url in probes if step == "read" else ():
                download(url, file)
                if file.read_text() != url:
                    return f"{url} has another content than another node wrote"
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
