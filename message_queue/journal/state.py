"""What the records of a journal add up to: live groups, what became of the others, versions, prompts. No disk here.

    open -> ready -> taken -> trained -> settled
     +--------+--------+---> dropped

A group is live until it is dropped, or until the train step that used it is settled: before that a restart may go back
to a checkpoint without that step, and then the group is to be trained again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from message_queue.journal.errors import JournalError, JournalStepError
from message_queue.journal.groups import GroupState, LiveGroup, Span, Step
from message_queue.journal.records import (
    Admitted,
    Body,
    Checkpointed,
    Dropped,
    Marked,
    MarkedHead,
    Published,
    Ready,
    Summary,
    Taken,
    Trained,
)
from message_queue.ledger import LedgerCounts

LOST = "lost: the journal was damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStart:
    """Where the run stands by its checkpoint; all zeros for a run that begins.

    train_step: optimizer steps in the checkpoint. next_group: no smaller group id is handed out again. prompt_cursor:
    first prompt that was never handed out. waiting: prompts before it that are to be admitted again, in order.
    recycles: prompt -> times that it was, or is, to be. version, update: newest published. ledger: counts of what ended
    before. waiting, recycles and ledger are used where there is no journal yet.
    unfinished: groups in flight then; None where that is not known.
    held: group -> records of it in other journals, where content is in those; None where it is in this one.
    """

    train_step: int = 0
    next_group: int = 0
    prompt_cursor: int = 0
    waiting: Sequence[int] = ()
    version: int = 0
    update: int = 0
    recycles: Mapping[int, int] = field(default_factory=dict[int, int])
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    unfinished: frozenset[int] | None = None
    held: Mapping[int, int] | None = None


class JournalState:
    """Everything but the content of the groups. Follows records also where some before them are lost.

    served: newest version that a group was admitted on; the replicas serve it, or a newer one.
    update: optimizer updates that the newest published version holds; a restart goes back to those of its checkpoint.
    waiting: prompts to admit again, in order. recycles: prompt -> times that it was to be, while it is not done.
    """

    def __init__(self, start: JournalStart) -> None:
        self.live: dict[int, LiveGroup] = {}
        self.next_group = start.next_group
        self.next_turn = 0
        self.prompt_cursor = start.prompt_cursor
        self.train_step = self.settled_step = start.train_step
        self.served, self.update = start.version, start.update
        self.versions: dict[int, int] = {start.version: start.update}
        self._reasons = Counter(start.ledger.reasons)
        self._admitted, self._trained, self._dropped = start.ledger.admitted, start.ledger.trained, start.ledger.dropped
        self._trained_tokens, self._dropped_tokens = start.ledger.trained_tokens, start.ledger.dropped_tokens
        self._masked_tokens = start.ledger.masked_tokens
        self._lost: list[int] = []  # of which the admission could not be read
        self.waiting = list(start.waiting)
        self.recycles = dict(start.recycles)

    @classmethod
    def of(cls, summary: Summary) -> JournalState:
        """What `summary` says; the groups are without content."""
        state = cls(
            JournalStart(
                train_step=summary.train_step,
                next_group=summary.next_group,
                prompt_cursor=summary.prompt_cursor,
                waiting=summary.waiting,
                recycles=dict(summary.recycles),
                ledger=summary.ledger,
            )
        )
        state.settled_step, state.next_turn = summary.settled_step, summary.next_turn
        state.versions, state.served, state.update = dict(summary.versions), summary.served, summary.update
        state.live = {head.group: LiveGroup.of(head) for head in summary.groups}
        return state

    @property
    def version(self) -> int:
        """Newest published."""
        return max(self.versions)

    def ledger(self) -> LedgerCounts:
        """Groups so far; `trained` are those that are settled, `open` all that are live."""
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=self._dropped,
            open=len(self.live),
            tokens=self._trained_tokens + self._masked_tokens + self._dropped_tokens,
            masked_tokens=self._masked_tokens,
            trained_tokens=self._trained_tokens,
            dropped_tokens=self._dropped_tokens,
            reasons=dict(self._reasons),
        )

    def summary(self) -> Summary:
        """All but the content of the groups."""
        return Summary(
            next_group=self.next_group,
            next_turn=self.next_turn,
            prompt_cursor=self.prompt_cursor,
            train_step=self.train_step,
            settled_step=self.settled_step,
            served=self.served,
            update=self.update,
            versions=tuple(self.versions.items()),
            ledger=self.ledger(),
            groups=cast(tuple[MarkedHead, ...], tuple(group.head() for group in self.live.values())),
            waiting=tuple(self.waiting),
            recycles=tuple(self.recycles.items()),
        )

    # ---- records

    def apply(self, body: Body, *, group: int) -> list[LiveGroup]:
        """Follow a record that is no content. Returns the groups that are live no more."""
        match body:
            case Admitted():
                return self._admit(group, body)
            case Ready():
                for ready in self._known([group]):
                    ready.state = GroupState.READY
                    self._place(ready)
            case Marked():
                for ready in self._known([group]):
                    ready.state, ready.mark = GroupState.READY, body
                    self._place(ready)
            case Taken():
                for taken in self._known(body.groups):
                    taken.state, taken.taken_update = GroupState.TAKEN, body.update
                    self._place(taken)
            case Trained():
                self._train(body)
            case Dropped():
                for dropped in self._known([group]):
                    self._count_dropped(body.reason, tokens=body.tokens)
                    self._give_up(dropped.admission.prompt, again=body.again)
                    return [self.live.pop(group)]
            case Published():
                self._publish(body)
            case Checkpointed():
                return self._settle(body.train_step)
            case _:
                raise JournalError(f"{type(body).__name__} is not followed here")
        return []

    def extend(self, group: int, trajectory: int, step: Step, span: Span) -> None:
        """Follow a record of content."""
        live = self.live[group]
        live.trajectory(trajectory).add(step)
        live.spans.append(span)

    def lose(self, orphans: Iterable[int]) -> None:
        """Count groups as dropped of which the admission is lost."""
        for group in orphans:
            self._lost.append(group)
            self._admitted += 1
            self.next_group = max(self.next_group, group + 1)
            self._count_dropped(LOST, tokens=0)

    # ---- restarts

    def end_by(self, start: JournalStart) -> list[LiveGroup]:
        """End groups that ended before the checkpoint, where the record of that is lost. Returns them."""
        if start.unfinished is None or not self.settled_step <= start.train_step <= self.train_step:
            return []
        settled = self._settle(start.train_step)
        in_flight = start.unfinished
        ended = [g for g in self.live.values() if g.group < start.next_group and g.group not in in_flight]
        unread = sum(group < start.next_group and group not in in_flight for group in self._lost)
        missing = max(0, start.ledger.trained - self._trained)
        trained = min(len(ended), missing)
        if missing:
            self._trained_tokens, self._masked_tokens = start.ledger.trained_tokens, start.ledger.masked_tokens
            self._trained += trained
            self._count_as_trained(min(unread, missing - trained))
        for number, group in enumerate(ended):
            del self.live[group.group]
            if number >= trained:
                prompt = group.admission.prompt
                self._count_dropped(LOST, tokens=0)
                self._give_up(prompt, again=prompt in start.waiting and prompt not in self.waiting)
        return settled + ended

    def compare(self, held: Mapping[int, int]) -> list[tuple[int, int, int]]:
        """Groups of which other journals have less than they had, as (group, records there, records then).

        They are not whole any more, and open after `restart`.
        """
        less: list[tuple[int, int, int]] = []
        for group in self.live.values():
            if group.mark is not None and (have := held.get(group.group, 0)) < group.mark.records:
                less.append((group.group, have, group.mark.records))
                group.mark = None
        return less

    def restart(self, start: JournalStart) -> list[LiveGroup]:
        """Continue from a checkpoint: what it trained is settled, whatever else was taken is ready again.

        Ready groups are in the order in which they were trained, then taken, then put. Returns the groups that are
        settled.

        Raises:
            JournalStepError: the journal ends before the checkpoint, or is settled after it. Nothing is changed.
        """
        if start.train_step > self.train_step:
            raise JournalStepError(
                f"the checkpoint is of train step {start.train_step}, the journal ends at step {self.train_step}: "
                "its last records are gone; resume from an older checkpoint, or move the journal away to go on without "
                "its groups"
            )
        if start.train_step < self.settled_step:
            raise JournalStepError(
                f"the checkpoint is of train step {start.train_step}, the journal is settled up to train step "
                f"{self.settled_step}: groups trained in between are gone; resume from a newer checkpoint, or move the "
                "journal away to go on without its groups"
            )
        settled = self._settle(start.train_step)
        self.train_step, self.update = start.train_step, start.update
        waiting = [group for group in self.live.values() if group.state is not GroupState.OPEN]
        waiting.sort(key=lambda g: (*_order(g.trained_update), *_order(g.taken_update), g.turn))
        for turn, group in enumerate(waiting):
            group.restart(turn)
        self.next_turn = len(waiting)
        self.next_group = max(self.next_group, start.next_group)
        self.prompt_cursor = max(self.prompt_cursor, start.prompt_cursor)
        if start.version > self.version:
            self.versions[start.version] = start.update
        return settled

    # ---- inside

    def _known(self, groups: Iterable[int]) -> list[LiveGroup]:
        return [self.live[group] for group in groups if group in self.live]

    def _admit(self, group: int, admitted: Admitted) -> list[LiveGroup]:
        """A group starts. One of the same prompt was dropped before: where it is live, the record of that is lost."""
        ended = [live for live in self.live.values() if live.admission.prompt == admitted.prompt]
        for live in ended:
            del self.live[live.group]
            self._count_dropped(LOST, tokens=0)
            self._give_up(admitted.prompt, again=True)
        self.live[group] = LiveGroup(group, admitted)
        self.served = max(self.served, admitted.version)
        self.next_group = max(self.next_group, group + 1)
        self.prompt_cursor = max(self.prompt_cursor, admitted.prompt + 1)
        self._admitted += 1
        if admitted.prompt in self.waiting:
            self.waiting.remove(admitted.prompt)
        return ended

    def _give_up(self, prompt: int, *, again: bool) -> None:
        """The group of a prompt was dropped; `again`: the prompt is to be admitted again."""
        if again:
            self.waiting.append(prompt)
            self.recycles[prompt] = self.recycles.get(prompt, 0) + 1
        else:
            self.recycles.pop(prompt, None)

    def _place(self, group: LiveGroup) -> None:
        """Behind all that became ready, or were taken, before."""
        group.turn = self.next_turn
        self.next_turn += 1

    def _train(self, trained: Trained) -> None:
        masked = trained.masked or (0,) * len(trained.groups)
        for group, tokens, without in zip(trained.groups, trained.tokens, masked, strict=True):
            if group in self.live:
                live = self.live[group]
                live.masked_tokens = without
                live.state, live.train_step, live.trained_tokens = GroupState.TRAINED, trained.train_step, tokens
                live.trained_update = live.taken_update
        self.train_step = max(self.train_step, trained.train_step)

    def _count_as_trained(self, groups: int) -> None:
        """So many of those that count as lost were trained."""
        self._trained += groups
        self._dropped -= groups
        self._reasons.subtract({LOST.partition(":")[0]: groups})
        self._reasons = +self._reasons

    def _count_dropped(self, reason: str, *, tokens: int) -> None:
        self._dropped += 1
        self._dropped_tokens += tokens
        self._reasons[reason.partition(":")[0]] += 1

    def _settle(self, train_step: int) -> list[LiveGroup]:
        """End what was trained up to `train_step`."""
        done = [g for g in self.live.values() if g.train_step is not None and g.train_step <= train_step]
        for group in done:
            del self.live[group.group]
            self._trained += 1
            self._trained_tokens += group.trained_tokens - group.masked_tokens
            self._masked_tokens += group.masked_tokens
            self.recycles.pop(group.admission.prompt, None)
        self.settled_step = max(self.settled_step, train_step)
        self._forget_versions()
        return done

    def _publish(self, published: Published) -> None:
        """Older versions hold no more updates: one that did was made by steps that a restart did not make again."""
        self.versions = {version: min(update, published.update) for version, update in self.versions.items()}
        self.versions[published.version] = self.update = published.update
        self._forget_versions()

    def _forget_versions(self) -> None:
        """Keep those that can sample a token of a live or coming group; none is older than its group."""
        newest = self.version
        oldest = min((newest, self.served, *(g.admission.admitted_version for g in self.live.values())))
        self.versions = {v: update for v, update in self.versions.items() if v >= oldest}


def _order(update: int | None) -> tuple[bool, int]:
    """By update, those without one last."""
    return update is None, update or 0
