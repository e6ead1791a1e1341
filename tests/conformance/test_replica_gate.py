"""The gate that every replica shares, without an engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agent_loop.engine import EngineError, ReplicaLostError
from async_rl.inference.replica import Flight, RequestGate
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


async def fly(gate: RequestGate, name: str, until: asyncio.Event) -> Flight:
    async with gate.admit(name) as flight:
        await until.wait()
        gate.landed(flight, [segment(3, StopReason.ABORT if flight.abort_requested else StopReason.LENGTH)])
        return flight


async def test_a_pause_right_after_a_resume_still_holds():
    gate, go = RequestGate("r"), asyncio.Event()
    gate.pause()
    held = asyncio.create_task(fly(gate, "a", go))
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


async def test_flights_are_marked_for_abort_and_waited_for():
    gate, go = RequestGate("r"), asyncio.Event()
    tasks = [asyncio.create_task(fly(gate, str(i), go)) for i in range(3)]
    await asyncio.sleep(0)
    flights = gate.request_abort()
    waiter = asyncio.create_task(gate.wait_landed(flights))
    await asyncio.sleep(0)
    assert not waiter.done()
    go.set()
    await waiter
    assert [flight.stop_reason for flight in flights] == [StopReason.ABORT] * 3
    await asyncio.gather(*tasks)
    gate.pause()
    gate.require_quiet("load")


async def test_a_flight_that_fails_lands_too():
    gate = RequestGate("r")
    with pytest.raises(RuntimeError, match="engine"):
        async with gate.admit("a") as flight:
            raise RuntimeError("engine")
    assert flight.landed.is_set()
    assert gate.stats().in_flight == 0


async def test_a_failure_wakes_everyone_at_the_gate_and_is_what_later_calls_say():
    gate, go = RequestGate("r"), asyncio.Event()
    gate.pause()
    held = [asyncio.create_task(fly(gate, str(i), go)) for i in range(2)]
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


async def test_a_gate_with_suspect_weights_does_not_open():
    gate = RequestGate("r")
    gate.pause()
    gate.suspect("version 3 was not loaded whole")
    with pytest.raises(EngineError, match="cannot resume, version 3 was not loaded whole; load a good version"):
        gate.resume()
    gate.suspect(None)
    gate.resume()


async def test_a_load_needs_a_pause_and_nothing_in_flight():
    gate, go = RequestGate("r"), asyncio.Event()
    with pytest.raises(EngineError, match="load while serving"):
        gate.require_quiet("load")
    task = asyncio.create_task(fly(gate, "a", go))
    await asyncio.sleep(0)
    gate.pause()
    with pytest.raises(EngineError, match="load with 1 requests in flight"):
        gate.require_quiet("load")
    go.set()
    await task
    gate.require_quiet("load")


async def held_flight(gate: RequestGate, name: str) -> Flight:
    """A flight that leaves the engine whenever it is recalled, until it is let through or aborted."""
    async with gate.admit(name) as flight:
        await asyncio.sleep(0)
        while flight.recalled:
            await gate.hold(flight)
        gate.landed(flight, [segment(1, StopReason.ABORT if flight.abort_requested else StopReason.LENGTH)])
        return flight


async def frozen_flights(gate: RequestGate, count: int) -> list[asyncio.Task[Flight]]:
    """`count` flights that are recalled and held."""
    tasks = [asyncio.create_task(held_flight(gate, str(i))) for i in range(count)]
    await asyncio.sleep(0)  # each is past the gate, none has run on
    gate.pause()
    assert gate.freeze() == count
    flights = gate.recall()
    assert len(flights) == count
    await gate.wait_outside(flights)
    return tasks


async def test_a_freeze_needs_a_pause_and_allows_a_load():
    gate, go = RequestGate("r"), asyncio.Event()
    with pytest.raises(EngineError, match="r: freeze while serving; call pause"):
        gate.freeze()
    task = asyncio.create_task(fly(gate, "a", go))
    await asyncio.sleep(0)
    gate.pause()
    with pytest.raises(EngineError, match=r"load with 1 requests in flight \(a, ...\); call abort, drain or freeze"):
        gate.require_quiet("load")
    gate.require_moving("drain")
    assert gate.freeze() == 1
    gate.require_quiet("load")
    with pytest.raises(EngineError, match="drain with 1 frozen requests; call resume or abort first"):
        gate.require_moving("drain")
    gate.resume()
    with pytest.raises(EngineError, match="load while serving"):
        gate.require_quiet("load")
    gate.pause()
    with pytest.raises(EngineError, match="load with 1 requests in flight"):
        gate.require_quiet("load")
    go.set()
    await task


async def test_recalled_flights_are_held_until_the_gate_opens_and_are_not_recalled_twice():
    gate = RequestGate("r")
    tasks = await frozen_flights(gate, 3)
    assert gate.recall() == []
    assert gate.stats().in_flight == 3
    gate.resume()
    gate.pause()  # before a held task runs again
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    gate.resume()
    assert {(await task).stop_reason for task in tasks} == {StopReason.LENGTH}


async def test_an_abort_lands_what_is_held():
    gate = RequestGate("r")
    tasks = await frozen_flights(gate, 2)
    flights = gate.request_abort()
    await gate.wait_landed(flights)
    assert {(await task).stop_reason for task in tasks} == {StopReason.ABORT}
    gate.require_quiet("load")


async def test_a_cancelled_flight_is_outside_too():
    gate = RequestGate("r")
    first, second = await frozen_flights(gate, 2)
    first.cancel()
    await asyncio.wait([first])
    assert gate.stats().in_flight == 1
    gate.resume()
    await second

    async def never_held() -> None:
        async with gate.admit("c"):
            await asyncio.Event().wait()

    task = asyncio.create_task(never_held())
    await asyncio.sleep(0)
    gate.pause()
    gate.freeze()
    waiter = asyncio.create_task(gate.wait_outside(gate.recall()))
    await asyncio.sleep(0)
    assert not waiter.done()
    task.cancel()
    await waiter


async def test_a_failure_wakes_what_is_held():
    gate = RequestGate("r")
    tasks = await frozen_flights(gate, 2)
    gate.fail("engine process 7 died")
    for task in tasks:
        with pytest.raises(ReplicaLostError, match="r: engine process 7 died"):
            await task


async def test_suspect_weights_keep_what_is_held():
    gate = RequestGate("r")
    (task,) = await frozen_flights(gate, 1)
    gate.suspect("version 3 was not loaded whole")
    for call in (gate.require_resumable, gate.resume):
        with pytest.raises(EngineError, match="cannot resume, version 3 was not loaded whole"):
            call()
    assert not task.done()
    gate.suspect(None)
    gate.resume()
    await task
