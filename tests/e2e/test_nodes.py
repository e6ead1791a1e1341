"""A replica over two Ray nodes: its ranks agree, versions reach both nodes, and its processes end together."""

import asyncio
import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray._raylet import AuthenticationTokenLoader, Config

from agent_loop.engine import GenerateRequest
from async_rl.cluster.placement import Placement, start_ray
from async_rl.cluster.replica import ReplicaClient
from async_rl.config import ClusterConfig, load_config
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.replica import EngineReplica
from async_rl.inference.vllm.plugin import PLUGIN_VARIABLE
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.digest import STORE_VARIABLE
from async_rl.weights.transport import Source
from message_queue.errors import ReplicaLostError
from message_queue.tokens import WeightVersion
from tests.conformance import sglang_support
from tests.conformance.engines import tokens
from tests.conformance.reference import gap_with_rows, logprob_gap, reference
from tests.conformance.served import VLLM, Models, make_models
from tests.e2e.clusters import cluster_environment, start_cluster
from tests.helpers import tiny_models
from tests.helpers.fakes.rollouts import RolloutsHere
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore")]

NODES = 2
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes that this process has joined."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = cluster_environment(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            patch.setenv(name, environment[name])
        read_auth_variables()
        with start_cluster(1, 1, 1, environment=environment, directory=folder) as (address, _):
            start_ray(ClusterConfig(address=address))
            yield
            ray.shutdown()
    read_auth_variables()


def read_auth_variables():
    """Make Ray reread the variables of its authentication, as its own tests do."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


@dataclass(frozen=True, slots=True)
class Served:
    """A replica over nodes that the versions of `models` are broadcast to."""

    replica: ReplicaClient
    models: Models
    versions: VersionServer
    folder: Path

    async def publish(self, version, *, staged=False, on_update="resume"):
        update = self.models.updates[version]
        sources = (Source(self.versions.address, tuple(range(len(update.buckets)))),)
        publisher = Publisher(
            ReplicaPool([self.replica]), on_update=on_update, rollouts=RolloutsHere(), staged=staged, timeout_s=60
        )
        await publisher.publish(replace(update, sources=sources))

    async def ask(self, name, *, max_new_tokens=24, seed=0):
        ask = GenerateRequest(request_id=name, token_ids=tokens(30, seed=seed), max_new_tokens=max_new_tokens)
        return (await self.replica.call(EngineReplica.generate, ask))[0]

    async def check(self, version):
        """Tokens, rows and logprobs are those of transformers with the weights of a version."""
        both = await asyncio.gather(*(self.ask(f"v{version}-{i}", seed=i) for i in range(2)))
        for seed, segment in enumerate(both):
            assert segment.weights == WeightVersion(version, self.models.updates[version].weights.digest)
            ids = np.concatenate([tokens(30, seed=seed), segment.token_ids])
            expected = reference(self.models.models[version], ids)
            rows = segment.routed_experts.experts
            assert gap_with_rows(expected, ids, segment.logprobs, rows, start=30, first_row=0) <= 1

    async def update_in_flight(self, version):
        """Publish a version while a request is frozen; it recomputes the K/V with the experts of before."""
        ask = GenerateRequest(request_id="long", token_ids=tokens(30), max_new_tokens=400)
        running = asyncio.create_task(self.replica.call(EngineReplica.generate, ask))
        await asyncio.sleep(0.3)
        await self.publish(version, on_update="keep")
        first, second = await running
        assert (first.weights.version, second.weights.version) == (version - 1, version)
        ids = np.concatenate([tokens(30), first.token_ids, second.token_ids])
        rows = np.concatenate([segment.routed_experts.experts for segment in (first, second)])
        expected = reference(self.models.models[version], ids, forced=rows)
        assert logprob_gap(expected, ids, second.logprobs, start=30 + len(first.token_ids)) <= 1

    async def check_versions(self):
        """The start, a staged version, and one that meets a request in flight; each node has the last."""
        await self.check(0)
        await self.publish(1, staged=True)
        await self.check(1)
        await self.update_in_flight(2)
        await self.check(2)
        assert [path.name for path in self.stores] == ["weights-2"] * NODES

    @property
    def stores(self):
        """Folders of versions on the nodes."""
        return sorted(self.folder.glob("store-*/weights-*"))


@contextlib.asynccontextmanager
async def serving(config, models, folder):
    """A started replica on version 0."""
    placed = ClusterConfig(strategy="STRICT_SPREAD", cpus_per_replica=NODES)
    placement = Placement(placed, ranks=0, replicas=1, workers=0, gpus_per_replica=0, nodes_per_replica=NODES)
    await placement.ready()
    versions = VersionServer(HOST, models.updates[0].path.parent)
    replica = await ReplicaClient.start(
        replace(load_config(["trainer.router_replay=R3", "sync.route=broadcast"]), engine=config).replica_settings,
        name="replica-0",
        checkpoint=models.paths[0],
        places=placement.replica(0),
        log=folder / "replica-0.log",
        store=folder / "store",
    )
    try:
        yield Served(replica, models, versions, folder)
    finally:
        with contextlib.suppress(ReplicaLostError):
            await replica.close(timeout_s=30)
        ray.util.remove_placement_group(placement._group)
        versions.close()


def processes_of(folder):
    """Processes with a file of `folder` open: those of the replica, as all write to its logs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            targets = [str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            if process.pid != os.getpid() and any(target.startswith(f"{folder}/replica-") for target in targets):
                found.append(process)
    return found


async def until_none(folder):
    async with asyncio.timeout(30):
        while processes_of(folder):  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.1)


@WHOLE_RUN
async def test_a_vllm_replica_over_nodes_agrees_loads_and_ends_with_a_rank(cluster, tmp_path):
    config = replace(VLLM, nodes=NODES, tensor_parallel=NODES, kv_cache_bytes=16 << 20)
    models = make_models(tmp_path, tiny_models.qwen3_moe_config())
    async with serving(config, models, tmp_path) as served:
        await served.check_versions()
        lost = asyncio.create_task(served.ask("lost", max_new_tokens=400))
        await asyncio.sleep(0.2)
        worker = next(p for p in processes_of(tmp_path) if "VllmWorker-1" in p.name() or "Worker_TP1" in p.name())
        variables = worker.environ()
        assert (variables[PLUGIN_VARIABLE], variables["OMP_NUM_THREADS"]) == ("1", str(config.threads))
        assert Path(variables[STORE_VARIABLE]) in [path.parent for path in served.stores]
        worker.kill()
        with pytest.raises(ReplicaLostError, match="node 1") as raised:
            await lost
        assert "exit code" in str(raised.value)
    await until_none(tmp_path)
    assert served.stores == []


@pytest.mark.nightly
async def test_an_sglang_replica_over_nodes_agrees_loads_and_ends_with_its_first_process(cluster, tmp_path):
    sglang_support.require_sglang()
    config = sglang_support.config(kv_cache_tokens=4096, nodes=NODES, tensor_parallel=NODES)
    models = make_models(tmp_path, sglang_support.qwen3_moe())
    async with serving(config, models, tmp_path) as served:
        await served.check_versions()
        leader = psutil.Process(await served.replica.pid(timeout_s=60))
        leader.kill()
        await until_none(tmp_path)
