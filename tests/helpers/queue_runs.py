"""A queue with a journal that is driven by random calls, and journals as a kill leaves them."""

import asyncio
import shutil

from message_queue.contract import Batch
from message_queue.policies import build_policy
from message_queue.recovery import JournalPlace, open_queue
from message_queue.staleness import StalenessConfig
from tests.helpers.groups import head_for


def place(directory, *, step=0, checkpoint=None, **changes):
    return JournalPlace(
        **{"directory": directory, "run": "run", "checkpoint": checkpoint, "train_step": step, "busy_s": 0.0} | changes
    )


async def opened(directory, *, s=1, b=2, policy="wait", p=1, max_recycles=3, **options):
    """(queue, journal, restored)."""
    return await open_queue(
        place(directory, **options),
        policy=build_policy(
            StalenessConfig(max_staleness=s, policy=policy, max_recycles=max_recycles),
            batch_groups=b,
            updates_per_batch=p,
        ),
    )


def copied(directory, to):
    """The files of a journal as a kill leaves them."""
    shutil.copytree(directory, to)
    return to


class Drive:
    """Makes calls, and knows in which state each group is."""

    def __init__(self, queue, *, rng, p=1):
        self.queue, self.rng, self.p = queue, rng, p
        self.groups, self.admissions, self.batches = {}, {}, {}
        self.step = self.version = self.prompt = self.saved = 0
        self.batch: Batch | None = None
        self.checkpoint = None

    async def call(self, *names):
        await getattr(self, self.rng.choice(names))()

    async def admit(self):
        if not self.queue._can_admit():
            return
        admission = await self.queue.admit(self.prompt)
        self.prompt += admission.prompt == self.prompt
        self.groups[admission.group], self.admissions[admission.group] = "open", admission

    async def put(self):
        group = self.pick("open")
        if group is not None:
            versions = (self.admissions[group].admitted_version, (await self.queue.snapshot()).version)
            result = await self.queue.put(head_for(self.admissions[group], versions=versions))
            self.groups[group] = "ready" if result is None else "dropped"

    async def drop(self):
        group = self.pick("open")
        if group is not None:
            await self.queue.drop(group, reason="rollout failed: why", segments=1, tokens=2)
            self.groups[group] = "dropped"

    async def expire(self):
        for group in self.queue._expired_open():
            await self.queue.drop(group, reason="expired: too slow", expired=True)
            self.groups[group] = "dropped"

    async def take(self):
        if self.batch is None and self.queue._batch_ready():
            self.batch = await self.queue.take()
            self.groups |= dict.fromkeys((g.group for g in self.batch.groups), "taken")
            ready = self.queue._state.ready
            self.groups |= {g: "dropped" for g in self.of("ready") if g not in ready}

    async def train(self):
        if self.batch is None:
            return
        self.step += self.p
        groups = [g.group for g in self.batch.groups]
        await self.queue.trained(groups, train_step=self.step)
        self.groups |= dict.fromkeys(groups, self.step)
        self.batches[self.batch.update] = groups
        self.batch = None
        if self.rng.random() < 0.7:
            self.version += 1
            await self.queue.publish(self.version, update=self.step)
            await self.queue.loaded(self.version)

    async def save(self):
        if self.batch is None:
            await self.queue.sync()
            self.checkpoint, self.saved = await self.queue.snapshot(), self.step
            if self.rng.random() < 0.7:  # else killed before the journal heard of it
                await self.queue.checkpointed(self.step)

    def pick(self, state):
        return self.rng.choice(self.of(state) or [None])

    def of(self, *states):
        return [group for group, state in self.groups.items() if state in states]

    @property
    def live(self):
        """Groups that a restart from the checkpoint has to give back."""
        later = [g for g, state in self.groups.items() if isinstance(state, int) and state > self.saved]
        return {*self.of("open", "ready", "taken"), *later}


CALLS = ("admit", "admit", "admit", "put", "put", "put", "put", "drop", "expire", "take", "take", "train", "save")


def run(coroutine):
    return asyncio.run(coroutine)
