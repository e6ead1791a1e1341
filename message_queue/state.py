"""The state of the queue: one reducer, `QueueState.apply`, used for live calls and to read the journal.

    open -> ready -> taken -> trained -> (checkpoint) -> gone
      +-------+--------+---> dropped: gone

A trained group stays until a checkpoint holds its train step: a restart before that repeats it.

Example: admit 4 groups with batches of 2, put groups 1, 0 and 2, take. Then group 3 is open, 2 is ready, 0 and 1 are
taken, next_update is 1, and the ledger counts 4 admitted and 4 open.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, assert_never

import msgspec

from message_queue.errors import QueueError
from message_queue.events import Admitted, Checkpointed, Dropped, Event, Loaded, Published, Ready, Taken, Trained
from message_queue.heads import GroupHead
from message_queue.ledger import DropKind, LedgerCounts, LedgerRecord
from message_queue.trajectory import Admission

Life = Literal["open", "ready", "taken", "trained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """State of a queue at one instant, as a checkpoint stores it; JSON through msgspec."""

    next_group: int = 0
    """Id of the next admission."""
    next_update: int = 0
    """Optimizer updates of the batches whose training was acknowledged."""
    version: int = 0
    """Newest `param_version` that every replica serves."""
    update: int = 0
    """Optimizer updates held by those weights."""
    ready: int = 0
    """Finished groups that wait for the trainer."""
    open: int = 0
    """Groups being rolled out."""
    taken: int = 0
    """Groups handed to the trainer and not acknowledged."""
    replay: int = 0
    """Batches of ready groups that are repeated after a restart."""
    unfinished: tuple[Admission, ...] = ()
    """Admissions of all open, ready and taken groups, by id."""
    waiting: tuple[int, ...] = ()
    """Prompts of expired groups that are readmitted, in that order."""
    requeues: dict[int, int] = field(default_factory=dict[int, int])
    """Prompt -> times that it was to be readmitted, for prompts that have not ended."""
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    """Counts of groups and tokens."""
    closed: bool = False
    """Whether the queue is closed."""

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompts that a restarted run readmits."""
        return (*(admission.prompt for admission in self.unfinished), *self.waiting)


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """A group that has not ended, or whose training no checkpoint holds yet."""

    admission: Admission
    """Admission of the group."""
    life: Life = "open"
    """State in the life cycle."""
    turn: int = 0
    """Orders groups by when they became ready, and later by when they were taken."""
    head: GroupHead | None = None
    """None while the group is open."""
    masked: int = 0
    """Tokens without gradient in the batch that took the group."""
    taken_update: int | None = None
    """Optimizer updates made when the group was taken."""
    train_step: int | None = None
    """Optimizer step that the group took part in."""
    trained_tokens: int = 0
    """Tokens that took gradient."""
    replay_update: int | None = None
    """Updates at which the group was trained after the last checkpoint, so that a restart repeats it there."""

    @property
    def group(self) -> int:
        """Id."""
        return self.admission.group

    @property
    def admitted_update(self) -> int:
        """Optimizer updates held by the weights of the admission."""
        return self.admission.admitted_update

    @property
    def tokens(self) -> int:
        """Sampled tokens of `head`; 0 while the group is open."""
        return 0 if self.head is None else self.head.num_tokens


