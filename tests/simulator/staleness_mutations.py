"""Defects planted in what becomes of groups and tokens that are too old, and of rollouts that failed."""

from dataclasses import replace
from itertools import count

from async_rl.controller import prepare
from async_rl.controller.controller import Controller
from async_rl.rollout import worker
from async_rl.rollout.rollouter import Rollouter
from message_queue.contract import QueueSnapshot
from message_queue.heads import TrajectoryHead
from message_queue.policies import DropPolicy, RecyclePolicy
from message_queue.state import QueueState
from tests.simulator.restart_mutations import _patch_restarted


def a_recycled_prompt_that_is_forgotten(patch):
    whole = QueueState._drop

    def drop(self, event):
        whole(self, event)
        if event.requeue:
            self.requeued.pop()

    patch.setattr(QueueState, "_drop", drop)


def a_recycled_prompt_that_new_ones_overtake(patch):
    whole = QueueState.next_admission

    def next_admission(self, prompt):
        if self.next_group % 2:
            return replace(whole(self, prompt), prompt=prompt)
        return whole(self, prompt)

    patch.setattr(QueueState, "next_admission", next_admission)


def a_prompt_that_is_recycled_for_ever(patch):
    patch.setattr(RecyclePolicy, "end_of_expired", lambda self, reason, *, times: (f"recycled: {reason}", True))


def a_checkpoint_that_forgets_prompts_that_wait_to_be_admitted_again(patch):
    patch.setattr(QueueSnapshot, "prompts", property(lambda self: tuple(a.prompt for a in self.unfinished)))


def a_restart_that_forgets_prompts_that_wait_to_be_admitted_again(patch):
    _patch_restarted(patch, after=lambda state: state.returned.clear())


def a_restart_that_forgets_how_often_a_prompt_was_recycled(patch):
    _patch_restarted(patch, after=lambda state: state.recycles.clear())


def a_restart_that_forgets_rollouts_that_make_up_for_others(patch):
    whole = Rollouter._trajectories
    patch.setattr(Rollouter, "_trajectories", lambda self, group, held: whole(self, group, held[: self._n]))


def old_tokens_that_take_gradient(patch):
    whole = Controller._train_on

    async def train_on(self, batch):
        return await whole(self, replace(batch, min_update=0))

    patch.setattr(Controller, "_train_on", train_on)


def masked_tokens_that_nobody_counts(patch):
    whole = QueueState._train

    def train(self, event):
        whole(self, event)
        self._counts["masked_tokens"] = 0

    patch.setattr(QueueState, "_train", train)


def a_rollout_that_failed_and_is_trained(patch):
    patch.setattr(worker, "content_of", lambda group: tuple(tuple(t.sequences()) for t in group.trajectories))
    patch.setattr(TrajectoryHead, "failed", False)


def a_rollout_that_failed_and_is_not_made_up_for(patch):
    async def member(self, prompt, admission, trajectories, number):
        await self._run(prompt, admission, trajectories, number)

    patch.setattr(Rollouter, "_member", member)


def a_batch_that_is_as_old_as_its_first_mini_batch(patch):
    patch.setattr(DropPolicy, "staleness", lambda self, admitted, *, next_update: next_update - admitted)


def a_batch_that_is_split_otherwise_when_it_is_trained_again(patch):
    whole, number = prepare.mini_batches_of, count()
    patch.setattr(prepare, "mini_batches_of", lambda groups, **of: whole(groups, **{**of, "seed": next(number)}))


FAILS = ("reward fails", "tool is broken", "gives up", "no end of a reward")
STALENESS_MUTATIONS = (
    (a_recycled_prompt_that_is_forgotten, ("exactly once",)),
    (a_recycled_prompt_that_new_ones_overtake, ("exactly once",)),
    (a_prompt_that_is_recycled_for_ever, ("exactly once",)),
    (a_checkpoint_that_forgets_prompts_that_wait_to_be_admitted_again, ("exactly once",)),
    (a_restart_that_forgets_prompts_that_wait_to_be_admitted_again, ("exactly once",)),
    (a_restart_that_forgets_how_often_a_prompt_was_recycled, ("exactly once",)),
    (a_restart_that_forgets_rollouts_that_make_up_for_others, ("failure", "exactly once"), *FAILS),
    (old_tokens_that_take_gradient, ("staleness",)),
    (masked_tokens_that_nobody_counts, ("ledger",)),
    (a_batch_that_is_as_old_as_its_first_mini_batch, ("staleness",)),
    (a_batch_that_is_split_otherwise_when_it_is_trained_again, ("exactly once", "versions")),
    (a_rollout_that_failed_and_is_trained, ("provenance", "exactly once"), *FAILS),
    (a_rollout_that_failed_and_is_not_made_up_for, ("failure",), *FAILS),
)
