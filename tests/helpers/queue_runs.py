"""Queues with and without a journal, random calls to them, and journals after a kill."""

import shutil
from collections import Counter
from pathlib import Path

from message_queue.ledger import Drop, DropKind
from message_queue.policies import StalenessConfig, build_policy
from message_queue.queue import Batch, TrajectoryQueue
from message_queue.recovery import JournalPlace, open_queue, state_of_checkpoint
from tests.helpers.groups import head_for


def place(directory, *, step=0, checkpoint=None, **changes):
    return JournalPlace(
        **{"directory": directory, "run": "run", "checkpoint": checkpoint, "train_step": step, "busy_s": 0.0} | changes
    )


def policy_of(*, s, b, policy, p, max_requeues):
    config = StalenessConfig(max_staleness=s, policy=policy, max_requeues=max_requeues)
    return build_policy(config, batch_groups=b, updates_per_batch=p)


def make_queue(*, s=1, b=2, policy="wait", p=1, max_requeues=3, max_ready=None, restored=None) -> TrajectoryQueue:
    """A queue without a journal; `restored` is the snapshot that it continues from."""
    return TrajectoryQueue(
        policy_of(s=s, b=b, policy=policy, p=p, max_requeues=max_requeues),
        max_ready=max_ready,
        state=restored and state_of_checkpoint(place(Path(), checkpoint=restored)),
    )


async def opened(directory, *, s=1, b=2, policy="wait", p=1, max_requeues=3, **options):
    """(queue, journal, restored)."""
    made = policy_of(s=s, b=b, policy=policy, p=p, max_requeues=max_requeues)
    return await open_queue(place(directory, **options), policy=made)


async def reopened(directory, **options):
    """(restored, snapshot) of a journal that is opened and closed."""
    queue, journal, restored = await opened(directory, **options)
    snapshot = await queue.snapshot()
    await journal.close()
    return restored, snapshot


def copied(directory, to):
    """The files that a kill leaves of a journal."""
    shutil.copytree(directory, to)
    return to


class Drive:
    """Makes random calls, knows the state of each group, and checks the staleness of each batch."""

    def __init__(self, queue, *, rng, s, p=1):
        self.queue, self.rng, self.s, self.p = queue, rng, s, p
        self.groups, self.admissions, self.batches = {}, {}, {}
        self.step = self.version = self.prompt = self.saved = 0
        self.batch: Batch | None = None
        self.checkpoint = None

    async def call(self, *names):
        await getattr(self, self.rng.choice(names))()

    async def admit(self):
        if not self.queue._can_admit():
            return
        waiting = (await self.queue.snapshot()).waiting
        admission = await self.queue.admit(self.prompt)
        assert (admission.group, admission.prompt) == (len(self.groups), waiting[0] if waiting else self.prompt)
        self.prompt += admission.prompt == self.prompt
        self.groups[admission.group], self.admissions[admission.group] = "open", admission

    async def put(self):
        group = self.pick("open")
        if group is not None:
            first, last = self.admissions[group].admitted_version, (await self.queue.snapshot()).version
            versions = (first, self.rng.randint(first, last), last)
            result = await self.queue.put(head_for(self.admissions[group], versions=versions))
            self.groups[group] = "ready" if result is None else "dropped"

    async def drop(self):
        group = self.pick("open")
        if group is not None:
            await self.queue.drop(group, reason=Drop(DropKind.ROLLOUT_FAILED, "why"), segments=1, tokens=2)
            self.groups[group] = "dropped"

    async def expire(self):
        for group in self.queue._expired_open():
            await self.queue.drop(group, reason=Drop(DropKind.EXPIRED, "too slow"), tokens=1)
            self.groups[group] = "dropped"

    async def take(self):
        if self.batch is None and self.queue._batch_ready():
            expected = self.by_turn()[: self.queue._policy.batch_groups]
            self.batch = await self.queue.take()
            assert [head.group for head in self.batch.groups] == expected
            assert not self.too_old()
            self.groups |= dict.fromkeys((g.group for g in self.batch.groups), "taken")
            ready = self.queue._state.ready
            self.groups |= {g: "dropped" for g in self.of("ready") if g not in ready}

    def by_turn(self):
        """Ready groups in the order of the policy."""
        state, policy = self.queue._state, self.queue._policy
        if state.replay:
            return list(state.replay[0])
        ready = list(state.ready.values())
        if policy.oldest_first:
            ready.sort(key=lambda group: (group.admitted_update, group.group))
        return [group.group for group in ready]

    def too_old(self):
        """Ready groups that no later batch may hold, without those that a restart trains another time."""
        state, queue = self.queue._state, self.queue
        again = {group for batch in state.replay for group in batch}
        ages = {group: (each.admitted_update, state.newest_update(each.head)) for group, each in state.ready.items()}
        return [group for group, age in ages.items() if queue._expiry(*age) is not None and group not in again]

    async def train(self):
        if self.batch is None:
            return
        self.step += self.p
        groups = [g.group for g in self.batch.groups]
        tokens = [self.tokens_with_gradient(group) for group in self.batch.groups]
        await self.queue.trained(groups, train_step=self.step, tokens=tokens)
        self.groups |= dict.fromkeys(groups, self.step)
        self.batches[self.batch.update] = groups
        self.batch = None
        if self.rng.random() < 0.7:
            await self.publish()

    def tokens_with_gradient(self, group):
        """Their number; the bound separates them from the masked ones."""
        batch, last = self.batch, self.batch.update + self.p - 1
        updates = Counter()
        for version, tokens in group.tokens_per_version().items():
            updates[batch.version_updates[version]] += tokens
        young = {update: tokens for update, tokens in updates.items() if update >= batch.min_update}
        assert young and set(young) == {update for update in updates if last - update <= self.s}
        return sum(young.values())

    async def publish(self):
        self.version += 1
        await self.queue.publish(self.version, update=self.step)
        await self.queue.loaded(self.version)

    async def save(self):
        if self.batch is None:
            await self.queue.sync()
            self.checkpoint, self.saved = await self.queue.snapshot(), self.step
            if self.rng.random() < 0.7:  # else killed before the journal knows
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
