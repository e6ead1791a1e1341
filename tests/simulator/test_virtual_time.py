"""The loop whose clock jumps."""

import asyncio

import pytest

from async_rl.simulator.virtual_time import Deadlock, VirtualTimeLoop, run_in_virtual_time


def test_a_wait_costs_no_time_moves_the_clock_and_ends_with_a_time_out():
    async def wait():
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(wait()) == pytest.approx(7205)


def test_a_deadlock_is_an_error():
    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_in_virtual_time(wait())


def test_work_of_a_thread_runs_later_on_the_loop():
    async def work():
        loop = asyncio.get_running_loop()
        loop.thread_s = lambda: 2.0
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.to_thread(loop.time)

    assert run_in_virtual_time(work()) == pytest.approx(4)


def test_sets_of_tasks_are_ordered_by_their_number():
    async def make():
        tasks = [asyncio.create_task(asyncio.sleep(i)) for i in range(20)]
        await asyncio.gather(*tasks)
        return [task.number for task in set(tasks)] == sorted(task.number for task in tasks)

    assert run_in_virtual_time(make())


def test_a_turn_that_raises_ends_the_loop():
    def stop():
        loop.on_turn = lambda: None
        raise ZeroDivisionError

    loop = VirtualTimeLoop()
    loop.on_turn = stop
    with pytest.raises(ZeroDivisionError), asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.sleep(1))


@pytest.mark.virtual_time
async def test_a_marked_test_runs_on_a_virtual_time_loop():
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
