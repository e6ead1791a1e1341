"""Many rollouts on a few engines: control calls reach all of them, and nothing is lost."""

import asyncio

import numpy as np
import pytest

from agent_loop.decoder import SegmentDecoder
from agent_loop.engine import SamplingConfig
from agent_loop.loop import TurnLimits
from async_rl.inference.router import ReplicaRouter
from message_queue.trajectory import Trajectory
from tests.helpers.dense import param_versions
from tests.helpers.fakes import SPEC, FakeEngine, SeededScript, fake_weights, true_rows

LIMITS = TurnLimits(max_turns=1, max_tokens=8, generate_timeout_s=60)


def fakes(count):
    script = SeededScript(1, vocab_size=50, stop_token=0, mean_length=10)
    return [FakeEngine(script, token_s=0.05, name=f"fake-{i}") for i in range(count)]


async def decode(engine, i, trajectory):
    trajectory.observe(np.array([1 + i % 40, 1 + i // 40], np.int32))
    decoder = SegmentDecoder(
        engine, sampling=SamplingConfig(), stop_token_ids=(0,), session=f"s{i}", cache_salt="", limits=LIMITS
    )
    await decoder.decode(trajectory, max_new_tokens=6)


@pytest.mark.parametrize("on_update", ["resume", "keep"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_two_thousand_generations_are_held_up_updated_and_resume(on_update, replicas):
    engines = fakes(replicas)
    router = ReplicaRouter(engines)
    trajectories = [Trajectory(routing=SPEC) for _ in range(2000)]

    async with asyncio.TaskGroup() as rollouts:
        for i, trajectory in enumerate(trajectories):
            rollouts.create_task(decode(router, i, trajectory))
        await asyncio.sleep(0.2)
        await asyncio.gather(*(e.pause() for e in engines))
        stopped = await asyncio.gather(*(e.abort() if on_update == "resume" else e.freeze() for e in engines))
        await asyncio.gather(*(e.load(fake_weights(1)) for e in engines))
        await asyncio.gather(*(e.resume() for e in engines))

    assert min(stopped) > 100
    assert {int(v) for t in trajectories for v in param_versions(t)} >= {0, 1}
    assert sum(len(e.requests) for e in engines) == 2000 + (sum(stopped) if on_update == "resume" else 0)
    for trajectory in trajectories[::100]:
        assert trajectory.num_rows == len(trajectory) - 1
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()


async def test_a_thousand_generations_leave_a_dead_replica():
    first, second = fakes(2)
    router = ReplicaRouter([first, second])
    trajectories = [Trajectory(routing=SPEC) for _ in range(2000)]
    async with asyncio.TaskGroup() as rollouts:
        for i, trajectory in enumerate(trajectories):
            rollouts.create_task(decode(router, i, trajectory))
        await asyncio.sleep(0.1)
        held = first.in_flight
        first.die()
        while first.in_flight:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0.01)
    assert held > 500
    for trajectory in trajectories[::100]:
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
