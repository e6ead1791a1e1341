"""The gate that every replica shares, without an engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agent_loop.engine import EngineError, ReplicaLostError
from async_rl.inference.replica import InflightRequest, RequestGate, until_finished
from message_queue.tokens import StopReason, TokenOutput, WeightVersion


def segment(tokens: int, stop_reason: StopReason) -> TokenOutput:
    return TokenOutput(
        token_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        routed_experts=None,
        weights=WeightVersion(0, "d"),
        stop_reason=stop_reason,
        replica="r",
    )


async def decode(gate: RequestGate, name: str, until: asyncio.Event) -> InflightRequest:
    async with gate.admit(name) as request:
        await until.wait()
        request.result = [segment(3, StopReason.ABORT if request.abort_requested else StopReason.LENGTH)]
        return request


async def test_a_pause_right_after_a_resume_still_holds():
    gate, go = RequestGate("r"), asyncio.Event()
    gate.pause()
    held = asyncio.create_task(decode(gate, "a", go))
    await asyncio.sleep(0)
    gate.resume()
    gate.pause()  # before the held task runs again
    for _ in range(5):
        await asyncio.sleep(0)
    assert gate.stats().in_flight == 0
    gate.resume()
    go.set()
    await held
    assert gate.stats().tokens_sampled == 3


async def test_requests_are_marked_for_abort_and_waited_for():
    gate, go = RequestGate("r"), asyncio.Event()
    tasks = [asyncio.create_task(decode(gate, str(i), go)) for i in range(3)]
    await asyncio.sleep(0)
    requests = gate.request_abort()
    waiter = asyncio.create_task(until_finished(requests))
    await asyncio.sleep(0)
    assert not waiter.done()
    go.set()
    await waiter
    assert [request.aborted for request in requests] == [True] * 3
    await asyncio.gather(*tasks)
    gate.pause()
    gate.require_quiet("load")


async def test_a_request_that_fails_is_finished_too():
    gate = RequestGate("r")
    with pytest.raises(RuntimeError, match="engine"):
        async with gate.admit("a") as request:
            raise RuntimeError("engine")
    assert request.finished.is_set()
    assert not request.aborted
    assert gate.stats().in_flight == 0


async def test_a_failure_wakes_everyone_at_the_gate_and_is_what_later_calls_say():
    gate, go = RequestGate("r"), asyncio.Event()
    gate.pause()
    held = [asyncio.create_task(decode(gate, str(i), go)) for i in range(2)]
    control = asyncio.create_task(gate.unless_failed(go.wait()))
    await asyncio.sleep(0)
    gate.fail("engine process 7 died")
    gate.fail("a later reason")
    for task in (*held, control):
        with pytest.raises(EngineError, match="r: engine process 7 died"):
            await task
    for call in (gate.pause, gate.resume, gate.check_alive, gate.request_abort):
        with pytest.raises(EngineError, match="r: engine process 7 died"):
            call()


async def test_a_gate_with_unverified_weights_does_not_open():
    gate = RequestGate("r")
    gate.pause()
    gate.weights_unverified = "version 3 was not loaded whole"
    with pytest.raises(EngineError, match="cannot resume, version 3 was not loaded whole; load a good version"):
        gate.resume()
    gate.weights_unverified = None
    gate.resume()


async def test_a_load_needs_a_pause_and_nothing_in_flight():
    gate, go = RequestGate("r"), asyncio.Event()
    with pytest.raises(EngineError, match="load while serving"):
        gate.require_quiet("load")
    task = asyncio.create_task(decode(gate, "a", go))
    await asyncio.sleep(0)
    gate.pause()
    with pytest.raises(EngineError, match="load with 1 requests in flight"):
        gate.require_quiet("load")
    go.set()
    await task
    gate.require_quiet("load")


async def parking(gate: RequestGate, name: str) -> InflightRequest:
    """A request that leaves the engine whenever it is evicted, until it is released or aborted."""

    async def work(request: InflightRequest) -> None:
        await asyncio.sleep(0)
        while request.evicted:
            await request.park()

    async with gate.admit(name) as request:
        await gate.unless_failed(work(request))
        request.result = [segment(1, StopReason.ABORT if request.abort_requested else StopReason.LENGTH)]
        return request


async def parked_requests(gate: RequestGate, count: int) -> list[asyncio.Task[InflightRequest]]:
    """`count` requests that are evicted and parked."""
    tasks = [asyncio.create_task(parking(gate, str(i))) for i in range(count)]
    await asyncio.sleep(0)  # each is past the gate, none has run on
    gate.pause()
    assert gate.freeze() == count
    for request in gate.in_flight:
        request.evicted = True
    for request in gate.in_flight:
        await request.outside.wait()
        assert request.parked
    return tasks


async def test_a_freeze_needs_a_pause_and_allows_a_load():
    gate, go = RequestGate("r"), asyncio.Event()
    with pytest.raises(EngineError, match="r: freeze while serving; call pause"):
        gate.freeze()
    task = asyncio.create_task(decode(gate, "a", go))
    await asyncio.sleep(0)
    gate.pause()
    with pytest.raises(EngineError, match=r"load with 1 requests in flight \(a, ...\); call abort, drain or freeze"):
        gate.require_quiet("load")
    assert gate.freeze() == 1
    gate.require_quiet("load")
    with pytest.raises(EngineError, match="drain with 1 frozen requests; call resume or abort first"):
        await gate.drain()
    gate.resume()
    with pytest.raises(EngineError, match="load while serving"):
        gate.require_quiet("load")
    gate.pause()
    with pytest.raises(EngineError, match="load with 1 requests in flight"):
        gate.require_quiet("load")
    go.set()
    await task


async def test_parked_requests_wait_until_the_gate_opens():
    gate = RequestGate("r")
    tasks = await parked_requests(gate, 3)
    assert gate.stats().in_flight == 3
    gate.resume()
    gate.pause()  # before a parked task runs again
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    gate.resume()
    assert not any([(await task).aborted for task in tasks])


async def test_an_abort_finishes_parked_requests():
    gate = RequestGate("r")
    tasks = await parked_requests(gate, 2)
    requests = gate.request_abort()
    gate.pause()  # before a parked task runs again
    await until_finished(requests)
    assert all([(await task).aborted for task in tasks])
    gate.require_quiet("load")


async def test_a_cancelled_request_is_outside_too():
    gate = RequestGate("r")
    first, second = await parked_requests(gate, 2)
    first.cancel()
    await asyncio.wait([first])
    assert gate.stats().in_flight == 1
    gate.resume()
    await second

    async def never_parked() -> None:
        async with gate.admit("c"):
            await asyncio.Event().wait()

    task = asyncio.create_task(never_parked())
    await asyncio.sleep(0)
    (request,) = gate.in_flight
    assert not request.outside.is_set()
    task.cancel()
    await request.outside.wait()


async def test_a_failure_wakes_parked_requests():
    gate = RequestGate("r")
    tasks = await parked_requests(gate, 2)
    gate.fail("engine process 7 died")
    for task in tasks:
        with pytest.raises(ReplicaLostError, match="r: engine process 7 died"):
            await task


async def test_unverified_weights_keep_parked_requests():
    gate = RequestGate("r")
    (task,) = await parked_requests(gate, 1)
    gate.weights_unverified = "version 3 was not loaded whole"
    for call in (gate.require_resumable, gate.resume):
        with pytest.raises(EngineError, match="cannot resume, version 3 was not loaded whole"):
            call()
    assert not task.done()
    gate.weights_unverified = None
    gate.resume()
    await task


async def test_a_cancelled_call_has_cleaned_up_when_it_returns():
    gate, cleaned = RequestGate("r"), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            cleaned.set()

    call = asyncio.create_task(gate.unless_failed(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() and cleaned.is_set()
