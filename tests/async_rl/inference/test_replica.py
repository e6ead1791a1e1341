"""The life cycle of a replica over a backend without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from agent_loop.engine import AnswerError, EngineError, GenerateRequest, ReplicaLostError
from async_rl.inference.checks import weight_label
from async_rl.inference.replica import (
    UNKNOWN_LABEL,
    EngineLoad,
    EngineReplica,
    InflightRequest,
    KVPolicy,
    LoadedWeights,
    until_finished,
)
from async_rl.inference.vllm.config import VllmConfig
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError, StopReason, TokenOutput, WeightVersion

CONFIG = VllmConfig(device="cpu", load_timeout_s=5)
FIRST, SECOND = WeightVersion(0, "a"), WeightVersion(1, "b")


class ScriptedBackend:
    """An engine that decodes one token when `go` is set, and loads weights with the digest `loads`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.decoding = asyncio.Event()
        self.go = asyncio.Event()
        self.loads = SECOND.digest
        self.fault: Exception | None = None
        self.refused: Exception | None = None
        self.die: Callable[[str], None] = lambda reason: None

    def watch(self, on_death: Callable[[str], None]) -> None:
        self.die = on_death

    def check_request(self, request: GenerateRequest) -> None:
        if self.refused:
            raise self.refused

    async def decode(
        self, request: GenerateRequest, inflight: InflightRequest, *, loaded: LoadedWeights
    ) -> list[TokenOutput]:
        self.decoding.set()
        await self.go.wait()
        if self.fault:
            raise self.fault
        return [
            TokenOutput(
                token_ids=np.zeros(1, np.int32),
                logprobs=np.zeros(1, np.float32),
                routed_experts=None,
                weights=loaded.current,
                stop_reason=StopReason.ABORT if inflight.abort_requested else StopReason.LENGTH,
                replica="r",
            )
        ]

    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        self.go.set()
        await until_finished(requests)

    async def freeze(self) -> None:
        self.calls.append("freeze")

    def check_update(self, update: WeightUpdate, *, kv: KVPolicy, in_flight: bool) -> None:
        if self.refused:
            raise self.refused

    async def load(self, update: WeightUpdate, *, kv: KVPolicy, requests: Sequence[InflightRequest]) -> EngineLoad:
        if self.fault:
            raise self.fault
        return EngineLoad(self.loads, [{"w": self.loads}])

    async def label(self, label: str) -> None:
        self.calls.append(label)

    async def resume(self) -> None:
        self.calls.append("resume")

    async def close(self) -> None:
        self.calls.append("close")

    async def engine_error(self, error: Exception, what: str) -> EngineError:
        return EngineError(f"{what}: converted")


def started(config: VllmConfig = CONFIG) -> EngineReplica[ScriptedBackend]:
    live = LiveWeights(dtype="float32", published={}, ranks=[{"w": FIRST.digest}])
    return EngineReplica(ScriptedBackend(), config=config, name="r", weights=FIRST, live=live)


def ask(name: str = "a") -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=np.zeros(3, np.int32), max_new_tokens=1)


def update() -> WeightUpdate:
    return WeightUpdate(Path("none"), SECOND)


async def in_flight(replica: EngineReplica[ScriptedBackend]) -> asyncio.Task[list[TokenOutput]]:
    task = asyncio.create_task(replica.generate(ask()))
    await replica.backend.decoding.wait()
    return task


async def test_a_load_labels_tokens_only_after_its_digest_is_verified():
    replica = started()
    await replica.pause()
    assert await replica.load(update()) == replica.weights == SECOND
    assert replica.backend.calls == [weight_label(SECOND)]


@pytest.mark.parametrize("failure", ["digest", "engine", "client"])
async def test_a_failed_load_labels_tokens_as_unknown_and_keeps_the_gate_closed(failure: str):
    replica = started()
    before = await replica.checksum()
    await replica.pause()
    if failure == "digest":
        replica.backend.loads = "other"
    else:
        replica.backend.fault = EngineError("no memory") if failure == "engine" else OSError("no connection")
    with pytest.raises(EngineError):
        await replica.load(update())
    assert replica.backend.calls == [UNKNOWN_LABEL]
    with pytest.raises(EngineError):
        await replica.resume()
    assert replica.weights == FIRST and await replica.checksum() == before
    replica.backend.loads, replica.backend.fault = SECOND.digest, None
    await replica.load(update())
    await replica.resume()
    assert replica.backend.calls == [UNKNOWN_LABEL, weight_label(SECOND), "resume"]


async def test_an_update_that_is_refused_leaves_the_weights_verified():
    replica = started()
    await replica.pause()
    replica.backend.refused = ContractError("lacks tensors")
    with pytest.raises(EngineError):
        await replica.load(update())
    await replica.resume()
    assert replica.backend.calls == ["resume"]


async def test_an_abort_after_a_load_ends_a_frozen_request():
    replica = started()
    task = await in_flight(replica)
    await replica.pause()
    assert await replica.freeze() == 1
    await replica.load(update(), kv="keep")
    assert await replica.abort() == 1
    [segment] = await task
    assert segment.stop_reason is StopReason.ABORT
    assert (await replica.stats()).tokens_sampled == 1


async def test_a_freeze_with_nothing_in_flight_does_not_call_the_engine():
    replica = started()
    await replica.pause()
    assert await replica.freeze() == 0
    assert replica.backend.calls == []


@pytest.mark.parametrize(
    ("fault", "kind"), [(ContractError("nan"), AnswerError), (EngineError("out of memory"), EngineError)]
)
async def test_generate_raises_answer_error_for_an_answer_that_breaks_the_contract(
    fault: Exception, kind: type[Exception]
):
    replica = started()
    replica.backend.fault = fault
    replica.backend.go.set()
    with pytest.raises(EngineError) as caught:
        await replica.generate(ask())
    assert type(caught.value) is kind
    assert (await replica.stats()).in_flight == 0


async def test_a_request_that_the_backend_refuses_is_not_decoded():
    replica = started()
    replica.backend.refused = ContractError("GenerateRequest.existing_rows")
    with pytest.raises(EngineError, match="existing_rows") as caught:
        await replica.generate(ask())
    assert type(caught.value) is EngineError


async def test_death_of_the_engine_ends_every_call_with_replica_lost():
    replica = started()
    running = await in_flight(replica)
    await replica.pause()
    waiting = asyncio.create_task(replica.generate(ask("b")))
    draining = asyncio.create_task(replica.drain())
    await asyncio.sleep(0)
    replica.backend.die("process 7 died")
    for call in (running, waiting, draining, replica.abort(), replica.load(update()), replica.resume()):
        with pytest.raises(ReplicaLostError, match="process 7 died"):
            await call


async def test_an_error_of_a_dead_engine_is_replica_lost():
    replica = started()
    running = await in_flight(replica)
    replica.backend.fault = EngineError("connection")
    replica.backend.go.set()
    replica.backend.die("process 7 died")
    with pytest.raises(ReplicaLostError):
        await running


async def test_calls_that_take_too_long_name_the_bound():
    replica = started(dataclasses.replace(CONFIG, load_timeout_s=0.01))
    await replica.pause()

    async def never(*args: object, **options: object) -> EngineLoad:
        await asyncio.Event().wait()
        raise AssertionError

    replica.backend.load = never
    with pytest.raises(EngineError, match=r"engine\.load_timeout_s"):
        await replica.load(update())


async def test_close_stops_the_engine_once():
    replica = started()
    running = await in_flight(replica)
    await replica.close()
    await replica.close()
    assert replica.backend.calls == ["close"]
    with pytest.raises(ReplicaLostError):
        await running
