"""The gate that every replica shares, without an engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agent_loop.engine import EngineError
from async_rl.engines.replica import Flight, RequestGate
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
        gate.landed(flight, segment(3, StopReason.ABORT if flight.abort_requested else StopReason.LENGTH))
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
