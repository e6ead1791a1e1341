"""A run over rows that are shuffled in each epoch."""

import asyncio

from async_rl import Task
from tests.flow.crashes import Life

ROWS = [f"row {number}" for number in range(23)]


def order():
    """As each start of a run makes it."""
    task = Task(prompts=ROWS, rewards=lambda completion: 0.0)
    task.seed = 3
    return task


async def test_a_resumed_run_continues_with_the_next_row_of_the_epoch(tmp_path):
    rolled = {}

    def note(prompt):
        text = prompt.messages[0].content
        assert rolled.setdefault(prompt.index, text) == text

    first = Life(tmp_path, order=order().train_prompt, loop_fail=note)
    run = asyncio.create_task(first.harness.run())
    await first.harness.trainer.three_done.wait()
    first.harness.parts.request_stop()
    assert not await run
    before = len(rolled)
    second = Life(tmp_path, order=order().train_prompt, loop_fail=note)
    assert second.start.train_step >= 3
    assert await second.harness.run()
    assert 0 < second.harness.restored.prompt_cursor < len(ROWS) < len(rolled) and before < len(rolled)
    assert sorted(rolled) == list(range(len(rolled))), "no row is skipped"
    epoch = [rolled[index] for index in range(len(ROWS))]
    assert sorted(epoch) == sorted(ROWS) != epoch, "each row once, in another order"
    assert rolled == {index: order().train_prompt(index).messages[0].content for index in rolled}
