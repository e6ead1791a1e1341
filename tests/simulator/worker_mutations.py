"""Defects of the dispatcher, and of the content that rollout workers store."""

import asyncio
import contextlib
import itertools

from async_rl.cluster.replica import ReplicaClient
from async_rl.cluster.worker import WorkerClient
from async_rl.inference.supervisor import Supervisor
from async_rl.rollout.content import reader
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.worker import RolloutWorker
from async_rl.simulator.run import Run, WatchedDispatcher
from tests.simulator.defects import defect

DIES = ("worker dies", "worker hangs")


@defect("progress", kinds=DIES)
class GroupsOfADeadWorkerAreNotHandedOut(WatchedDispatcher):
    async def _stored(self, group):
        await asyncio.Event().wait()


@defect("exactly once", kinds=DIES)
class SuccessorStartsWithoutTheExistingTokens(WatchedDispatcher):
    async def _stored(self, group):
        await super()._stored(group)
        return ()


@defect("failure", "exactly once", kinds=DIES, seed=942)
class RequestsOfADeadWorkerStayInTheEngine(ReplicaClient):
    async def forget_client(self, client):
        return


@defect("exactly once", "failure")
class TwoWorkersRollOutAGroup(WatchedDispatcher):
    async def roll(self, prompt, admission, **options):
        twin = asyncio.create_task(super().roll(prompt, admission, **options))
        try:
            return await super().roll(prompt, admission, **options)
        finally:
            twin.cancel()


@defect("tools")
class ToolsArePausedInTheFirstWorkerOnly(WatchedDispatcher):
    async def pause(self):
        self._tools_paused = self.tools_paused = True
        for member in self._live[:1]:
            with contextlib.suppress(WorkerLostError):
                await member.worker.call(RolloutWorker.adopt, True, self._avoided)


@defect("exactly once", of=reader._order, kinds=DIES)
def records_of_workers_in_the_order_of_each(one):
    return one[0]


@defect("exactly once")
class HandoutsStartAgainAtARestart(WatchedDispatcher):
    async def open(self, place, *, live):
        await super().open(place, live=live)
        self._handouts = itertools.count()


@defect("progress", kinds=("worker hangs",))
class HungWorkerIsWaitedFor(WorkerClient):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._bounds["events"] = None


@defect("versions", "failure", "progress", kinds=("successor dies",))
class DeadSuccessorStaysInThePool(Supervisor):
    def __init__(self, pool, publisher, **options):
        super().__init__(pool, publisher, **options)
        first, lose = pool.members, pool.lose
        pool.lose = lambda member, **why: lose(member, **why) if member in first else None


@defect("failure", "progress", kinds=("engine dies", "process dies", "process hangs"))
class RunWithoutAReplicaGoesOn(Supervisor):
    def __init__(self, pool, publisher, **options):
        super().__init__(pool, publisher, **options)
        pool.until_none = asyncio.Event().wait


@defect("exactly once", kinds=DIES)
class NewWorkerStoresNothing(Run):
    async def start_worker(self, **options):
        worker = await super().start_worker(**options)
        call = worker.call

        async def call_but_open(method, /, *args, **options):
            return None if method is RolloutWorker.open else await call(method, *args, **options)

        worker.call = call_but_open
        return worker
