"""The gate that every replica shares, without an engine."""

import asyncio

import pytest

from async_rl.inference.gate import RequestGate, until_finished
from message_queue.errors import EngineError, ReplicaLostError
from message_queue.tokens import StopReason
from tests.helpers.groups import segment


def answer(request):
    return [segment(stop_reason=StopReason.ABORT if request.abort_requested else StopReason.LENGTH)]


async def decode(gate, name, until):
    async with gate.admit(name) as request:
        await until.wait()
        request.result = answer(request)
        return request


async def parking(gate, name):
    """A request that leaves the engine whenever it is evicted, until it is released or aborted."""

    async def work(request):
        await asyncio.sleep(0)
        while request.evicted:
            await request.park()

    async with gate.admit(name) as request:
        await gate.unless_failed(work(request))
        request.result = answer(request)
        return request


async def parked_requests(gate, count):
    """`count` requests that are evicted and parked."""
    tasks = [asyncio.create_task(parking(gate, str(i))) for i in range(count)]
    await asyncio.sleep(0)  # each is past the gate, and none has run further
    gate.pause()
    assert gate.freeze() == count
    for request in gate.in_flight:
        request.evicted = True
    for request in gate.in_flight:
        await request.outside.wait()
        assert request.parked
    return tasks


async def turns_of_the_loop():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_pause_right_after_a_resume_still_holds():
    gate, go = RequestGate("r"), asyncio.Event()
    gate.pause()
    held = asyncio.create_task(decode(gate, "a", go))
    await asyncio.sleep(0)
    gate.resume()
    gate.pause()  # before the held task resumes
    await turns_of_the_loop()
    assert gate.stats().in_flight == 0
    gate.resume()
    go.set()
    await held


async def test_requests_are_marked_for_abort_and_awaited():
    gate, go = RequestGate("r"), asyncio.Event()
    tasks = [asyncio.create_task(decode(gate, str(i), go)) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="request 1"):
        await decode(gate, "1", go)  # an id is unique while it is in flight
    requests = gate.request_abort()
    waiter = asyncio.create_task(until_finished(requests))
    await asyncio.sleep(0)
    assert not waiter.done()
    assert gate.stats().in_flight == 3
    go.set()
    await waiter
    assert [request.aborted for request in requests] == [True] * 3
    await asyncio.gather(*tasks)
    gate.pause()
    gate.require_quiet("load")
    busy = gate.stats().busy_seconds
    assert busy > 0
    await asyncio.sleep(0.01)
    assert gate.stats().busy_seconds == busy, "idle time is not busy time"


async def test_a_failure_wakes_all_waiters_and_later_calls_raise_its_reason():
    gate, go = RequestGate("r"), asyncio.Event()
    parked = await parked_requests(gate, 2)
    held = [asyncio.create_task(decode(gate, str(i), go)) for i in range(2)]
    control = asyncio.create_task(gate.unless_failed(go.wait()))
    await asyncio.sleep(0)
    gate.fail("engine process 7 died")
    gate.fail("a later reason")
    for task in (*parked, *held, control):
        with pytest.raises(ReplicaLostError, match="engine process 7"):
            await task
    for call in (gate.pause, gate.resume, gate.check_alive, gate.request_abort):
        with pytest.raises(ReplicaLostError, match="engine process 7"):
            call()


async def test_a_gate_with_unverified_weights_stays_closed():
    gate = RequestGate("r")
    (task,) = await parked_requests(gate, 1)
    gate.weights_unverified = "version 3 was not loaded whole"
    for call in (gate.require_resumable, gate.resume):
        with pytest.raises(EngineError, match="version 3"):
            call()
    assert not task.done()
    gate.weights_unverified = None
    gate.resume()
    await task


async def test_a_load_needs_a_pause_and_no_request_that_is_not_frozen():
    gate, go = RequestGate("r"), asyncio.Event()
    for refused in (lambda: gate.require_quiet("load"), gate.freeze):
        with pytest.raises(EngineError, match="serving"):
            refused()
    task = asyncio.create_task(decode(gate, "a", go))
    await asyncio.sleep(0)
    for _ in range(2):
        gate.pause()
        with pytest.raises(EngineError, match=r"in flight \(a"):
            gate.require_quiet("load")
        assert gate.freeze() == 1
        gate.require_quiet("load")
        with pytest.raises(EngineError, match="drain"):
            await gate.drain()
        gate.resume()
    gate.pause()
    go.set()
    await task
    gate.require_quiet("load")


async def test_parked_requests_wait_until_the_gate_opens():
    gate = RequestGate("r")
    tasks = await parked_requests(gate, 3)
    assert gate.stats().in_flight == 3
    gate.resume()
    gate.pause()  # before a parked task resumes
    await turns_of_the_loop()
    assert not any(task.done() for task in tasks)
    gate.resume()
    assert not any([(await task).aborted for task in tasks])


async def test_an_abort_finishes_parked_requests():
    gate = RequestGate("r")
    tasks = await parked_requests(gate, 2)
    requests = gate.request_abort()
    gate.pause()  # before a parked task resumes
    await until_finished(requests)
    assert all([(await task).aborted for task in tasks])
    gate.require_quiet("load")


async def test_a_cancelled_request_is_outside_whether_it_was_parked_or_not():
    gate = RequestGate("r")
    first, second = await parked_requests(gate, 2)
    first.cancel()
    await asyncio.wait([first])
    assert gate.stats().in_flight == 1
    gate.resume()
    await second
    task = asyncio.create_task(decode(gate, "c", asyncio.Event()))
    await asyncio.sleep(0)
    (request,) = gate.in_flight
    assert not request.outside.is_set()
    task.cancel()
    await request.outside.wait()


async def test_a_cancelled_call_has_cleaned_up_when_it_returns():
    gate, cleaned = RequestGate("r"), asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await turns_of_the_loop()
            cleaned.set()

    call = asyncio.create_task(gate.unless_failed(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() and cleaned.is_set()
