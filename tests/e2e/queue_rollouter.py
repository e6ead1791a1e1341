"""A rollouter in a process of its own, which imports little."""

import os

from async_rl.object_store import ObjectStore
from message_queue.client import QueueClient, QueueClientConfig
from message_queue.progress import RolloutRecord, Sampled, TrajectoryClosed
from message_queue.shards.handle import ShardedHandle
from message_queue.together import Together
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup
from tests.unit.groups import SPEC, segment, trajectory

CONFIG = QueueClientConfig(timeout_s=60.0, slice_s=5.0)
TOKENS = 50_000  # 200 kB of rows, which is more than travels with a message


def made():
    return trajectory(segment(TOKENS, rows=(0, TOKENS + 1)), routing=SPEC)


class Rollouter:
    """Hands groups of one trajectory in."""

    def __init__(self, queue, shards=()):
        memory = ObjectStore()
        actors = (queue, *shards)
        calls, *others = (Together(actor, name="rollouter", before_send=memory.store) for actor in actors)
        calls = ShardedHandle(calls, others) if shards else calls
        self.queue = QueueClient(calls, name="rollouter", routing=SPEC, config=CONFIG, memory=memory)

    async def roll(self, prompt, *, appended):
        admission, content = await self.queue.admit(prompt), made()
        if appended:
            (turn,) = content.turns
            end = TrajectoryClosed(stop_reason=StopReason.STOP, reward=1.0)
            for at, what in ((0, turn.observation), (2, Sampled(turn.segments[0])), (len(content), end)):
                await self.queue.append([RolloutRecord(group=admission.group, trajectory=0, at=at, what=what)])
        await self.queue.put(
            PromptGroup(
                group=admission.group,
                prompt=prompt,
                admitted_version=admission.admitted_version,
                admitted_update=admission.admitted_update,
                trajectories=[content],
            )
        )

    async def pid(self):
        return os.getpid()
