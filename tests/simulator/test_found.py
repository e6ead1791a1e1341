"""Defects that the simulator found in the real code and that no planted defect repeats."""

import asyncio

import pytest

from async_rl.cluster.queue import QueueUnavailable
from async_rl.cluster.trainer import TrainerLostError
from async_rl.controller.recovery import _lost_part
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.replica import DeliveryError
from async_rl.simulator.virtual_time import run_in_virtual_time
from message_queue.errors import ReplicaLostError


def test_replica_lost_while_a_call_times_out_is_lost_once():
    class Hung:
        name = "hung"

    async def lose():
        lost = []
        pool = ReplicaPool([Hung()], on_lost=lost.append)
        (member,) = pool.live
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: loop.call_soon(lambda: pool.lose(member, reason="for another reason")))
        with pytest.raises(ReplicaLostError):
            async with pool.calling(member, timeout_s=5):
                await asyncio.Event().wait()
        return lost

    assert len(run_in_virtual_time(lose())) == 1


def test_lost_queue_that_only_the_rollouts_noticed_is_a_lost_part():
    stage, lost = RuntimeError("stage rollout failed"), QueueUnavailable("the queue is dead")
    stage.__cause__ = ExceptionGroup("rollouts", [lost])
    assert _lost_part(ExceptionGroup("stages", [stage])) is lost
    stage.__cause__ = ExceptionGroup("rollouts", [ValueError("something else")])
    assert _lost_part(ExceptionGroup("stages", [stage])) is None
    for trainer in (TrainerLostError("rank 0 is dead"), DeliveryError("bucket 3 did not come from rank 0")):
        assert _lost_part(trainer) is trainer
