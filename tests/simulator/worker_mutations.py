"""Defects of the dispatcher, of the content that rollout workers store, and of the boundary around user code."""

import asyncio
import contextlib

from agent_loop.boundary import call_function
from async_rl.cluster.replica import ReplicaClient
from async_rl.inference.supervisor import Supervisor
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.worker import RolloutWorker
from async_rl.simulator.run import WatchedDispatcher
from tests.simulator.defects import defect

CANCELS = ("reward lets out a cancel", "tool lets out a cancel", "agent lets out a cancel")
DIES = ("worker dies", "worker hangs")


@defect("progress", kinds=DIES)
class GroupsOfADeadWorkerAreNotHandedOut(WatchedDispatcher):
    async def _stored(self, group):
        await asyncio.Event().wait()


@defect("failure", "exactly once", kinds=DIES, seed=942)
class RequestsOfADeadWorkerStayInTheEngine(ReplicaClient):
    async def forget_client(self, client):
        return


@defect("tools")
class ToolsArePausedInTheFirstWorkerOnly(WatchedDispatcher):
    async def pause(self):
        self._tools_paused = self.tools_paused = True
        for member in self._live[:1]:
            with contextlib.suppress(WorkerLostError):
                await member.worker.call(RolloutWorker.adopt, True, self._avoided)


@defect("versions", "failure", "progress", kinds=("successor dies",))
class DeadSuccessorStaysInThePool(Supervisor):
    def __init__(self, pool, publisher, **options):
        super().__init__(pool, publisher, **options)
        first, lose = pool.members, pool.lose
        pool.lose = lambda member, **why: lose(member, **why) if member in first else None


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
