"""Many publishes in a row under load: nothing is lost, and each token is of the version that it names.

PUBLISHES=50 in the environment makes fifty publishes, on every layout, by each route and mode.
"""

import asyncio
import contextlib
import itertools
import os
import random

import pytest

from async_rl.inference import checkpoint_weights
from async_rl.inference.checkpoint_weights import published_shapes
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.replica import DeliveryError, EngineReplica
from async_rl.inference.router import ReplicaRouter
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.transport import read_tensors, update_files
from message_queue.errors import EngineError
from tests.conformance.checks import assert_serves, assert_whole, versions_of
from tests.conformance.engines import MARKS, TIMEOUT_S, WITH_KV, EngineUnderTest, RunFolder, prompts
from tests.conformance.probes import TransformersTruth, VllmProbe
from tests.conformance.served import VLLM, VLLM_KV_TOKENS, small_steps, start_vllm, under_test
from tests.helpers.fakes.rollouts import RolloutsHere
from tests.helpers.updates import read_update, write_update

pytestmark = MARKS
PUBLISHES = int(os.environ.get("PUBLISHES", "6"))
TOKENS = 80
# K/V of other weights that `keep-keep` leaves in the prefix cache would serve an aborted request.
MODES = {"computed": ["resume", "resume", "keep-recompute", "keep-recompute", "drain"], "kept": ["keep-keep"]}
SERVERS = ("vllm", "sglang", "vllm-tp2", "sglang-tp2")
ROUTES = ("memory", "broadcast", "folder", "delta", "direct")
STAGED = {"at_once": False, "staged": True}
ALWAYS = [
    *itertools.product(SERVERS[:2], MODES, ["memory"], ["at_once"]),
    *itertools.product(SERVERS[:2], MODES, ["broadcast"], ["staged"]),
    ("vllm-tp2", "computed", "delta", "staged"),
    *itertools.product(SERVERS[:2], ["computed"], ["direct"], ["at_once"]),
    *itertools.product(SERVERS[2:], ["computed"], ["direct"], ["staged"]),
]
CASES = [
    pytest.param(*case, marks=pytest.mark.nightly if case[0] in SERVERS[2:] else ())
    for case in (itertools.product(SERVERS, MODES, ROUTES, STAGED) if "PUBLISHES" in os.environ else ALWAYS)
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("server", "kv", "route", "mode"), CASES, indirect=["server"])
async def test_many_publishes_under_load(tested, served_models, kv, route, mode, tmp_path, request, report):
    """Between two publishes a random number of tokens is sampled, and one time in five all requests are aborted."""
    node, run = tmp_path / "node", tmp_path / "run"
    updates = served_models.updates
    if route == "delta":
        steps = small_steps(served_models, tmp_path / "steps")
        tested.truth, updates = TransformersTruth(steps.models), steps.updates
    match route:
        case "memory":
            published = contextlib.nullcontext()
        case "broadcast":
            published = tested.broadcast(node)
        case "direct":
            published = tested.direct()
        case _:
            published = tested.folder(node, RunFolder(run, updates, delta=route == "delta"))
    with published:
        largest = await publish_under_load(tested, kv, staged=STAGED[mode])
    assert any(run.glob("*/*.delta")) == (route == "delta")
    report(f"{request.node.callspec.id}: {PUBLISHES} publishes, largest |dlogp| {largest:.1e}")


async def publish_under_load(tested, kv, *, staged):
    """Returns the largest |dlogp| of a sampled token against its version."""
    chance, published = random.Random(f"publishes {kv} {staged}"), 0
    rollouts = []
    while published < PUBLISHES:
        started, tasks = tested.start_rollouts(
            prompts(4, step=7),
            max_new_tokens=TOKENS,
            name=f"load-{published}",
            resume_routing="force",
            cache_salt=f"v{published}",
        )
        rollouts += started
        while published < PUBLISHES:
            with contextlib.suppress(AssertionError):  # all rollouts ended before
                await tested.until_more(chance.randint(1, 20))
            if all(task.done() for task in tasks):
                break
            if kv == "computed" and chance.random() < 0.2:
                await tested.replica.abort()
            await tested.publish(chance.choice(MODES[kv]), stays_slow=True, staged=staged)
            published += 1
        await tested.full_speed()
        await asyncio.gather(*tasks)
    assert {rollout.trajectory.num_sampled for rollout in rollouts} == {TOKENS}
    assert len({version for exchange in tested.exchanges for version in versions_of(exchange)}) > PUBLISHES // 2
    return assert_whole(tested, *rollouts)


class Routed(ReplicaRouter):
    """The router of a run over a pool, as one replica."""

    name = "routed"

    def __init__(self, pool):
        super().__init__(pool)
        self.pool = pool

    async def abort(self):
        return sum(await asyncio.gather(*(member.replica.call(EngineReplica.abort) for member in self.pool.live)))


class RollingPublishes(EngineUnderTest):
    """Replicas behind a router. A publish pauses one at a time."""

    def publisher(self, on_update, kv, *, staged):
        assert not staged
        pool = self.replica.pool

        class Rollouts(RolloutsHere):
            async def avoid(self, replicas):
                pool.avoid(replicas)

        return Publisher(pool, on_update=on_update, kv=kv, rollouts=Rollouts(), max_paused=1, timeout_s=TIMEOUT_S)


