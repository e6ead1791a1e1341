"""Defects that the simulator found in the real code; `mutations.py` plants them again."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import ReplicaLostError
from agent_loop.loop import Message, Prompt, RolloutError
from async_rl.inference.pool import ReplicaPool
from async_rl.rollout.validator import ValidationRound, Validator
from async_rl.simulator.virtual_time import run_in_virtual_time
from message_queue.tokens import StopReason
from tests.helpers.fakes import SPEC


def test_a_replica_that_is_lost_while_a_call_on_it_times_out_is_lost_once():
    class Hung:
        name = "hung"

    async def lose():
        lost = []
        pool = ReplicaPool([Hung()], on_lost=lost.append)
        (member,) = pool.live
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: loop.call_soon(lambda: pool.lose(member, reason="for another reason")))

        async def call():
            async with pool.calling(member, timeout_s=5):
                await asyncio.Event().wait()

        with pytest.raises(ReplicaLostError, match="for another reason"):
            await call()
        return lost

    assert len(run_in_virtual_time(lose())) == 1


async def test_a_validation_rollout_that_fails_is_neither_right_nor_wrong():
    class Loop:
        async def run(self, prompt, *, trajectory, session, cache_salt):
            if prompt.index == 1:
                raise RolloutError("the reward is out of order")
            trajectory.observe(np.zeros(1, np.int32))
            trajectory.close(stop_reason=StopReason.STOP, reward=1.0)

    prompts = [Prompt(index=i, messages=(Message(role="user", content="?"),)) for i in range(2)]
    rolled = await Validator(loop=Loop(), routing=SPEC).run(list(enumerate(prompts)), number=1)
    result = ValidationRound.joined([rolled])
    assert (result.success_rate, result.prompts, result.failed) == (1.0, 2, 1)
