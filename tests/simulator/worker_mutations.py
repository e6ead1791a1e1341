"""Defects planted in the dispatcher, and in what rollout workers store."""

import asyncio
import contextlib

from async_rl.cluster.clients import ReplicaHandle
from async_rl.cluster.rollout_workers import WorkerHandle
from async_rl.rollout import dispatcher
from async_rl.rollout.dispatcher import Dispatcher, WorkerLostError
from message_queue import content_reader


def groups_of_a_dead_worker_that_are_not_handed_out_again(patch):
    async def stored(self, group):
        await asyncio.Event().wait()

    patch.setattr(Dispatcher, "_stored", stored)


def a_successor_that_starts_without_the_held_tokens(patch):
    whole = Dispatcher._stored

    async def stored(self, group):
        await whole(self, group)
        return ()

    patch.setattr(Dispatcher, "_stored", stored)


def requests_of_a_dead_worker_that_stay_in_the_engine(patch):
    async def forget_client(self, client):
        return

    patch.setattr(ReplicaHandle, "forget_client", forget_client)


def a_group_that_two_workers_roll_out(patch):
    whole = Dispatcher.roll

    async def roll(self, prompt, admission, **of):
        twin = asyncio.create_task(whole(self, prompt, admission, **of))
        try:
            return await whole(self, prompt, admission, **of)
        finally:
            twin.cancel()

    patch.setattr(Dispatcher, "roll", roll)


def tools_that_are_paused_in_the_first_worker_only(patch):
    async def pause(self):
        self._tools_paused = True
        for member in self._live[:1]:
            with contextlib.suppress(WorkerLostError):
                await member.worker.pause_tools()

    patch.setattr(Dispatcher, "pause", pause)


def records_of_several_workers_in_the_order_of_each(patch):
    patch.setattr(content_reader, "_order", lambda one: one[0])


def handouts_that_are_numbered_from_0_at_a_restart(patch):
    patch.setattr(dispatcher, "MAX_HANDOUTS", 0)


def a_worker_that_hangs_and_is_waited_for(patch):
    async def events(self):
        return await self._answer("events", self._actor.events.remote())

    patch.setattr(WorkerHandle, "events", events)


def a_new_worker_that_stores_nothing(patch):
    whole = Dispatcher._start_successor

    async def start_successor(self, processes, lost):
        place, self._place = self._place, None
        try:
            return await whole(self, processes, lost)
        finally:
            self._place = place

    patch.setattr(Dispatcher, "_start_successor", start_successor)


DIES = ("worker dies", "worker hangs")
WORKER_MUTATIONS = (
    (groups_of_a_dead_worker_that_are_not_handed_out_again, ("progress",), *DIES),
    (a_successor_that_starts_without_the_held_tokens, ("exactly once",), *DIES),
    (requests_of_a_dead_worker_that_stay_in_the_engine, ("failure", "exactly once"), *DIES),
    (a_group_that_two_workers_roll_out, ("exactly once", "failure")),
    (tools_that_are_paused_in_the_first_worker_only, ("tools",)),
    (records_of_several_workers_in_the_order_of_each, ("exactly once",), *DIES),
    (handouts_that_are_numbered_from_0_at_a_restart, ("exactly once",)),
    (a_worker_that_hangs_and_is_waited_for, ("progress",), "worker hangs"),
    (a_new_worker_that_stores_nothing, ("exactly once",), *DIES),
)
