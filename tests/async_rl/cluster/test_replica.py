"""The start of a replica, and requests of a client that died."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.cluster import replica
from async_rl.cluster.batching import Call
from async_rl.cluster.replica import ReplicaHost
from message_queue.errors import EngineError
from tests.helpers.fakes import FakeEngine, SeededScript


async def test_start_of_a_replica_ends_when_another_of_its_nodes_does():
    async def start():
        await started.wait()
        return "replica"

    started, loop = asyncio.Event(), asyncio.get_running_loop()
    ends = [loop.create_future(), loop.create_future()]
    ends[1].set_result("node 2: engine process 7 died")
    with pytest.raises(EngineError, match="node 2: engine process 7 died"):
        await replica._unless_ended(start(), ends)
    started.set()
    assert await replica._unless_ended(start(), [loop.create_future()]) == "replica"


async def test_replica_host_drops_the_requests_of_a_dead_client_alone():
    engine = FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=8), token_s=60.0)
    host = ReplicaHost()
    host.serve(engine, refusals=replica.REFUSALS)
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
