"""Calls that travel together: each gets its own reply once, also if others are cancelled or a process dies."""

import asyncio
import pickle
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.cluster import batching
from async_rl.cluster.batching import BatchingClient, BatchingServer, RemoteError


class Refusal(RuntimeError): ...


class LateRefusal(Refusal): ...


class Lost(RuntimeError): ...


class Service:
    """Replies when a test lets it."""

    def __init__(self):
        self.started, self.cancelled, self.gates = [], [], {}

    async def echo(self, value, *, turns=0):
        self.started.append(value)
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    async def wait(self, value):
        self.started.append(value)
        try:
            await self.gates.setdefault(value, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        return value

    async def refuse(self):
        error = LateRefusal("no")
        error.add_note("ask later")
        raise error

    async def fail(self):
        raise KeyError("x")

    async def cancel_itself(self):
        raise asyncio.CancelledError


class Handle:
    """A server in the same loop, reached through bytes as an actor is. jitter: iterations before a message arrives."""

    dead = unsendable = None  # errors of every message, and of sending one
    silent = False  # messages are never answered

    def __init__(self, server, *, jitter=lambda: 0):
        self.server, self.jitter = server, jitter
        self.sent, self.received = [], []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.send(name, pickle.loads(pickle.dumps(args))))

    def send(self, name, args):
        if self.unsendable is not None:
            raise self.unsendable
        self.sent.append(name)
        return asyncio.ensure_future(self.run(name, args))

    async def run(self, name, args):
        for _ in range(self.jitter()):
            await asyncio.sleep(0)
        if self.dead is not None:
            raise self.dead
        replies = await getattr(self.server, name)(*args)
        if self.silent:
            await asyncio.Event().wait()
        self.received.append(len(replies))
        return pickle.loads(pickle.dumps(replies))


def serving(service, *refusals):
    server = BatchingServer()
    server.serve(service, refusals=refusals)
    return server


def make():
    service = Service()
    handle = Handle(serving(service, Refusal))
    return client_of(handle), handle, service


def client_of(handle, name="driver"):
    return BatchingClient(handle, name=name, server="the service", timeout_s=60.0, lost=Lost)


