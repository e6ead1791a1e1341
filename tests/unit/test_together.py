"""Calls that travel together: each gets its own answer, in whatever order they end, and nothing is asked for twice."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue import together
from message_queue.client import QueueClient, QueueClientConfig
from message_queue.service import QueueService
from message_queue.staleness import StalenessConfig
from message_queue.together import Call, RemoteError, Together, TogetherHost
from tests.unit.groups import group_for
from tests.unit.test_queue import waits
from tests.unit.test_queue_client import Handle


class Refusal(RuntimeError):
    pass


class Service:
    """Answers when told to."""

    def __init__(self):
        self.begun, self.gates = [], {}

    async def echo(self, value, *, turns=0):
        self.begun.append(value)
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    async def wait(self, value):
        self.begun.append(value)
        await self.gates.setdefault(value, asyncio.Event()).wait()
        return value

    async def refuse(self):
        raise Refusal("no")

    async def fail(self):
        raise KeyError("what")


def make():
    service = Service()
    handle = Handle(TogetherHost(service, refusals=(Refusal,)))
    return Together(handle, name="driver"), handle, service


async def test_what_comes_before_a_message_comes_once_for_all_its_calls_and_may_refuse_them():
    _, handle, service = make()
    seen = []

    def before():
        seen.append(list(handle.calls))
        if len(seen) == 2:
            raise Refusal("no room")

    calls = Together(handle, name="driver", before_send=before)
    assert await asyncio.gather(*(calls.echo.remote(i) for i in range(3))) == [0, 1, 2]
    refused = await asyncio.gather(*(calls.echo.remote(i) for i in range(3)), return_exceptions=True)
    assert [str(error) for error in refused] == ["no room"] * 3
    assert await calls.echo.remote("again") == "again"
    assert (seen, handle.calls) == ([[], ["together"], ["together"]], ["together"] * 2)
    assert service.begun == [0, 1, 2, "again"]


async def test_calls_of_one_turn_are_one_message_and_begin_in_order():
    calls, handle, service = make()
    assert await asyncio.gather(*(calls.echo.remote(i) for i in range(5))) == [0, 1, 2, 3, 4]
    assert handle.calls == ["together"]
    assert service.begun == [0, 1, 2, 3, 4]
    assert await calls.echo.remote("alone") == "alone"
    assert handle.calls == ["together"] * 2


async def test_a_call_that_waits_holds_up_no_other():
    calls, handle, service = make()
    slow, fast = asyncio.ensure_future(calls.wait.remote("slow")), calls.echo.remote("fast")
    assert await asyncio.wait_for(fast, 1) == "fast"
    assert await calls.echo.remote("later") == "later"
    assert not slow.done()
    asked = len(handle.calls)
    await waits(slow)
    assert len(handle.calls) <= asked + 1, "it is waited for, not asked for over and over"
    service.gates["slow"].set()
    assert await asyncio.wait_for(slow, 1) == "slow"
    assert not calls._waiting


async def test_an_answer_that_is_not_known_to_have_arrived_is_sent_again_after_a_while(monkeypatch):
    host = TogetherHost(Service(), refusals=())

    async def answered(received, number):
        answers = await host.together("driver", received, [Call(number, "echo", (number,), {})])
        return [answer.number for answer in answers]

    assert await answered([], 0) == [0]
    assert await answered([], 1) == [1], "it may still be on its way"
    monkeypatch.setattr(together, "RESEND_S", 0.0)
    assert await answered([1], 2) == [0, 2]
    assert await answered([0, 2], 3) == [3]


async def test_only_what_may_not_have_arrived_is_kept():
    calls, handle, _ = make()
    for value in range(3):
        assert await calls.echo.remote(value) == value
    client = handle.service._clients["driver"]
    assert (list(client.kept), client.begun) == ([2], {2}), "the next message says of the others that they arrived"


async def test_a_message_that_comes_twice_begins_its_calls_once():
    service = Service()
    host = TogetherHost(service, refusals=())
    message = ("driver", [], [Call(0, "wait", ("long",), {}), Call(1, "echo", ("short",), {})])
    assert [answer.number for answer in await host.together(*message)] == [1]
    again = await waits(host.together(*message))
    assert service.begun == ["long", "short"]
    service.gates["long"].set()
    assert [answer.number for answer in await asyncio.wait_for(again, 1)] == [0]


async def test_refusals_arrive_as_they_are_and_other_errors_as_text():
    calls, _, _ = make()
    with pytest.raises(Refusal, match="no"):
        await calls.refuse.remote()
    with pytest.raises(RemoteError, match="KeyError: 'what'"):
        await calls.fail.remote()


async def test_a_dead_process_fails_every_call_of_a_message():
    calls, handle, _ = make()
    handle.dead = OSError("the actor died")
    outcomes = await asyncio.gather(*(calls.echo.remote(i) for i in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the actor died"] * 3
    assert not calls._waiting


async def test_a_message_that_cannot_be_sent_fails_its_calls_and_no_other():
    class Full:
        def remote(self, *args):
            raise MemoryError("the object store is full")

    calls, handle, _ = make()
    handle.together = Full()
    with pytest.raises(MemoryError, match="the object store is full"):
        await asyncio.wait_for(calls.echo.remote(1), 1)
    del handle.together
    assert await calls.echo.remote(2) == 2


async def test_a_process_that_dies_while_answers_are_waited_for_fails_them():
    calls, handle, _ = make()
    waiting = asyncio.ensure_future(calls.wait.remote("long"))
    assert await calls.echo.remote("first") == "first"
    await waits(waiting)
    assert "collect" in handle.calls
    broken = handle.service

    async def collect(*_):
        raise OSError("the actor died")

    broken.collect = collect
    broken._clients["driver"].answered.set()  # the collect under way comes back with nothing
    with pytest.raises(OSError, match="the actor died"):
        await asyncio.wait_for(waiting, 1)


async def test_a_caller_that_gives_up_leaves_nothing_behind():
    calls, _, service = make()
    waiting = await waits(calls.wait.remote("long"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    service.gates["long"].set()
    assert await calls.echo.remote("next") == "next"
    assert not calls._waiting


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_call_gets_its_own_answer_once(seed):
    rng = random.Random(seed)

    async def run():
        service = Service()
        host = TogetherHost(service, refusals=())
        handle = Handle(host, jitter=lambda: rng.randrange(5))
        clients = [Together(handle, name=name) for name in ("a", "b")]

        async def one(number):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            return await rng.choice(clients).echo.remote(number, turns=rng.randrange(30))

        async with asyncio.timeout(5):
            assert await asyncio.gather(*(one(number) for number in range(20))) == list(range(20))
        assert sorted(service.begun) == list(range(20))
        assert not any(client.unsent for client in host._clients.values())
        assert not any(client._waiting for client in clients)

    asyncio.run(run())


async def test_a_queue_behind_it_is_the_same_queue():
    service = QueueService(batch_groups=2, staleness=StalenessConfig(max_staleness=3))
    handle = Handle(TogetherHost(service, refusals=()))
    config = QueueClientConfig(timeout_s=5, slice_s=0.01)
    client = QueueClient(Together(handle, name="driver"), name="driver", routing=None, config=config)
    taking = asyncio.ensure_future(client.take())
    admissions = await asyncio.gather(*(client.admit(prompt) for prompt in range(4)))
    assert [a.group for a in admissions] == [0, 1, 2, 3]
    before = handle.calls.count("together")
    await asyncio.gather(*(client.put(group_for(admission)) for admission in admissions))
    assert handle.calls.count("together") <= before + 2, "four groups, one message; the taker's slice at most beside it"
    assert [g.group for g in (await taking).groups] == [0, 1]
    assert [g.group for g in (await client.take()).groups] == [2, 3]
