"""Which replica serves a request."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.rollout.routing import ReplicaRouter


class Recording:
    def __init__(self):
        self.served = []
        self.release = asyncio.Event()

    async def generate(self, request):
        self.served.append(request.session)
        await self.release.wait()
        return request.session


def request(session):
    return GenerateRequest(request_id=f"{session}.", token_ids=np.zeros(1, np.int32), max_new_tokens=1, session=session)


async def test_new_sessions_go_to_the_least_loaded_and_stay_there():
    replicas = [Recording(), Recording()]
    router = ReplicaRouter(replicas)
    first = [asyncio.create_task(router.generate(request(s))) for s in ("a", "b", "c", "d")]
    await asyncio.sleep(0)
    assert [r.served for r in replicas] == [["a", "c"], ["b", "d"]]
    for replica in replicas:
        replica.release.set()
    await asyncio.gather(*first)
    await asyncio.gather(*(router.generate(request(s)) for s in ("d", "b", "a")))
    assert [r.served for r in replicas] == [["a", "c", "a"], ["b", "d", "d", "b"]]


async def test_a_failed_request_does_not_count_as_load():
    class Failing:
        async def generate(self, request):
            raise RuntimeError

    router = ReplicaRouter([Failing(), Recording()])
    for session in ("a", "b", "c"):
        with pytest.raises(RuntimeError):
            await router.generate(request(session))


def test_no_replica_is_refused():
    with pytest.raises(ValueError, match=r"engine\.replicas"):
        ReplicaRouter([])
