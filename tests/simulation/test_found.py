"""Defects that the simulator found in the real code; `mutations.py` plants them again."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import ReplicaLostError
from agent_loop.loop import Message, Prompt, RolloutError
from async_rl.rollout.fleet import ReplicaFleet
from async_rl.rollout.validator import Validator
from async_rl.simulate.virtual_time import run_in_virtual_time
from message_queue.queue import QueueError
from message_queue.service import QueueService
from message_queue.staleness import StalenessConfig
from message_queue.tickets import EndedTickets
from message_queue.tokens import StopReason
from tests.fakes import SPEC


async def test_a_call_whose_result_arrived_does_not_begin_again():
    service = QueueService(batch_groups=1, staleness=StalenessConfig(max_staleness=3))
    call = {"ticket": "driver/0", "wait_s": 1}
    assert (await service.admit(0, settled=(), **call)).group == 0
    assert (await service.admit(1, ticket="driver/1", settled=["driver/0"], wait_s=1)).group == 1
    with pytest.raises(QueueError, match="call driver/0 is over; its message came twice"):
        await service.admit(0, settled=(), **call)
    assert (await service.snapshot()).next_group == 2


async def test_ledger_records_are_kept_until_their_caller_has_them():
    service = QueueService(batch_groups=1, staleness=StalenessConfig(max_staleness=3))
    for number in range(3):
        await service.admit(number, ticket=f"driver/{number}", settled=(), wait_s=1)
        await service.drop(number, reason="failed: for once", segments=0, tokens=0)
    first = [record["group"] for record in await service.drain_records(0)]
    again = [record["group"] for record in await service.drain_records(0)]
    assert first == again == [0, 1, 2]
    assert [record["group"] for record in await service.drain_records(2)] == [2]
    assert [record["group"] for record in await service.drain_records(1)] == [2]  # a message that came late
    *records, total = await service.closing_records(2)
    assert [record["group"] for record in records] == [2] and total["dropped"] == 3


def test_few_tickets_are_remembered_one_by_one():
    ended = EndedTickets()
    for number in [0, 2, 1, 3, 5]:
        ended.add(f"driver/{number}")
    ended.add("other/0")
    assert len(ended) == 1
    assert [f"driver/{n}" in ended for n in range(7)] == [True, True, True, True, False, True, False]
    assert "other/0" in ended and "other/1" not in ended and "unnumbered" not in ended


def test_a_replica_that_is_lost_while_a_call_on_it_times_out_is_lost_once():
    class Hung:
        name = "hung"

    async def lose():
        lost = []
        fleet = ReplicaFleet([Hung()], on_lost=lost.append)
        (member,) = fleet.live
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: loop.call_soon(lambda: fleet.lose(member, reason="for another reason")))

        async def call():
            async with fleet.calling(member, timeout_s=5):
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
    result = await Validator(loop=Loop(), routing=SPEC, prompts=prompts).run()
    assert (result.success_rate, result.prompts, result.failed) == (1.0, 2, 1)
