"""Defects planted in what becomes of groups and tokens that are too old, and of rollouts that failed."""

from dataclasses import replace
from itertools import count

from async_rl.batch import prepare
from async_rl.pipeline import Pipeline
from async_rl.rollout.rollouter import Rollouter
from message_queue import restart, start
from message_queue.admissions import Admissions
from message_queue.contract import QueueSnapshot
from message_queue.journal.state import JournalState
from message_queue.ledger import Ledger
from message_queue.policies import RecyclePolicy
from message_queue.staleness import StalenessBudget


def a_recycled_prompt_that_is_forgotten(patch):
    whole = Admissions.again

    def again(self, prompt):
        whole(self, prompt)
        self._waiting.pop()

    patch.setattr(Admissions, "again", again)


def a_recycled_prompt_that_new_ones_overtake(patch):
    whole = Admissions.begin

    def begin(self, prompt, **of):
        held = [self._waiting.popleft() for _ in list(self._waiting)[:1]] if self.next_group % 2 else []
        admission = whole(self, prompt, **of)
        self._waiting.extendleft(held)
        return admission

    patch.setattr(Admissions, "begin", begin)


def a_prompt_that_is_recycled_for_ever(patch):
    patch.setattr(RecyclePolicy, "admits_again", lambda self, times: True)


def a_checkpoint_that_forgets_prompts_that_wait_to_be_admitted_again(patch):
    patch.setattr(QueueSnapshot, "prompts", property(lambda self: tuple(a.prompt for a in self.unfinished)))


def a_journal_that_forgets_prompts_that_wait_to_be_admitted_again(patch):
    whole = JournalState._give_up

    def give_up(self, prompt, *, again):
        whole(self, prompt, again=again)
        self.waiting = [p for p in self.waiting if p != prompt]

    patch.setattr(JournalState, "_give_up", give_up)


def a_restart_that_forgets_how_often_a_prompt_was_recycled(patch):
    whole = restart.with_ready
    patch.setattr(restart, "with_ready", lambda start, ready: whole(replace(start, recycles={}), ready))


def a_restart_that_forgets_rollouts_that_make_up_for_others(patch):
    whole = Rollouter._trajectories
    patch.setattr(Rollouter, "_trajectories", lambda self, group, held: whole(self, group, held[: self._n]))


def old_tokens_that_take_gradient(patch):
    whole = Pipeline._train_on

    async def train_on(self, batch):
        return await whole(self, replace(batch, min_update=0))

    patch.setattr(Pipeline, "_train_on", train_on)


def masked_tokens_that_nobody_counts(patch):
    patch.setattr(Ledger, "masked", lambda self, group, *, tokens: None)


def a_rollout_that_failed_and_is_trained(patch):
    patch.setattr(prepare, "_without_failed", lambda group: group)


def a_rollout_that_failed_and_is_not_made_up_for(patch):
    async def member(self, prompt, admission, trajectories, number):
        await self._run(prompt, admission, trajectories, number)

    patch.setattr(Rollouter, "_member", member)


def a_restart_that_keeps_what_is_too_old_for_its_policy(patch):
    patch.setattr(start, "_too_old", lambda *args, **of: {})


def a_restart_that_trains_again_what_takes_other_gradient_now(patch):
    patch.setattr(start, "_is_trained_as_before", lambda *args, **of: True)


def a_prompt_that_is_recycled_at_a_restart_and_forgotten(patch):
    whole = start._give_up
    patch.setattr(start, "_give_up", lambda group, **of: whole(group, reason=of["reason"]))


def weights_of_steps_that_were_not_made_again_that_get_younger(patch):
    def publish(self, published):
        self.versions[published.version] = self.update = published.update
        self._forget_versions()

    patch.setattr(JournalState, "_publish", publish)


def a_group_that_is_given_up_at_a_restart_and_ends_twice(patch):
    whole = restart.restored_of
    patch.setattr(restart, "restored_of", lambda *of: replace(whole(*of), given_up=frozenset()))


def a_batch_that_is_as_old_as_its_first_mini_batch(patch):
    patch.setattr(StalenessBudget, "staleness", lambda self, admitted, *, next_update: next_update - admitted)


def a_batch_that_is_split_otherwise_when_it_is_trained_again(patch):
    whole, number = prepare.mini_batches_of, count()
    patch.setattr(prepare, "mini_batches_of", lambda groups, **of: whole(groups, **{**of, "seed": next(number)}))


FAILS = ("reward fails", "tool is broken", "gives up", "no end of a reward")
STALENESS_MUTATIONS = (
    (a_recycled_prompt_that_is_forgotten, ("exactly once",)),
    (a_recycled_prompt_that_new_ones_overtake, ("exactly once",)),
    (a_prompt_that_is_recycled_for_ever, ("exactly once",)),
    (a_checkpoint_that_forgets_prompts_that_wait_to_be_admitted_again, ("exactly once",)),
    (a_journal_that_forgets_prompts_that_wait_to_be_admitted_again, ("exactly once",)),
    (a_restart_that_forgets_how_often_a_prompt_was_recycled, ("exactly once",)),
    (a_restart_that_forgets_rollouts_that_make_up_for_others, ("failure", "exactly once"), *FAILS),
    (old_tokens_that_take_gradient, ("staleness",)),
    (masked_tokens_that_nobody_counts, ("ledger",)),
    (a_batch_that_is_as_old_as_its_first_mini_batch, ("staleness",)),
    (a_batch_that_is_split_otherwise_when_it_is_trained_again, ("exactly once", "versions")),
    (a_restart_that_keeps_what_is_too_old_for_its_policy, ("failure", "staleness")),
    (a_restart_that_trains_again_what_takes_other_gradient_now, ("failure", "staleness", "exactly once")),
    (a_prompt_that_is_recycled_at_a_restart_and_forgotten, ("exactly once",)),
    (weights_of_steps_that_were_not_made_again_that_get_younger, ("versions", "staleness")),
    (a_group_that_is_given_up_at_a_restart_and_ends_twice, ("ledger",)),
    (a_rollout_that_failed_and_is_trained, ("provenance", "exactly once"), *FAILS),
    (a_rollout_that_failed_and_is_not_made_up_for, ("failure",), *FAILS),
)
