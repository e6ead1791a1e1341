"""The driver's handle and a replica's actor, over real Ray, with a fake engine behind: bulk, control, failures."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from agent_loop.engine import AnswerError, EngineError, GenerateRequest, ReplicaLostError
from async_rl.actors import REPLICA_GROUPS, ClusterConfig, ReplicaHost, start_ray
from async_rl.handles import ReplicaHandle
from message_queue.tokens import StopReason
from tests.fakes import FakeEngine, fake_weights

pytestmark = [pytest.mark.filterwarnings("ignore")]


class ClosableEngine(FakeEngine):
    async def close(self) -> None:
        self.die("closed")


class FakeHost(ReplicaHost):
    """A replica whose engine is a fake."""

    async def start(self, *, token_s: float, line: str = "") -> None:  # type: ignore[override]
        engine = await asyncio.create_subprocess_exec("echo", line)
        await engine.wait()

        def fail(request: GenerateRequest) -> Exception | None:
            return AnswerError("fake-0: request bad.: nonsense") if request.request_id == "bad." else None

        self._serve(ClosableEngine(lambda _ids: 7, token_s=token_s, fail=fail))  # type: ignore[arg-type]

    @ray.method(concurrency_group="generate")
    async def in_flight(self) -> int:
        engine: Any = self._replica
        return engine.in_flight

    @ray.method(concurrency_group="control")
    async def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def fake_replica(
    *, token_s: float = 0.0, generate_timeout_s: float = 60.0, log: Path | None = None, line: str = ""
) -> tuple[ReplicaHandle, Any]:
    actor = ray.remote(concurrency_groups=REPLICA_GROUPS)(FakeHost).options(num_cpus=1).remote(log=log)
    await actor.start.options(concurrency_group="generate").remote(token_s=token_s, line=line)
    handle = ReplicaHandle(actor, name="fake-0", generate_timeout_s=generate_timeout_s, control_timeout_s=20.0, log=log)
    return handle, actor


def request(name: str, *, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(request_id=f"{name}.", token_ids=np.array([1, 2], np.int32), max_new_tokens=tokens)


async def until_in_flight(actor: Any, count: int) -> None:
    while await actor.in_flight.remote() != count:  # noqa: ASYNC110 - an actor has no event to wait on
        await asyncio.sleep(0.01)


async def test_pause_and_abort_answer_beside_two_thousand_generations(cluster: None):
    replica, actor = await fake_replica(token_s=1.0)  # all of them outlast the time-out of a control call
    tasks = [asyncio.create_task(replica.generate(request(f"r{i}", tokens=5000))) for i in range(2000)]
    await until_in_flight(actor, 2000)
    await replica.pause()
    assert await replica.abort() == 2000
    results = await asyncio.gather(*tasks)
    assert {segments[-1].stop_reason for segments in results} == {StopReason.ABORT}
    held = asyncio.create_task(replica.generate(request("held")))
    assert await replica.load(fake_weights(1)) == fake_weights(1)  # type: ignore[arg-type]
    await replica.resume()
    assert (await held)[0].weights == fake_weights(1)
    await replica.close(timeout_s=5)


async def test_a_refused_answer_reaches_its_caller_as_such_and_harms_no_other(cluster: None):
    replica, _ = await fake_replica()
    bad, good = await asyncio.gather(
        replica.generate(request("bad")), replica.generate(request("good")), return_exceptions=True
    )
    assert isinstance(bad, AnswerError)
    assert isinstance(good, list)
    await replica.close(timeout_s=5)


async def test_a_cancelled_caller_ends_its_request_in_the_engine(cluster: None):
    replica, actor = await fake_replica(token_s=0.01)
    task = asyncio.create_task(replica.generate(request("long", tokens=100_000)))
    await until_in_flight(actor, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_in_flight(actor, 0)
    await replica.close(timeout_s=5)


async def test_a_request_that_takes_too_long_fails_by_name_and_leaves_the_engine(cluster: None):
    replica, actor = await fake_replica(token_s=0.01, generate_timeout_s=0.5)
    with pytest.raises(EngineError, match=r"request slow\. took longer than engine\.generate_timeout_s=0\.5"):
        await replica.generate(request("slow", tokens=100_000))
    await until_in_flight(actor, 0)
    await replica.close(timeout_s=5)


async def test_an_id_in_flight_is_refused(cluster: None):
    replica, _ = await fake_replica(token_s=0.01)
    task = asyncio.create_task(replica.generate(request("same", tokens=100)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="already in flight"):
        await replica.generate(request("same"))
    assert len((await task)[0]) == 100
    await replica.close(timeout_s=5)


async def test_a_dead_process_fails_every_caller_and_every_control_call(cluster: None):
    replica, actor = await fake_replica(token_s=0.05)
    tasks = [asyncio.create_task(replica.generate(request(f"r{i}", tokens=5000))) for i in range(20)]
    await until_in_flight(actor, 20)
    actor.die.remote()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ReplicaLostError}
    with pytest.raises(ReplicaLostError, match="fake-0: process died during pause"):
        await replica.pause()
    with pytest.raises(ReplicaLostError, match="fake-0"):
        await replica.generate(request("later"))


async def test_a_killed_replica_shows_the_end_of_its_log(cluster: None, tmp_path: Path):
    log = tmp_path / "fake-0.log"
    replica, _ = await fake_replica(token_s=0.05, log=log, line="out of memory")
    tasks = [asyncio.create_task(replica.generate(request(f"r{i}", tokens=5000))) for i in range(3)]
    os.kill(await replica.pid(), signal.SIGKILL)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, ReplicaLostError)
        (note,) = outcome.__notes__
        assert note.splitlines()[0] == f"the end of {log}:" and "    out of memory" in note.splitlines()
        assert "\n" not in str(outcome)


async def test_a_replica_whose_log_cannot_be_opened_works_and_says_so(cluster: None, tmp_path: Path):
    log = tmp_path / "no such folder" / "fake-0.log"
    replica, actor = await fake_replica(log=log)
    assert len((await replica.generate(request("one")))[-1]) > 0
    actor.die.remote()
    with pytest.raises(ReplicaLostError) as raised:
        await replica.generate(request("two", tokens=100_000))
    assert str(log) in raised.value.__notes__[0] and "no log" in raised.value.__notes__[0]
