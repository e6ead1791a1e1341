"""Many publishes in a row under load: nothing is lost, and each token is of the version that it names.

PUBLISHES=50 in the environment makes fifty of them, by each route and mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.transport import read_tensors, update_files
from tests.conformance.checks import assert_whole, versions_of
from tests.conformance.engines import MARKS, WITH_KV, EngineUnderTest, Rollout, prompts

pytestmark = [*MARKS, WITH_KV]
PUBLISHES = int(os.environ.get("PUBLISHES", "6"))
ALL = "PUBLISHES" in os.environ
TOKENS = 80
# K/V of other weights that `keep-keep` leaves in the prefix cache would serve an aborted request.
MODES = {"computed": ["resume", "resume", "keep-recompute", "keep-recompute", "drain"], "kept": ["keep-keep"]}


@pytest.mark.parametrize(
    ("route", "staged"),
    [("memory", False), ("broadcast", True), *[("memory", True), ("broadcast", False)] * ALL],
    ids=["memory-at_once", "broadcast-staged", *["memory-staged", "broadcast-at_once"] * ALL],
)
@pytest.mark.parametrize("kv", MODES)
async def test_many_publishes_under_load(tested: EngineUnderTest, kv: str, route: str, staged: bool, tmp_path: Path):
    """Between two publishes a random number of tokens is sampled, and one time in five all requests are aborted."""
    with tested.broadcast(tmp_path / "node") if route == "broadcast" else contextlib.nullcontext():
        await publish_under_load(tested, kv, staged=staged)


async def publish_under_load(tested: EngineUnderTest, kv: str, *, staged: bool) -> None:
    chance, published = random.Random(f"publishes {kv} {staged}"), 0
    rollouts: list[Rollout] = []
    while published < PUBLISHES:
        started, tasks = tested.start_rollouts(
            prompts(4, step=7),
            max_new_tokens=TOKENS,
            name=f"load-{published}",
            resume_routing="force",
            cache_salt=f"v{published}",
        )
        rollouts += started
        while published < PUBLISHES:
            with contextlib.suppress(AssertionError):  # all rollouts ended before
                await tested.until_more(chance.randint(1, 20))
            if all(task.done() for task in tasks):
                break
            if kv == "computed" and chance.random() < 0.2:
                await tested.replica.abort()
            await tested.publish(chance.choice(MODES[kv]), stays_slow=True, staged=staged)
            published += 1
        await tested.full_speed()
        await asyncio.gather(*tasks)
    assert {rollout.trajectory.num_sampled for rollout in rollouts} == {TOKENS}
    assert len({version for exchange in tested.exchanges for version in versions_of(exchange)}) > PUBLISHES // 2
    assert_whole(tested, *rollouts)


@pytest.mark.parametrize("staged", [False, True], ids=["at_once", "staged"])
async def test_an_engine_keeps_no_view_of_the_files_that_it_loaded(tested: EngineUnderTest, staged: bool):
    """Otherwise the next versions would get new files instead of overwriting these."""
    for version in (1, 0, 1):
        await tested.publish(version=version, staged=staged)
        for path in update_files(tested.update(version).path):
            tensors = {name: tensor.clone() for name, tensor in read_tensors(path)}
            assert MappedFiles().overwrite(path, tensors) is not None
