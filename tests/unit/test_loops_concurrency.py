"""Many rollouts on one engine: control calls stay prompt, nothing is lost."""

import asyncio
import time

import numpy as np

from agent_loop.engine import SamplingConfig
from agent_loop.segments import SegmentDecoder
from message_queue.trajectory import Trajectory
from tests.fakes import SPEC, FakeEngine, SeededScript, fake_weights, true_rows


async def test_two_thousand_generations_are_aborted_updated_and_resumed_promptly():
    engine = FakeEngine(SeededScript(1, vocab_size=50, stop_token=0, mean_length=10), token_s=0.05)
    trajectories = [Trajectory(routing=SPEC) for _ in range(2000)]

    async def decode(i, trajectory):
        trajectory.observe(np.array([1 + i % 40, 1 + i // 40], np.int32))
        decoder = SegmentDecoder(
            engine, sampling=SamplingConfig(), stop_token_ids=(0,), session=f"s{i}", cache_salt="", timeout_s=60
        )
        await decoder.decode(trajectory, max_new_tokens=6)

    async with asyncio.TaskGroup() as rollouts:
        for i, trajectory in enumerate(trajectories):
            rollouts.create_task(decode(i, trajectory))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        await engine.pause()
        aborted = await engine.abort()
        taken = time.monotonic() - begun
        await engine.load(fake_weights(1))
        await engine.resume()

    assert aborted > 100
    assert taken < 1.0
    assert {int(v) for t in trajectories for v in t.param_versions()} >= {0, 1}
    for trajectory in trajectories[::100]:
        assert trajectory.num_rows == len(trajectory) - 1
        assert trajectory.routed_experts().tolist() == true_rows(trajectory).tolist()
