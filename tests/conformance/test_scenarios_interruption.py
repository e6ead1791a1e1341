"""A trajectory continues after an abort at any moment, with every token and one row per position."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from agent_loop.decoder import cut_segments
from message_queue.tokens import StopReason
from tests.conformance.checks import assert_merged, assert_true, assert_whole, rows_sent, sampled_of, versions_of
from tests.conformance.engines import MARKS, WITH_KV, prompts, tokens
from tests.helpers.dense import row_versions

pytestmark = MARKS


async def test_aborts_of_running_requests_two_at_once(tested):
    rollouts, tasks = tested.start_rollouts(prompts(3, step=15), max_new_tokens=150, cache_salt="v0")
    for _ in range(3):
        await tested.until_sampled(30)
        assert set(await asyncio.gather(tested.replica.abort(), tested.replica.abort())) == {3}
    assert await asyncio.gather(*tasks) == [StopReason.LENGTH] * 3
    assert await tested.replica.abort() == 0, "no request is left"
    assert sum(sampled_of(exchange) for exchange in tested.exchanges[:3]) >= 30, "every sampled token is returned"
    for rollout in rollouts:
        first, *others, rest = tested.of_session(rollout.name)
        assert all(exchange.answer[-1].stop_reason is StopReason.ABORT for exchange in (first, *others))
        assert sampled_of(first) >= 1
        assert rest.request.existing_rows == len(rest.request.token_ids) - 1, "all rows but the last token's are held"
        assert (rollout.decoder.num_aborts, rollout.trajectory.num_sampled) == (3, 150), "the budget is the first one"
    assert_whole(tested, *rollouts)


@WITH_KV
async def test_an_abort_of_requests_that_wait_for_a_place(tested):
    rollouts, tasks = tested.start_rollouts(prompts(38), max_new_tokens=60, cache_salt="v0")
    await tested.until_sampled(1)
    assert (await tested.publish("resume")).aborted == 38
    await asyncio.gather(*tasks)
    empty = [exchange for exchange in tested.exchanges if not sampled_of(exchange)]
    assert len(empty) >= 6, "32 run at once"
    for exchange in empty:
        [segment] = exchange.answer
        assert (segment.stop_reason, segment.routed_experts) == (StopReason.ABORT, None)
    assert {rollout.trajectory.num_sampled for rollout in rollouts} == {60}
    assert_whole(tested, *rollouts)


async def test_an_abort_leaves_requests_at_the_gate(tested):
    await tested.replica.pause()
    [rollout], [task] = tested.start_rollouts([tokens(12)], max_new_tokens=10)
    await asyncio.sleep(0.02)
    assert await tested.replica.abort() == 0, "the engine does not have it yet"
    await tested.replica.resume()
    assert await task is StopReason.LENGTH
    assert_whole(tested, rollout)


@pytest.mark.parametrize("update", [False, True], ids=["same-weights", "new-weights"])
async def test_a_resume_at_every_position_of_a_short_sequence(tested, update):
    """As after an abort at each token, also before the first one."""
    first = await tested.ask("whole", tokens(6), max_new_tokens=12)
    if update:
        await tested.publish("resume")
    rollouts = [tested.rollout(f"at-{sampled}.") for sampled in range(12)]
    for sampled, rollout in enumerate(rollouts):
        rollout.trajectory.observe(tokens(6))
        for segment in cut_segments(first.answer, count=sampled, first_position=6) if sampled else ():
            rollout.trajectory.extend(replace(segment, stop_reason=StopReason.ABORT))
    await asyncio.gather(*(rollout.resume(max_new_tokens=15 - sampled) for sampled, rollout in enumerate(rollouts)))
    assert_true(tested, tested.exchanges)
    written = first.answer[0].token_ids
    for sampled, rollout in enumerate(rollouts):
        trajectory, [rest] = rollout.trajectory, tested.of_session(rollout.name)
        assert versions_of(rest) == [int(update)]
        assert rows_sent([rest]) == list(range(max(0, 5 + sampled), 20)) if sampled else list(range(20))
        assert (len(trajectory), trajectory.num_rows) == (21, 20)
        assert trajectory.token_ids()[6 : 6 + sampled].tolist() == written[:sampled].tolist()
        held = np.flatnonzero(row_versions(trajectory.sequences()[-1]) == 0)
        assert len(held) == (20 if not update else 5 + sampled if sampled else 0), "no row changes its version"


async def test_held_rows_are_not_replaced_by_those_of_a_second_forward(tested):
    rollout = tested.rollout("held")
    await rollout.turn(tokens(20), max_new_tokens=20)
    await tested.publish("resume")
    again = await tested.ask("held", rollout.trajectory.token_ids(), existing_rows=0)
    rollout.trajectory.extend(again.answer[0])
    first, second = tested.of_session("held")
    assert rows_sent([second])[:39] == rows_sent([first]), "both brought rows of the same positions"
    assert_true(tested, [first, second])
    assert_merged(rollout.trajectory, [first, second])
    before, after = (exchange.answer[0].routed_experts for exchange in (first, second))
    assert (before.experts != after.experts[:39]).any(), "and not the same rows"
