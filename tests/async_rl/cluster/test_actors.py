"""Processes of replicas and workers: requests of a client that died, and garbage collections."""

import asyncio
import gc

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.cluster.actors import ReplicaHost, make_collections_rare
from async_rl.cluster.rpc import Call
from tests.helpers.fakes import FakeEngine, SeededScript


async def test_replica_host_drops_the_requests_of_a_dead_client_alone():
    engine = FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=8), token_s=60.0)
    host = ReplicaHost()
    host._serve(engine)
    exchanges = []
    for number, client in enumerate(("worker-0", "worker-1")):
        request = GenerateRequest(request_id=f"{client}#0.", token_ids=np.array([2, 3], np.int32), max_new_tokens=9)
        call = Call(number, "generate", (request,), {})
        exchanges.append(asyncio.create_task(host.exchange(client, [call], [])))
    async with asyncio.timeout(10):
        while engine.in_flight < 2:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0)
    await host.forget_client("worker-0")
    assert engine.in_flight == 1
    for exchange in exchanges:
        exchange.cancel()
    await host.forget_client("worker-1")


def test_make_collections_rare_starts_no_full_collection_as_a_heap_grows():
    collected = dict.fromkeys(range(3), 0)

    def count(phase, info):
        collected[info["generation"]] += phase == "stop"

    thresholds = gc.get_threshold()
    try:
        make_collections_rare()
        gc.callbacks.append(count)
        grown = [[number] for number in range(300_000)]
        assert gc.get_freeze_count() > len(grown) / 10
        assert collected[0] > collected[1] > 0 == collected[2]
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
