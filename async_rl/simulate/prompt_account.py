"""Where every prompt is: trained once, dropped, in a group, or still to be admitted, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from async_rl.checkpoints import RunState
from async_rl.simulate.restarts import Reopened
from async_rl.simulate.violations import require
from message_queue.contract import Admission


class PromptAccount:
    """Prompts of one run over all its restarts.

    dropped: prompts whose groups were given up.
    """

    def __init__(self, *, batch_groups: int, updates_per_batch: int) -> None:
        self.dropped: set[int] = set()
        self._batch_groups = batch_groups
        self._updates_per_batch = updates_per_batch
        self._trained: dict[int, list[int]] = {}  # by train step
        self._tokens: dict[int, int] = {}  # with gradient, by train step
        self._again: list[int] = []
        self._next = 0

    def given_up(self, dropped: Iterable[int], *, again: Iterable[int]) -> None:
        """As the journal was opened; groups of `again` may have been dropped before, of which nothing was recorded."""
        self.dropped.update(dropped)
        self.dropped.difference_update(again)

    def reopened(self, found: Reopened, *, recycled: Collection[int]) -> None:
        """The run goes on from a checkpoint and a journal.

        Args:
            recycled: prompts that were to be admitted again for the age of their groups.
        """
        state, cursor = found.state, found.restored.prompt_cursor
        self._trained = {step: prompts for step, prompts in self._trained.items() if step <= state.train_step}
        live = [admission.prompt for admission in found.live.values()]
        self.dropped.difference_update(live)
        if found.restored.began:  # what was dropped after the checkpoint never was
            self.dropped.difference_update(state.unfinished_prompts)
        every = [*self._all_trained(), *live]
        twice = sorted({p for p in live if every.count(p) > 1})
        require("exactly once", not twice, "prompts {} are trained, or in a group, and in another group", twice)
        missing = set(range(cursor)).difference(every) - self.dropped
        lost = missing.difference({*state.unfinished_prompts, *recycled})
        require("exactly once", not lost, "prompts {} are neither trained, dropped, nor in a group", lost)
        self._again, self._next = sorted(missing), cursor

    def admitted(self, admission: Admission) -> None:
        """A group starts."""
        prompt = self._again.pop(0) if self._again else self._next
        self._next += prompt == self._next
        require("exactly once", admission.prompt == prompt, "{}; the next prompt is {}", admission, prompt)

    def trained(self, prompts: list[int], *, train_step: int, tokens: int) -> None:
        """A batch takes part in a train step; `tokens` of it take gradient."""
        before = self._all_trained()
        twice = sorted({p for p in prompts if prompts.count(p) + before.count(p) > 1})
        require("exactly once", not twice, "prompts {} are trained again at step {}", twice, train_step)
        self._trained[train_step], self._tokens[train_step] = prompts, tokens

    def check(self, state: RunState, *, dropped: Collection[int] = ()) -> None:
        """Every prompt up to the cursor was trained once, dropped, or is to be admitted again."""
        trained = [p for step, prompts in self._trained.items() if step <= state.train_step for p in prompts]
        left = [*trained, *state.unfinished_prompts]
        twice = sorted({p for p in left if left.count(p) > 1})
        require("exactly once", not twice, "prompts {} are trained twice, or trained and still to do", twice)
        beyond = sorted(p for p in left if p >= state.prompt_cursor)
        require("exactly once", not beyond, "prompts {} will be admitted again: the cursor is {}", beyond, state)
        lost = sorted(set(range(state.prompt_cursor)) - set(left) - self.dropped - set(dropped))
        require("exactly once", not lost, "prompts {} are neither trained, dropped, nor to be admitted again", lost)
        expected = state.train_step // self._updates_per_batch * self._batch_groups
        require("exactly once", len(trained) == expected, "{} groups trained of {}", len(trained), expected)
        counted = state.queue.ledger.trained
        require("ledger", counted == expected, "the checkpoint counts {} trained, not {}", counted, expected)
        tokens = sum(count for step, count in self._tokens.items() if step <= state.train_step)
        counted = state.queue.ledger.trained_tokens
        require("ledger", counted == tokens, "the checkpoint counts {} trained tokens, not {}", counted, tokens)

    def _all_trained(self) -> list[int]:
        return [p for prompts in self._trained.values() for p in prompts]
