"""Load of replicas in virtual time: a replica shares its speed among its requests in flight."""

from __future__ import annotations

import asyncio
import heapq
import math
import random

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.inference import router
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.stub import InProcess
from async_rl.simulator.virtual_time import run_in_virtual_time

PROMPT = 200
STAY = math.inf


class SharedReplica(InProcess):
    """m requests in flight get a token each every (20 + m / 2) ms; a prefix token not cached costs 1/50 of one."""

    def __init__(self, name, *, slower=1.0):
        self.name = name
        self.misses = self.turns = 0
        self._slower = slower
        self._cached = set()
        self._done_each = 0.0  # tokens that a request in flight since the start would have
        self._updated_at = 0.0
        self._waiting = []  # heap of (its end on the scale of _done_each, number, future)
        self._timer = None

    async def generate(self, request):
        rollout, _, turn = request.request_id.partition("#")
        work = request.max_new_tokens
        if rollout not in self._cached:
            self.misses += turn != "0."
            work += len(request.token_ids) / 50
        self._cached.add(rollout)
        self.turns += 1
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self._done_each + work, request.request_id, done))
        self._set_timer()
        await done
        return []

    def _rate(self):
        return 1 / ((0.02 + len(self._waiting) / 2000) * self._slower)

    def _advance(self):
        now = asyncio.get_running_loop().time()
        self._done_each += self._rate() * (now - self._updated_at) * bool(self._waiting)
        self._updated_at = now

    def _set_timer(self):
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            seconds = (self._waiting[0][0] - self._done_each) / self._rate()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._finish)

    def _finish(self):
        self._advance()
        while self._waiting and self._waiting[0][0] <= self._done_each + 1e-6:
            heapq.heappop(self._waiting)[-1].set_result(None)
        self._set_timer()


async def roll(routed, index, *, seed, sticky):
    """One rollout: turns of lognormal length, four on average, with a tool call of 2 s after each but the last."""
    rng, held = random.Random(f"{seed}-{index}"), PROMPT
    turns = 1
    while rng.random() < 0.75 and turns < 20:
        turns += 1
    for turn in range(turns):
        length = min(int(rng.lognormvariate(math.log(150), 1.0)) + 1, 8000)
        call = {"request_id": f"{index}#{turn}.", "token_ids": np.empty(held, np.int32), "max_new_tokens": length}
        await routed.generate(GenerateRequest(**call, session=f"{index}" if sticky else ""))
        held += length + 50
        if turn < turns - 1:
            await asyncio.sleep(rng.expovariate(1 / 2.0))


def simulate(*, max_excess=router.MAX_EXCESS, sticky=True, slower=(1, 1, 1, 1), rollouts=1024, seed=0):
    """Seconds until the last rollout ended, and the share of turns whose prefix was not cached."""

    async def run():
        replicas = [SharedReplica(f"replica-{i}", slower=slow) for i, slow in enumerate(slower)]
        routed = router.ReplicaRouter(ReplicaPool(replicas))
        await asyncio.gather(*(roll(routed, index, seed=seed, sticky=sticky) for index in range(rollouts)))
        missed = sum(r.misses for r in replicas) / sum(r.turns for r in replicas)
        return asyncio.get_running_loop().time(), missed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "MAX_EXCESS", max_excess)
        return run_in_virtual_time(run())


def test_router_avoids_a_slow_replica_and_keeps_caches():
    slower = (2, 1, 1, 1)
    stay_s, stay_missed = simulate(max_excess=STAY, slower=slower)
    never_s, never_missed = simulate(sticky=False, slower=slower)
    seconds, missed = simulate(slower=slower)
    assert seconds < 0.75 * stay_s and seconds < 1.02 * never_s
    assert missed < 0.04 and never_missed > 0.25 and stay_missed == 0


def test_router_costs_replicas_of_one_speed_no_time():
    seconds, missed = simulate()
    assert seconds < 1.01 * simulate(max_excess=STAY)[0] and missed < 0.02
