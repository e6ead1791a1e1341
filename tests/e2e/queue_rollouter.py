"""A rollout worker in a process of its own, which imports little."""

import os

from async_rl.cluster.queue_host import QueueUnavailable
from async_rl.cluster.rpc import BatchingClient
from message_queue.content import ContentWriter
from message_queue.heads import head_of
from message_queue.queue import TrajectoryQueue
from message_queue.trajectory import PromptGroup
from tests.helpers.groups import SPEC, segment, trajectory
from tests.helpers.stored import records_of

TOKENS = 50_000  # 200 kB of rows, which is more than travels with a message
RUN = "run"


def made():
    return trajectory(segment(TOKENS, rows=(0, TOKENS + 1)), routing=SPEC)


class Rollouter:
    """Hands groups of one trajectory in; their content goes to files in `directory`."""

    def __init__(self, queue, directory):
        self.queue = BatchingClient(queue, name="rollouter", server="the queue", timeout_s=60.0, lost=QueueUnavailable)
        self.directory = directory
        self.writer = None

    async def open(self):
        self.writer = await ContentWriter.open(self.directory, name="rollouter", run=RUN, fsync=False)

    async def roll(self, prompt):
        admission = await self.queue.call(TrajectoryQueue.admit, prompt)
        group = PromptGroup(
            group=admission.group,
            prompt=prompt,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=[made()],
        )
        await self.writer.append(records_of(group.trajectories[0], group=group.group))
        await self.queue.call(TrajectoryQueue.put, head_of(group))

    async def pid(self):
        return os.getpid()
