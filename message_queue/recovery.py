"""Opens the queue of a run: new, from a checkpoint, or from a checkpoint and the journal of the events after it.

Groups trained after the checkpoint are ready again and trained again in the same batches and at the same updates, which
makes the same weights again; then the run continues from where it stopped.

    checkpoint      trained again          open, ready
    ----|-----------------------------|------------------->
       next_update                   end

So staleness is exact, and open groups continue under weights that are not older than those of their admission. If a
batch is incomplete because the journal was damaged, it and those after it are ready groups like all others. Weights
published after `end` then count as of `end`: their distance from the weights that will be trained is unknown, and those
get a version of their own.

Damage costs only the groups it touches:

    event that is missing    effect
    Admitted                 from the head if the group became ready, else the group is dropped
    Ready                    the group is open again
    Taken, Trained           the group is ready again, unless the checkpoint says that it ended
    Dropped                  the group continues, unless its prompt was admitted again
    Published                updates are bounded by the versions before and after
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from message_queue.contract import Admission, QueueSnapshot
from message_queue.disk_errors import JournalSettingsError, JournalStepError
from message_queue.events import Admitted, Checkpointed, Dropped, Event, Loaded, Published, Ready, Taken, Trained
from message_queue.journal import (
    EventJournal,
    JournalConfig,
    Settings,
    StoredEvents,
    open_store,
)
from message_queue.ledger import LedgerCounts
from message_queue.policies import StalenessPolicy, WaitPolicy, build_policy, end_of_expired
from message_queue.queue import TrajectoryQueue
from message_queue.staleness import StalenessConfig
from message_queue.state import GroupState, QueueState, StateHeader

STOPPED = "stopped before it was trained: its prompt is admitted again"
HOPELESS = "recycled: more groups were in flight than can be trained within the bound after the restart"
LOST = "lost: the journal was damaged"
_NO_PROMPT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPlace:
    """The journal of a run, and the checkpoint that the run continues from."""

    directory: Path
    """Folder of the journal; made if it is missing."""
    run: str
    """Name that is the same at every restart, and no other run's."""
    config: JournalConfig = field(default_factory=JournalConfig)
    """How durable."""
    settings: Settings = field(default_factory=dict[str, int | str])
    """Config field -> value, of those that may not change while groups are in flight."""
    checkpoint: QueueSnapshot | None = None
    """The queue in the checkpoint; None if there is no checkpoint."""
    train_step: int = 0
    """Optimizer steps in the checkpoint."""
    prompt_cursor: int = 0
    """First prompt that was never handed out by the checkpoint; used if the journal is new."""
    waiting: Sequence[int] = ()
    """Prompts before the cursor that are admitted again; used if the journal is new."""
    incomplete: frozenset[int] = frozenset()
    """Groups whose content is missing or damaged: they are open again."""
    busy_s: float = 30.0
    """Seconds to wait for another process to let go of the journal; a killed process needs a moment to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State of the queue after a restart, for the driver."""

    began: bool
    """Whether there was no journal."""
    open: tuple[Admission, ...]
    """Groups whose rollouts continue; their heads must repeat these values."""
    ready: tuple[Admission, ...]
    """Groups whose content is needed: finished ones that wait for the trainer, also those of `replay`."""
    replay: int
    """Batches that `take` hands out first, to be trained again."""
    prompt_cursor: int
    """First prompt that was never admitted."""
    waiting: tuple[int, ...]
    """Prompts before the cursor that the driver admits again, in order."""
    version: int
    """Newest `param_version` that was published."""
    diverged: bool
    """Whether the weights of `version` are not the ones that replay makes again."""
    version_updates: Mapping[int, int]
    """`param_version` -> optimizer updates."""
    given_up: frozenset[int]
    """Groups dropped by the restart; their ledger records follow."""
    next_group: int
    """Id of the next admission."""
    notes: tuple[str, ...]
    """Sentences for the user: damage and its cost, and groups that were given up."""

    @property
    def live(self) -> frozenset[int]:
        """Groups in flight."""
        return frozenset(admission.group for admission in (*self.open, *self.ready))