class StateFields(msgspec.Struct, kw_only=True):
    """Numbers, versions and prompts of a queue's state."""

    next_group: int = 0
    """Id of the next admission."""
    next_turn: int = 0
    """`turn` of the next group that becomes ready or is taken."""
    next_update: int = 0
    """Optimizer updates made when the next batch is taken."""
    prompt_cursor: int = 0
    """First prompt that was never admitted."""
    train_step: int = 0
    """Newest optimizer step that trained a group."""
    settled_step: int = 0
    """Optimizer steps in the newest checkpoint."""
    served: int = 0
    """Newest `param_version` that every replica serves."""
    versions: dict[int, int] = msgspec.field(default_factory=lambda: {0: 0})
    """Published `param_version` -> optimizer updates, for all that a group may have tokens of."""
    diverged: bool = False
    """Whether a restart cannot remake the weights of the newest version, and none was published since."""
    requeued: list[int] = []
    """Prompts of expired groups that the next admissions are of, in order."""
    returned: list[int] = []
    """Prompts that the last restart gave back to the driver and that were not readmitted yet, in order."""
    requeues: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Prompt -> times that it was to be readmitted, until a checkpoint holds its training or it is dropped."""
    replay: list[tuple[int, ...]] = []
    """Batches of ready groups that are taken first, unchanged."""


class StoredState(StateFields, kw_only=True):
    """A state as a value; an equal state can be made from it."""

    ledger: LedgerCounts = msgspec.field(default_factory=LedgerCounts)
    """Counts of groups that are gone."""
    groups: tuple[GroupState, ...] = ()
    """Groups that have not ended, or whose training no checkpoint holds yet."""


class QueueState(StateFields, kw_only=True, dict=True, eq=False):
    """Groups, versions, prompts to readmit, and the ledger. `apply` is the only way to change them."""

    def __post_init__(self) -> None:
        self._groups: dict[Life, dict[int, GroupState]] = {"open": {}, "ready": {}, "taken": {}, "trained": {}}
        self.open, self.ready, self.taken, self.trained = self._groups.values()
        self.outstanding: Counter[int] = Counter()  # admitted update -> open and ready groups
        self.ready_updates: Counter[int] = Counter()  # admitted update -> ready groups
        self.by_admission: list[tuple[int, int]] = []  # (admitted update, group) of ready groups, sorted
        self.by_newest: list[tuple[int, int]] = []  # (`newest_update`, group) of groups that have one, sorted
        self.ended: list[LedgerRecord] = []  # records of groups that ended; its reader removes them
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._reasons: Counter[DropKind] = Counter()

    @classmethod
    def of(cls, stored: StoredState) -> QueueState:
        """The state that `dump` gave."""
        state = cls(**{name: copy(getattr(stored, name)) for name in StateFields.__struct_fields__})
        state._counts.update({name: getattr(stored.ledger, name) for name in _COUNTED})
        state._reasons.update(stored.ledger.reasons)
        for group in sorted(stored.groups, key=lambda g: (g.turn, g.group)):
            state._insert(group)
            state._counts.update(_contribution(group))
        return state

    # ---- questions

    @property
    def served_update(self) -> int:
        """Optimizer updates held by the version that every replica serves."""
        return self.versions[self.served]

    @property
    def live(self) -> dict[int, GroupState]:
        """Groups that are open, ready or taken, by id."""
        return dict(sorted({**self.open, **self.ready, **self.taken}.items()))

    @property
    def counts(self) -> LedgerCounts:
        """The ledger: groups that entered and ended by events, open ones by the groups that are held."""
        groups = (*self.ready.values(), *self.taken.values())
        return LedgerCounts(
            **self._counts,
            open=len(self.open) + len(self.ready) + len(self.taken),
            open_tokens=sum(group.tokens for group in groups),
            reasons=dict(self._reasons),
        )

    def newest_update(self, head: GroupHead | None) -> int | None:
        """Updates of the newest weights that sampled a token of a group, failed rollouts excluded; None without any."""
        versions = () if head is None else head.tokens_per_version()
        return max((self.versions[version] for version in versions), default=None)

    def next_admission(self, prompt: int) -> Admission:
        """The next admission: of the first requeued prompt, else of `prompt`."""
        return Admission(
            group=self.next_group,
            prompt=self.requeued[0] if self.requeued else prompt,
            admitted_version=self.served,
            admitted_update=self.served_update,
        )

    def snapshot(self, *, closed: bool = False) -> QueueSnapshot:
        """The state as a checkpoint stores it."""
        updates = [group.taken_update for group in self.taken.values() if group.taken_update is not None]
        trained = {group.admission.prompt for group in self.trained.values()}
        return QueueSnapshot(
            next_group=self.next_group,
            next_update=min(updates, default=self.next_update),
            version=self.served,
            update=self.served_update,
            ready=len(self.ready),
            open=len(self.open),
            taken=len(self.taken),
            replay=len(self.replay),
            unfinished=tuple(group.admission for group in self.live.values()),
            waiting=tuple(self.requeued),
            requeues={prompt: times for prompt, times in self.requeues.items() if prompt not in trained},
            ledger=self.counts,
            closed=closed,
        )

    def dump(self) -> StoredState:
        """The state as a value that does not change."""
        groups = (*self.open.values(), *self.ready.values(), *self.taken.values(), *self.trained.values())
        gone = self._counts.copy()
        for group in groups:
            gone.subtract(_contribution(group))
        return StoredState(
            **{name: copy(getattr(self, name)) for name in StateFields.__struct_fields__},
            ledger=LedgerCounts(**gone, reasons=dict(self._reasons)),
            groups=groups,
        )

    def open_records(self) -> list[LedgerRecord]:
        """Ledger records of the groups that have not ended, by id."""
        return [_record(group, "open") for group in self.live.values()]

    # ---- changes

    def apply(self, event: Event) -> None:
        """Follow an event.

        Raises:
            QueueError: the event does not follow on the state. Nothing is changed.
        """
        match event:
            case Admitted():
                self._admit(event.admission)
            case Ready(head=head):
                self._move(self.find(head.group, "open"), life="ready", turn=self._turn(), head=head)
                self._counts["tokens"] += head.num_tokens
            case Dropped():
                self._drop(event)
            case Taken():
                self._take(event)
            case Trained():
                self._train(event)
            case Published():
                self._publish(event)
            case Loaded(version=version):
                newest = f"the newest published is {max(self.versions)}"
                known = version in self.versions and version >= self.served
                _require(known, f"loaded version {version} after version {self.served}; {newest}")
                self.served = version
            case Checkpointed():
                self._settle(event.train_step)
            case _:
                assert_never(event)

    def _admit(self, admission: Admission) -> None:
        group, prompt = admission.group, admission.prompt
        _require(group >= self.next_group, f"group {group} was admitted before; the next id is {self.next_group}")
        if self.requeued and self.requeued[0] == prompt:
            self.requeued.pop(0)
        if prompt in self.returned:
            self.returned.remove(prompt)
        self.next_group = group + 1
        self.prompt_cursor = max(self.prompt_cursor, prompt + 1)
        self._insert(GroupState(admission=admission))
        self._counts["admitted"] += 1

    def _take(self, event: Taken) -> None:
        entries = self._find_all(event.groups, "ready", also=event.masked)
        _require(
            event.update == self.next_update,
            f"a batch is taken at update {event.update}; the next batch is of update {self.next_update}",
        )
        if self.replay:
            _require(
                self.replay[0] == event.groups,
                f"groups {list(event.groups)} are taken before the batch {list(self.replay[0])} was trained again",
            )
            self.replay.pop(0)
        for entry, masked in zip(entries, event.masked, strict=True):
            self._move(entry, life="taken", turn=self._turn(), taken_update=event.update, masked=masked)
        self.next_update += event.updates

    def _train(self, event: Trained) -> None:
        entries = self._find_all(event.groups, "taken", also=event.tokens)
        _require(
            event.train_step > self.settled_step,
            f"train_step is {event.train_step}; a checkpoint holds those up to {self.settled_step}",
        )
        for entry, tokens in zip(entries, event.tokens, strict=True):
            trained = {"train_step": event.train_step, "trained_tokens": tokens, "replay_update": entry.taken_update}
            self._move(entry, life="trained", **trained)
            self._counts.update(trained=1, trained_tokens=tokens, masked_tokens=entry.masked)
            self.ended.append(_record(entry, "trained", train_step=event.train_step))
        self.train_step = max(self.train_step, event.train_step)

    def _drop(self, event: Dropped) -> None:
        entry = self.find(event.group, "open", "ready", "taken")
        record = _record(entry, "dropped", dropped=event)
        self._remove(entry)
        self._counts.update(dropped=1, dropped_tokens=record["tokens"])
        self._counts["tokens"] += record["tokens"] - entry.tokens  # those of an open group were not counted
        self._reasons[event.reason.kind] += 1
        self.ended.append(record)
        prompt = entry.admission.prompt
        if event.requeue:
            self.requeues[prompt] = self.requeues.get(prompt, 0) + 1
            self.requeued.append(prompt)
        else:
            self.requeues.pop(prompt, None)

    def _publish(self, event: Published) -> None:
        newest = max(self.versions)
        _require(
            event.version > newest and event.update >= self.versions[newest],
            f"published version {event.version} with {event.update} updates after version {newest} with "
            f"{self.versions[newest]}; versions go up, updates do not go back",
        )
        _require(
            event.update <= self.next_update,
            f"published version {event.version} with {event.update} updates; batches up to update {self.next_update} "
            "were taken",
        )
        self.versions[event.version] = event.update
        self.diverged = False

    def _settle(self, train_step: int) -> None:
        _require(
            self.settled_step <= train_step <= self.train_step,
            f"checkpoint of train step {train_step}; an earlier checkpoint holds steps up to {self.settled_step}, and "
            f"the last step that trained a group is {self.train_step}",
        )
        for entry in [g for g in self.trained.values() if g.train_step is not None and g.train_step <= train_step]:
            self._remove(entry)
            self.requeues.pop(entry.admission.prompt, None)
        self.settled_step = train_step
        groups = (*self.live.values(), *self.trained.values())
        oldest = min((self.served, *(group.admission.admitted_version for group in groups)))
        self.versions = {version: update for version, update in self.versions.items() if version >= oldest}

    # ---- inside

    def find(self, group: int, *lives: Life) -> GroupState:
        """A group in one of `lives`; QueueError if it was never admitted, is in another state, or has ended."""
        for life in lives:
            if group in self._groups[life]:
                return self._groups[life][group]
        self.require_known(group)
        raise QueueError(f"group {group} is not {' or '.join(lives)}; nothing is changed")

    def require_known(self, group: int) -> None:
        """Raise QueueError if an id was never admitted."""
        known = 0 <= group < self.next_group
        _require(known, f"group {group} was never admitted; ids up to {self.next_group - 1} were")

    def _find_all(self, groups: Sequence[int], life: Life, *, also: Sequence[int]) -> list[GroupState]:
        entries = [self.find(group, life) for group in groups]
        _require(len(set(groups)) == len(groups), f"groups {list(groups)} name one twice; nothing is changed")
        _require(len(also) == len(groups), f"{len(also)} token counts for {len(groups)} groups; give one for each")
        return entries

    def _turn(self) -> int:
        self.next_turn += 1
        return self.next_turn - 1

    def _move(self, entry: GroupState, **changes: object) -> None:
        self._remove(entry)
        self._insert(msgspec.structs.replace(entry, **changes))

    def _insert(self, entry: GroupState) -> None:
        self._groups[entry.life][entry.group] = entry
        self._tally(entry, 1)

    def _remove(self, entry: GroupState) -> None:
        del self._groups[entry.life][entry.group]
        self._tally(entry, -1)

    def _tally(self, entry: GroupState, change: int) -> None:
        counters = {"open": [self.outstanding], "ready": [self.outstanding, self.ready_updates]}.get(entry.life, [])
        for counter in counters:
            counter[entry.admitted_update] += change
            if not counter[entry.admitted_update]:
                del counter[entry.admitted_update]
        if entry.life == "ready":
            newest = self.newest_update(entry.head)
            for order, update in ((self.by_admission, entry.admitted_update), (self.by_newest, newest)):
                if update is not None and change > 0:
                    insort(order, (update, entry.group))
                elif update is not None:
                    del order[bisect_left(order, (update, entry.group))]


_COUNTED = (
    "admitted", "trained", "dropped", "tokens", "trained_tokens", "masked_tokens", "dropped_tokens",
)  # fmt: skip


def _contribution(group: GroupState) -> dict[str, int]:
    """Counts of the ledger that a group is part of."""
    counts = {"admitted": 1, "tokens": group.tokens}
    if group.life == "trained":
        counts |= {"trained": 1, "trained_tokens": group.trained_tokens, "masked_tokens": group.masked}
    return counts


def _record(
    entry: GroupState, outcome: str, *, dropped: Dropped | None = None, train_step: int | None = None
) -> LedgerRecord:
    segments, tokens = (0, 0) if dropped is None else (dropped.segments, dropped.tokens)  # in vain
    if entry.head is not None:
        segments, tokens = entry.head.num_segments, entry.tokens
    return LedgerRecord(
        group=entry.group,
        admitted_version=entry.admission.admitted_version,
        outcome=outcome,
        kind=None if dropped is None else dropped.reason.kind,
        reason=None if dropped is None else str(dropped.reason),
        train_step=train_step,
        segments=segments,
        tokens=tokens,
        masked_tokens=entry.masked if outcome == "trained" else 0,
    )


def _require(met: bool, message: str) -> None:
    if not met:
        raise QueueError(message)
