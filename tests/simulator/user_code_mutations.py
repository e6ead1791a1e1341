"""Defects of the boundary around tools, rewards and agents."""

import asyncio

from agent_loop.boundary import boundary, call_function
from async_rl.rollout.rollouter import Rollouter
from message_queue.errors import OvertimeError
from tests.simulator.defects import defect

CANCELS = ("reward lets out a cancel", "tool lets out a cancel", "agent lets out a cancel")


@defect("failure", "progress", of=boundary, kinds=CANCELS)
async def cancels_of_user_code_pass_through(work, *, name, timeout_s=None):
    try:
        async with asyncio.timeout(timeout_s):
            return await work()
    except TimeoutError as error:
        raise OvertimeError(name) from error


@defect("failure", "progress", of=call_function, kinds=("no end of a tool",))
async def user_functions_run_in_the_threads_of_the_loop(function, arguments, **_options):
    return await asyncio.to_thread(function, **arguments)


@defect("failure", "progress", kinds=CANCELS)
class RolloutThatLetsOutACancelHasEnded(Rollouter):
    async def _run(self, roll, number):
        try:
            return await super()._run(roll, number)
        except RuntimeError:
            return True