async def until(condition):
    """Return once a condition holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of many kinds
            await asyncio.sleep(0)


async def waiting(client, service, *values):
    """Calls of `wait` that are under way in the service."""
    calls = [asyncio.create_task(client.call(Service.wait, value)) for value in values]
    await until(lambda: set(values) <= set(service.started))
    return calls


async def outcomes(*calls):
    async with asyncio.timeout(30):
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_batching_calls_of_one_iteration_and_replies_of_neighbouring_ones_are_one_message():
    client, handle, service = make()
    assert await asyncio.gather(*(client.call(Service.echo, i, turns=i) for i in range(6))) == list(range(6))
    assert handle.sent == ["exchange"]
    assert service.started == list(range(6))
    assert await client.call(Service.echo, "alone", turns=1) == "alone"
    assert handle.sent == ["exchange"] * 2


async def test_batching_call_that_was_not_sent_is_not_sent_when_cancelled():
    client, handle, service = make()
    alone = asyncio.create_task(client.call(Service.echo, "alone"))
    asyncio.get_running_loop().call_soon(alone.cancel)  # after the call, before the message
    await outcomes(alone)
    assert handle.sent == []
    first = asyncio.create_task(client.call(Service.echo, "first"))
    second = asyncio.create_task(client.call(Service.echo, "second"))
    asyncio.get_running_loop().call_soon(first.cancel)
    assert [type(o) for o in await outcomes(first, second)] == [asyncio.CancelledError, str]
    assert (service.started, handle.sent.count("exchange")) == (["second"], 1)


async def test_batching_call_that_was_sent_is_cancelled_in_the_server():
    client, handle, service = make()
    kept, *others = await waiting(client, service, "kept", "a", "b")
    for task in others:
        task.cancel()
    await outcomes(*others)
    await until(lambda: len(service.cancelled) == 2)
    assert handle.sent.count("exchange") == 2, "one message cancels both"
    assert not kept.done()
    service.gates["kept"].set()
    assert await outcomes(kept) == ["kept"]
    (state,) = handle.server._clients.values()
    assert (client._waiting, state.running, state.replies) == ({}, {}, [])


async def test_batching_refusals_travel_unchanged_and_other_errors_as_text():
    client, _, _ = make()
    refused, failed, cancelled = await outcomes(
        client.call(Service.refuse), client.call(Service.fail), client.call(Service.cancel_itself)
    )
    assert (type(refused), str(refused), refused.__notes__) == (LateRefusal, "no", ["ask later"])
    assert isinstance(failed, RemoteError)
    assert "KeyError: 'x'" in str(failed)
    assert "in fail" in str(failed)
    assert isinstance(cancelled, RemoteError)


async def test_batching_server_that_died_fails_every_call_that_was_sent():
    client, handle, service = make()
    long = await waiting(client, service, "long", "longer")
    handle.dead = OSError("the actor died\n\tclass_name: Service\n\tpid: 7")
    results = await outcomes(*long, client.call(Service.echo, 1))
    assert [type(result) for result in results] == [Lost] * 3
    assert {result.__cause__ for result in results} == {handle.dead}
    assert "echo, wait of driver" in str(results[0]) and "pid" not in str(results[0])
    handle.dead = None
    assert await client.call(Service.echo, 2) == 2


@pytest.mark.parametrize(
    ("trouble", "value", "named"),
    [
        ("unsendable", OSError("no connection"), "no connection"),
        ("silent", True, "0.011 s"),
    ],
)
async def test_batching_server_that_fails_while_replies_are_collected_fails_calls(monkeypatch, trouble, value, named):
    monkeypatch.setattr(batching, "COLLECT_S", 0.001)
    client, handle, service = make()
    (long,) = await waiting(client, service, "long")
    await until(lambda: "collect" in handle.sent)
    setattr(handle, trouble, value)
    if trouble == "silent":
        client._timeout_s = 0.01
    (lost,) = await outcomes(long)
    assert isinstance(lost, Lost) and named in str(lost)


async def test_batching_message_that_cannot_be_sent_fails_its_calls_and_no_other():
    client, handle, service = make()
    (long,) = await waiting(client, service, "long")
    handle.unsendable = MemoryError("the object store is full")
    assert await outcomes(client.call(Service.echo, 1)) == [handle.unsendable]
    handle.unsendable = None
    assert await client.call(Service.echo, 2) == 2
    service.gates["long"].set()
    assert await outcomes(long) == ["long"]


async def test_batching_client_that_died_leaves_nothing(monkeypatch):
    monkeypatch.setattr(batching, "COLLECT_S", 0.001)
    client, handle, service = make()
    assert await handle.server.exchange("dead", [batching.Call(1, "wait", ("long",), {})], []) == []
    monkeypatch.setattr(batching, "FORGET_S", -1.0)
    assert await client.call(Service.echo, 1) == 1
    assert list(handle.server._clients) == ["driver"]
    await until(lambda: service.cancelled == ["long"])


async def test_batching_client_of_the_same_name_gets_no_reply_of_the_one_before(monkeypatch):
    monkeypatch.setattr(batching, "COLLECT_S", 0.001)
    client, handle, service = make()
    old = batching.Call(next(client._numbers), "wait", ("old",), {})
    assert await handle.server.exchange("driver", [old], []) == []
    service.gates["old"].set()
    again = client_of(handle)
    assert await outcomes(*(again.call(Service.echo, i) for i in range(3))) == [0, 1, 2]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_batching_every_call_gets_its_own_reply_once(seed):
    rng = random.Random(seed)

    async def run():
        service = Service()
        handle = Handle(serving(service), jitter=lambda: rng.randrange(5))
        clients = [client_of(handle, name) for name in ("a", "b")]

        async def one(number):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            call = asyncio.create_task(rng.choice(clients).call(Service.echo, number, turns=rng.randrange(30)))
            if rng.random() < 0.3:
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(0)
                call.cancel()
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            assert outcome == number or isinstance(outcome, asyncio.CancelledError)

        async with asyncio.timeout(30):
            await asyncio.gather(*(one(number) for number in range(20)))
        assert len(service.started) == len(set(service.started))
        assert not any(client._waiting or client._outbox for client in clients)

    asyncio.run(run())


async def test_batching_callers_of_many_replies_continue_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(batching, "COLLECT_S", 1e6)
    monkeypatch.setattr(batching, "MAX_REPLIES", 40)
    monkeypatch.setattr(batching, "REPLIES_AT_ONCE", 8)
    service = Service()
    handle = Handle(serving(service))
    clients = [client_of(handle, name) for name in ("one", "two")]
    woken, in_iteration = 0, []

    async def call(client, value):
        nonlocal woken
        assert await client.call(Service.wait, value) == value
        woken += 1

    async def count():
        while woken < 200:
            before = woken
            await asyncio.sleep(0)
            in_iteration.append(woken - before)

    calls = [asyncio.create_task(call(clients[value % 2], value)) for value in range(200)]
    await until(lambda: len(service.started) == 200)
    for gate in service.gates.values():
        gate.set()
    await outcomes(*calls, count())
    assert woken == 200
    assert max(in_iteration) <= 8, "both clients together"
    assert max(handle.received) == 40