def watch_loads(replicas, patch):
    """A list that gets the number of replicas that load at the same time, at the start of each load."""
    loading, counts = set(), []
    for replica in replicas:

        async def counted(*args, replica=replica, load=replica.load, **kwargs):
            loading.add(replica)
            counts.append(len(loading))
            try:
                return await load(*args, **kwargs)
            finally:
                loading.remove(replica)

        patch.setattr(replica, "load", counted)
    return counts


@pytest.mark.drawn(1)
@pytest.mark.parametrize("route", ["memory", "direct"])
async def test_many_rolling_publishes_under_load(engine, second_vllm, models, monkeypatch, report, route):
    """Two of three replicas always serve; a request that a load aborts continues on another one, under its version."""
    replicas = [engine, second_vllm, await start_vllm(VLLM, name="replica-2", checkpoint=models.paths[0])]
    one = under_test(engine, models, patch=monkeypatch)
    routed = Routed(ReplicaPool(replicas))
    probe = VllmProbe(*replicas, kv_tokens=len(replicas) * VLLM_KV_TOKENS, patch=monkeypatch)
    tested = RollingPublishes(
        routed, routing=one.routing, updates=models.updates, truth=TransformersTruth(models.models), probe=probe
    )
    try:
        with tested.direct() if route == "direct" else contextlib.nullcontext():
            await tested.publish(version=0)
            at_once = watch_loads(replicas, monkeypatch)
            largest = await publish_under_load(tested, "computed", staged=False)
    finally:
        await tested.end()
        await replicas[-1].close()
    assert set(at_once) == {1}
    sessions = dict.fromkeys(exchange.request.session for exchange in tested.exchanges)
    owners = [{s.replica for exchange in tested.of_session(name) for s in exchange.answer} for name in sessions]
    assert any(len(several) > 1 for several in owners), "a trajectory moved"
    assert set().union(*owners) == {"replica-0", "replica-1", "replica-2"}
    report(f"rolling, {route}: {PUBLISHES} publishes, largest |dlogp| {largest:.1e}")


@WITH_KV
@pytest.mark.parametrize("staged", [False, True], ids=["at_once", "staged"])
async def test_an_engine_keeps_no_view_of_the_files_that_it_loaded(tested, staged):
    """Otherwise the next versions would get new files instead of overwriting these."""
    for version in (1, 0, 1):
        await tested.publish(version=version, staged=staged)
        for path in update_files(tested.update(version).path):
            tensors = {name: tensor.clone() for name, tensor in read_tensors(path)}
            assert MappedFiles().overwrite(path, tensors) is not None


@WITH_KV
async def test_a_bucket_that_a_trainer_rank_has_damaged_or_lost_is_refused_and_the_next_version_serves(tested):
    with tested.direct() as memory:
        await tested.publish(version=1)
        damaged = tested.keep(2)
        memory.ranks[1].bucket("weights-2", 1).data[0] ^= 1
        await tested.replica.pause()
        with pytest.raises(EngineError, match=r"bucket 1 .* but .* was published"):
            await tested.replica.load(damaged)
        lost = tested.keep(3)
        memory.ranks[0].discard(keep_version=4)
        with pytest.raises(DeliveryError, match="bucket 0 of weights-3 did not come from"):
            await tested.replica.load(lost)
        with pytest.raises(EngineError):
            await tested.replica.resume()
        await tested.publish(version=5)
        await assert_serves(tested, 5)


def after_check(patch, cut, damage):
    """Damage a version when its check has found no fault."""

    def checked(*args, **kwargs):
        found = published_shapes(*args, **kwargs)
        if args[0] == cut:
            damage()
        return found

    patch.setattr(checkpoint_weights, "published_shapes", checked)


@WITH_KV
@pytest.mark.parametrize("staged", [False, True], ids=["at_once", "staged"])
@pytest.mark.parametrize("bucket", [0, 1])
async def test_a_load_that_is_cut_at_a_bucket_leaves_an_engine_that_loads_the_next_version(
    tested, monkeypatch, tmp_path, bucket, staged
):
    cut = write_update(tmp_path, version=2, tensors=read_update(tested.update(0).path), bucket_bytes=256 << 10)
    after_check(monkeypatch, cut, lambda: os.truncate(update_files(cut.path)[bucket], 100))
    await tested.publish(version=1, staged=staged)
    await tested.replica.pause()
    with pytest.raises(EngineError, match=update_files(cut.path)[bucket].name):
        await (tested.replica.stage(cut) if staged else tested.replica.load(cut))
    if not staged:
        with pytest.raises(EngineError):
            await tested.replica.resume()
    for version in (3, 4):
        await tested.publish(version=version, staged=staged)
        await assert_serves(tested, version)


@WITH_KV
async def test_a_direct_load_that_is_cut_before_its_first_bucket_leaves_an_engine_that_loads_the_next_version(
    tested, monkeypatch
):
    with tested.direct() as memory:
        cut = tested.keep(2)
        after_check(monkeypatch, cut, lambda: memory.ranks[0].discard(keep_version=3))
        await tested.replica.pause()
        with pytest.raises(DeliveryError, match="bucket 0 of weights-2 did not come from"):
            await tested.replica.load(cut)
        await tested.publish(version=3)
        await assert_serves(tested, 3)
