"""Defects of the treatment of groups and tokens that are too old, and of rollouts that failed."""

from dataclasses import replace
from itertools import count

from async_rl.controller.prepare import mini_batches_of, prepare
from async_rl.rollout.rollouter import Rollouter
from message_queue.events import Trained
from message_queue.heads import TrajectoryHead
from message_queue.policies import build_policy
from message_queue.recovery import recover
from message_queue.state import QueueState
from message_queue.training_sequence import content_of
from tests.simulator.defects import defect

FAILS = ("reward fails", "tool is broken", "gives up", "no end of a reward")


@defect("exactly once")
class NewPromptsOvertakeARecycledOne(QueueState):
    def next_admission(self, prompt):
        admission = super().next_admission(prompt)
        return replace(admission, prompt=prompt) if self.next_group % 2 else admission


@defect("exactly once", of=recover, seed=74)
def restart_forgets_requeued_prompts(*args, **options):
    state, restored = recover(*args, **options)
    state.returned.clear()
    return state, replace(restored, waiting=())


@defect("exactly once", of=recover)
def restart_forgets_how_often_a_prompt_was_requeued(*args, **options):
    state, restored = recover(*args, **options)
    state.requeues.clear()
    return state, restored


@defect("failure", "exactly once", kinds=FAILS)
class RestartForgetsReplacementsOfFailedRollouts(Rollouter):
    async def roll(self, prompt, admission, *, existing=(), handout=0):
        return await super().roll(prompt, admission, existing=existing[: self._n], handout=handout)


@defect("staleness", of=prepare)
def old_tokens_take_gradient(batch, contents, config, **options):
    return prepare(replace(batch, min_update=0), contents, config, **options)


@defect("ledger")
class MaskedTokensAreNotCounted(QueueState):
    def apply(self, event):
        super().apply(event)
        if isinstance(event, Trained):
            self._counts["masked_tokens"] = 0


class HeadOfAFailedRollout(TrajectoryHead):
    failed = False


@defect("provenance", "exactly once", of=content_of, also=HeadOfAFailedRollout, kinds=FAILS)
def failed_rollout_is_trained(group):
    return tuple(tuple(trajectory.sequences()) for trajectory in group.trajectories)


@defect("failure", kinds=FAILS)
class FailedRolloutIsNotReplaced(Rollouter):
    async def _member(self, roll, number):
        await self._run(roll, number)


@defect("staleness", of=build_policy)
def batch_is_as_old_as_its_first_mini_batch(config, **options):
    policy = build_policy(config, **options)
    policy.staleness = lambda admitted, *, next_update: next_update - admitted
    return policy


SPLITS = count()


@defect("exactly once", "versions", of=mini_batches_of)
def repeated_batch_is_split_differently(groups, **options):
    return mini_batches_of(groups, **{**options, "seed": next(SPLITS)})
