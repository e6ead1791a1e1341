"""Defects of what follows on an answer: its tokens in the rollout, and the advantage of its reward."""

from dataclasses import replace

import numpy as np

from agent_loop.decoder import SegmentDecoder
from async_rl.trainer.batch.advantage import batch_rewards
from message_queue.tokens import StopReason
from tests.simulator.defects import defect


@defect("kept")
class AbortedPartialIsSampledAgain(SegmentDecoder):
    def _append(self, trajectory, answer):
        return answer[-1].stop_reason is not StopReason.ABORT and super()._append(trajectory, answer)


@defect("advantage", of=batch_rewards)
def advantages_are_relative_to_the_batch(groups, config):
    made = batch_rewards(groups, config)
    return replace(made, groups=np.zeros_like(made.groups))


@defect("advantage", of=batch_rewards)
def advantages_are_those_of_the_next_rollout(groups, config):
    made = batch_rewards(groups, config)
    return replace(made, values=np.roll(made.values, 1))