async def open_queue(
    place: JournalPlace,
    *,
    batch_groups: int,
    staleness: StalenessConfig,
    max_ready: int | None = None,
    updates_per_batch: int = 1,
) -> tuple[TrajectoryQueue, EventJournal, Restored]:
    """The queue of a run with its journal; close the journal when the queue is not used any more.

    Raises:
        JournalError: of the kind that says why the journal cannot be used; the message has the way out.
    """
    policy = build_policy(staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
    store = await open_store(place.directory, run=place.run, config=place.config, busy_s=place.busy_s)
    journal = EventJournal(store)
    try:
        stored = await journal.in_thread(store.read)
        state, restored = recover(stored, place, policy=policy)
        copy = await journal.in_thread(lambda: store.start(*state.dump(), settings=place.settings))
    except BaseException:
        await journal.close()
        raise
    if copy is not None:
        restored = replace(restored, notes=(*restored.notes, f"a copy of the damaged journal is {copy}"))
    queue = TrajectoryQueue(
        batch_groups=batch_groups,
        staleness=staleness,
        max_ready=max_ready,
        updates_per_batch=updates_per_batch,
        state=state,
        journal=journal,
    )
    return queue, journal, restored


def state_of_snapshot(snapshot: QueueSnapshot, *, updates_per_batch: int = 1) -> QueueState:
    """State after a checkpoint without a journal: unfinished groups are dropped.

    The driver admits all of `snapshot.prompts` again.
    """
    header = _header_without_unfinished(snapshot)
    groups = [GroupState(admission=admission) for admission in snapshot.unfinished]
    state = QueueState(header, groups, updates_per_batch=updates_per_batch)
    for admission in snapshot.unfinished:
        state.apply(Dropped(group=admission.group, reason=STOPPED))
    state.recycles.update(snapshot.recycles)
    return state


def recover(stored: StoredEvents, place: JournalPlace, *, policy: StalenessPolicy) -> tuple[QueueState, Restored]:
    """The state that the queue starts with.

    Raises:
        JournalStepError: the journal does not belong to the checkpoint.
        JournalSettingsError: a setting changed while groups are in flight.
    """
    updates_per_batch = policy.budget.updates_per_batch
    if stored.empty:
        state = QueueState(_header_of_checkpoint(place), updates_per_batch=updates_per_batch)
        return state, _restored(state, began=True)
    state, reopened, notes = _followed(stored, place, updates_per_batch=updates_per_batch)
    if stored.damage:
        notes += _end_by_checkpoint(state, place)
    _require_step(state, place)
    state.apply(Checkpointed(train_step=place.train_step))
    _require_settings(state, stored.settings, place)
    header, groups = state.dump()
    state, given_up, diverged = _restarted(header, groups, place, policy=policy, lost_events=stored.lost_events)
    reopened |= place.incomplete
    notes += [f"group {group} is open again: its end cannot be read" for group in sorted(reopened & state.open.keys())]
    again = sum(group.replay_update is not None for group in groups) - sum(map(len, state.replay))
    if again:
        notes.append(
            f"{again} groups that were trained after the checkpoint are not trained again in the same batches, because "
            "their batches are incomplete"
        )
    for requeue, end in ((False, "are dropped"), (True, "are dropped, and their prompts admitted again")):
        if reasons := [event.reason for event in given_up if event.requeue == requeue]:
            notes.append(f"{len(reasons)} groups {end}: {reasons[0]}")
    ids = frozenset(event.group for event in given_up)
    return state, _restored(state, diverged=diverged, given_up=ids, notes=(*stored.damage, *notes))


# ---- from the events to the state at the stop


def _followed(
    stored: StoredEvents, place: JournalPlace, *, updates_per_batch: int
) -> tuple[QueueState, set[int], list[str]]:
    """(the state after all events that can be read, groups whose end cannot be read, sentences about lost groups)."""
    snapshot = place.checkpoint or QueueSnapshot()
    header = stored.header or _header_of_damaged(stored, place)
    missing = set(header.live) - {group.group for group in stored.groups}
    reopened = [GroupState(admission=a) for a in snapshot.unfinished if a.group in missing]
    missing -= {group.group for group in reopened}
    state = QueueState(
        msgspec.structs.replace(header, ledger=_plus_lost(header.ledger, len(missing))),
        (*stored.groups, *reopened),
        updates_per_batch=updates_per_batch,
    )
    repair = _Repair(state, stored.events)
    for event in stored.events:
        for fitting in repair.fit(event) if stored.damage else (event,):
            state.apply(fitting)
    state.next_group += stored.lost_events  # each may have been an admission, and ids are never reused
    notes = [f"group {group} is dropped: its admission cannot be read" for group in sorted(missing | repair.lost)]
    return state, repair.reopened | {group.group for group in reopened}, notes


class _Repair:
    """Turns events into those that can follow on a state although some before them are missing.

    Args:
        events: all that can be read.
    """

    def __init__(self, state: QueueState, events: Sequence[Event]) -> None:
        self.lost: set[int] = set()
        self.reopened: set[int] = set()
        self._state = state
        self._heads = {event.head.group: event.head for event in events if isinstance(event, Ready)}

    def fit(self, event: Event) -> Iterator[Event]:
        """Events to apply in place of `event`."""
        state = self._state
        yield from self._admit_up_to(max(_groups_of(event), default=-1) + (not isinstance(event, Admitted)))
        match event:
            case Admitted():
                if event.group >= state.next_group:
                    yield from self._end_same_prompt(event)
                    yield event
            case Ready():
                if event.head.group in state.open:
                    self.reopened.discard(event.head.group)
                    yield event
            case Dropped():
                if any(event.group in groups for groups in (state.open, state.ready, state.taken)):
                    yield event
            case Taken():
                masked = zip(event.groups, event.masked, strict=True)
                known = {group: tokens for group, tokens in masked if group in state.ready}
                self.reopened.update(group for group in event.groups if group in state.open)
                if len(known) < len(event.groups) or event.update != state.next_update:
                    state.replay.clear()
                    state.next_update = event.update
                yield Taken(groups=tuple(known), update=event.update, masked=tuple(known.values()))
            case Trained():
                yield from self._train(event)
            case Published():
                newest = max(state.versions)
                if event.version > newest:
                    state.next_update = max(state.next_update, event.update)
                    yield event
            case Loaded():
                if event.version in state.versions and event.version >= state.served:
                    yield event
            case Checkpointed():
                yield event

    def _admit_up_to(self, end: int) -> Iterator[Event]:
        """Admissions of the ids below `end` whose own events are missing."""
        state = self._state
        for group in range(state.next_group, end):
            head = self._heads.get(group)
            if head is not None:
                admitted = Admitted(
                    group=group, prompt=head.prompt, version=head.admitted_version, update=head.admitted_update
                )
                yield from self._end_same_prompt(admitted)
                yield admitted
            else:
                self.lost.add(group)
                yield Admitted(group=group, prompt=_NO_PROMPT, version=state.served, update=state.served_update)
                yield Dropped(group=group, reason=LOST)

    def _end_same_prompt(self, admitted: Admitted) -> Iterator[Event]:
        """A prompt is admitted again after its group was dropped: the Dropped event is missing."""
        state = self._state
        for entry in (*state.open.values(), *state.ready.values()):
            if entry.admission.prompt == admitted.prompt:
                yield Dropped(group=entry.group, reason=LOST)
                return

    def _train(self, event: Trained) -> Iterator[Event]:
        """Groups whose Taken event is missing are taken first."""
        state = self._state
        counts = dict(zip(event.groups, event.tokens, strict=True))
        ready = {group: state.ready[group].tokens - counts[group] for group in counts if group in state.ready}
        if ready:
            state.replay.clear()
            yield Taken(groups=tuple(ready), update=state.next_update, masked=tuple(ready.values()))
        self.reopened.update(group for group in event.groups if group in state.open)
        known = {group: tokens for group, tokens in counts.items() if group in state.taken}
        yield Trained(groups=tuple(known), train_step=event.train_step, tokens=tuple(known.values()))


def _groups_of(event: Event) -> tuple[int, ...]:
    match event:
        case Admitted() | Dropped():
            return (event.group,)
        case Ready():
            return (event.head.group,)
        case Taken() | Trained():
            return event.groups
        case _:
            return ()


def _end_by_checkpoint(state: QueueState, place: JournalPlace) -> list[str]:
    """End groups that had ended in the checkpoint, and whose end cannot be read; a sentence for each."""
    snapshot = place.checkpoint or QueueSnapshot()
    unfinished = {admission.group for admission in snapshot.unfinished}
    ended = sorted(group for group in state.live if group < snapshot.next_group and group not in unfinished)
    notes: list[str] = []
    for group in ended:
        entry = state.taken.get(group)
        if entry is not None and place.train_step > state.settled_step:
            tokens = (entry.tokens - entry.masked,)
            state.apply(Trained(groups=(group,), train_step=place.train_step, tokens=tokens))
            notes.append(f"group {group} counts as trained: it had ended in the checkpoint")
        else:
            state.apply(Dropped(group=group, reason=LOST))
            notes.append(f"group {group} is dropped: it had ended in the checkpoint, how cannot be read")
    state.train_step = max(state.train_step, place.train_step)
    return notes


# ---- from the state at the stop to the state at the start


def _restarted(
    header: StateHeader,
    groups: Sequence[GroupState],
    place: JournalPlace,
    *,
    policy: StalenessPolicy,
    lost_events: int,
) -> tuple[QueueState, list[Dropped], bool]:
    """(the state after the restart, groups dropped by it, whether the newest weights are not made again)."""
    snapshot, updates_per_batch = place.checkpoint or QueueSnapshot(), policy.budget.updates_per_batch
    groups = [GroupState(admission=g.admission) if g.group in place.incomplete else g for g in groups]
    published = dict(header.versions)
    if snapshot.version > max(published):
        published[snapshot.version] = snapshot.update
    versions = _known_updates(published, groups, lost_events=lost_events)
    newest = max(versions)
    replay = _replayed(groups, next_update=snapshot.next_update, policy=policy)
    end = snapshot.next_update + len(replay) * updates_per_batch
    diverged = newest > max(published) or versions[newest] > end
    versions = {version: min(update, end) for version, update in versions.items()}
    replayed = {group for batch in replay for group in batch}
    state = QueueState(
        msgspec.structs.replace(
            header,
            next_group=max(header.next_group, snapshot.next_group),
            next_turn=len(groups),
            next_update=snapshot.next_update,
            prompt_cursor=max(header.prompt_cursor, place.prompt_cursor),
            train_step=place.train_step,
            served=newest,
            versions=versions,
            replay=replay,
        ),
        [_restart(g, turn, versions, replayed) for turn, g in enumerate(sorted(groups, key=_start_order))],
        updates_per_batch=updates_per_batch,
    )
    given_up = list(_given_up(state, replayed, policy=policy, next_update=end))
    for event in given_up:
        state.apply(event)
    state.returned.update(dict.fromkeys(state.requeued))
    state.requeued.clear()
    return state, given_up, diverged


def _replayed(
    groups: Iterable[GroupState], *, next_update: int, policy: StalenessPolicy
) -> tuple[tuple[int, ...], ...]:
    """Batches trained after the checkpoint, as long as they are complete and one follows on the other."""
    batches: dict[int, list[GroupState]] = {}
    for group in groups:
        if group.replay_update is not None and group.head is not None:
            batches.setdefault(group.replay_update, []).append(group)
    replay: list[tuple[int, ...]] = []
    while True:
        batch = batches.get(next_update + len(replay) * policy.budget.updates_per_batch, [])
        if len(batch) != policy.budget.batch_groups:
            return tuple(replay)
        replay.append(tuple(group.group for group in sorted(batch, key=lambda g: g.turn)))


def _restart(group: GroupState, turn: int, versions: Mapping[int, int], replayed: set[int]) -> GroupState:
    """The group as it starts: open or ready, and admitted on weights that are made again."""
    admission, head = group.admission, group.head
    update = min(admission.admitted_update, versions[admission.admitted_version])
    return msgspec.structs.replace(
        group,
        admission=replace(admission, admitted_update=update),
        head=None if head is None else msgspec.structs.replace(head, admitted_update=update),
        life="open" if head is None else "ready",
        turn=turn,
        masked=0,
        taken_update=None,
        train_step=None,
        trained_tokens=0,
        replay_update=group.replay_update if group.group in replayed else None,
    )


def _start_order(group: GroupState) -> tuple[float, float, int, int]:
    """Groups to be trained again first, then those that were taken, then those that were put."""
    updates = (math.inf if update is None else update for update in (group.replay_update, group.taken_update))
    replay, taken = updates
    return (replay, taken, group.turn, group.group)


def _given_up(state: QueueState, replayed: set[int], *, policy: StalenessPolicy, next_update: int) -> Iterator[Dropped]:
    """Ends of groups that cannot be trained within the bound any more."""
    waiting = [g for g in (*state.open.values(), *state.ready.values()) if g.group not in replayed]
    waiting.sort(key=lambda g: (g.admitted_update, g.group))
    places, budget = 0, policy.budget
    for group in waiting:
        if isinstance(policy, WaitPolicy):  # it would wait for a group without a place forever
            at = next_update + places // budget.batch_groups * budget.updates_per_batch
            if budget.is_expired(group.admitted_update, next_update=at):
                yield Dropped(group=group.group, reason=HOPELESS, requeue=True)
            else:
                places += 1
            continue
        newest = None if group.head is None else state.newest_update(group.group)
        reason = policy.expiry(group.admitted_update, newest_update=newest, next_update=next_update)
        if reason is not None:
            reason, again = end_of_expired(policy, reason, times=state.recycles.get(group.admission.prompt, 0))
            yield Dropped(group=group.group, reason=reason, requeue=again)


def _known_updates(published: Mapping[int, int], groups: Iterable[GroupState], *, lost_events: int) -> dict[int, int]:
    """Optimizer updates of every version, also of those whose Published event is missing.

    Such a version holds at least as many as the weights before it, so its tokens never count as younger than they are.
    """
    admissions = [group.admission for group in groups]
    pairs = [*published.items(), *((a.admitted_version, a.admitted_update) for a in admissions)]
    used = {version for version, _ in pairs}
    for group in groups:
        if group.head is not None:
            used.update(group.head.tokens_per_version())
    if lost_events:  # each may have been a publish, of weights that sampled tokens of an open group
        used.update(range(min(used), max(used) + lost_events + 1))
    updates = dict(published)
    for version in used - published.keys():
        least = max((update for other, update in pairs if other <= version), default=0)
        updates[version] = min([least, *(update for other, update in published.items() if other > version)])
    return updates


# ---- checkpoints


def _header_of(snapshot: QueueSnapshot, ledger: LedgerCounts) -> StateHeader:
    return StateHeader(
        next_group=snapshot.next_group,
        next_update=snapshot.next_update,
        served=snapshot.version,
        versions={snapshot.version: snapshot.update},
        recycles=dict(snapshot.recycles),
        ledger=ledger,
    )


def _header_without_unfinished(snapshot: QueueSnapshot) -> StateHeader:
    """A state without groups, to which the unfinished ones can be added."""
    ended = _without_open(snapshot.ledger)
    return _header_of(snapshot, replace(ended, admitted=ended.admitted - len(snapshot.unfinished)))


def _header_of_damaged(stored: StoredEvents, place: JournalPlace) -> StateHeader:
    """The header by the checkpoint, if the one of the journal cannot be read."""
    snapshot = place.checkpoint or QueueSnapshot()
    return msgspec.structs.replace(
        _header_without_unfinished(snapshot),
        next_group=max((snapshot.next_group, *(group.group + 1 for group in stored.groups))),
        next_turn=max((0, *(group.turn + 1 for group in stored.groups))),
        prompt_cursor=max((place.prompt_cursor, *(group.admission.prompt + 1 for group in stored.groups))),
        train_step=place.train_step,
        settled_step=place.train_step,
        returned=tuple(place.waiting),
        live=tuple(admission.group for admission in snapshot.unfinished),
    )


def _header_of_checkpoint(place: JournalPlace) -> StateHeader:
    """A state without groups; those that were unfinished in the checkpoint count as dropped."""
    snapshot = place.checkpoint or QueueSnapshot()
    counts, unfinished = _without_open(snapshot.ledger), len(snapshot.unfinished)
    ledger = replace(counts, dropped=counts.dropped + unfinished, reasons=_plus(counts, STOPPED, unfinished))
    return msgspec.structs.replace(
        _header_of(snapshot, ledger),
        prompt_cursor=place.prompt_cursor,
        train_step=place.train_step,
        settled_step=place.train_step,
        returned=tuple(place.waiting),
    )


def _without_open(counts: LedgerCounts) -> LedgerCounts:
    """The counts if tokens of groups that were held are dropped."""
    return replace(counts, open=0, dropped_tokens=counts.dropped_tokens + counts.open_tokens, open_tokens=0)


def _plus_lost(counts: LedgerCounts, groups: int) -> LedgerCounts:
    """The counts with groups that cannot be read as dropped."""
    return replace(
        counts, admitted=counts.admitted + groups, dropped=counts.dropped + groups, reasons=_plus(counts, LOST, groups)
    )


def _plus(counts: LedgerCounts, reason: str, groups: int) -> dict[str, int]:
    name = reason.partition(":")[0]
    return counts.reasons | ({name: counts.reasons.get(name, 0) + groups} if groups else {})


def _require_step(state: QueueState, place: JournalPlace) -> None:
    way_out = f"remove {place.directory}, which drops its groups in flight"
    if place.train_step > state.train_step:
        raise JournalStepError(
            f"the checkpoint is of train step {place.train_step}, the journal in {place.directory} ends at step "
            f"{state.train_step}: its last events are missing; resume from an older checkpoint, or {way_out}"
        )
    if place.train_step < state.settled_step:
        raise JournalStepError(
            f"the checkpoint is of train step {place.train_step}, the journal in {place.directory} belongs to one of "
            f"step {state.settled_step}: groups trained in between are gone; resume from a newer checkpoint, or "
            f"{way_out}"
        )


def _require_settings(state: QueueState, before: Settings, place: JournalPlace) -> None:
    """Refuse settings that groups in flight were not started with."""
    in_flight = len(state.live) + len(state.trained)
    changed = [name for name, value in place.settings.items() if name in before and before[name] != value]
    if in_flight and changed:
        values = ", ".join(f"{name} was {before[name]} and is {place.settings[name]}" for name in changed)
        raise JournalSettingsError(
            f"{values}, but {in_flight} groups of the journal in {place.directory} are in flight; continue with the "
            f"old values, or remove {place.directory}, which drops these groups and admits their prompts again from "
            "the last checkpoint"
        )


def _restored(
    state: QueueState,
    *,
    began: bool = False,
    diverged: bool = False,
    given_up: frozenset[int] = frozenset(),
    notes: tuple[str, ...] = (),
) -> Restored:
    return Restored(
        began=began,
        open=tuple(group.admission for group in state.open.values()),
        ready=tuple(group.admission for group in state.ready.values()),
        replay=len(state.replay),
        prompt_cursor=state.prompt_cursor,
        waiting=tuple(state.returned),
        version=max(state.versions),
        diverged=diverged,
        version_updates=dict(state.versions),
        given_up=given_up,
        next_group=state.next_group,
        notes=notes,
    )
