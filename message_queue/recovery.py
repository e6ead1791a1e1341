"""Opens the queue of a run: new, from a checkpoint, or from a checkpoint and the journal of the events after it.

Groups trained after the checkpoint become ready once more. They are trained in the same batches and at the same
updates, and so make the same weights; then the run continues at the point of the stop.

    checkpoint      repeated               open, ready
    ----|-----------------------------|------------------->
       next_update                   end

So staleness is exact, and open groups continue under weights that are not older than those of their admission. If a
batch is incomplete because the content of one of its groups was damaged, it and those after it are ready groups like
all others. Weights published after `end` then count as of `end`: their distance from the weights that will be trained
is unknown, and those get a separate version.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from message_queue.errors import JournalBusy, JournalMismatch
from message_queue.events import Checkpointed, Dropped
from message_queue.journal import EventJournal, JournalConfig, Settings, StoredEvents
from message_queue.ledger import Drop, DropKind
from message_queue.policies import Policy, WaitPolicy
from message_queue.queue import TrajectoryQueue
from message_queue.state import GroupState, QueueSnapshot, QueueState, StoredState
from message_queue.trajectory import Admission

TOO_MANY = Drop(DropKind.REQUEUED, "more groups were in flight than can be trained within the bound after the restart")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPlace:
    """The journal of a run, and the checkpoint that the run continues from."""

    directory: Path
    """Folder of the journal; made if it is missing."""
    run: str
    """Name, unique to the run and the same at every restart."""
    config: JournalConfig = field(default_factory=JournalConfig)
    """Durability of the journal."""
    settings: Settings = field(default_factory=dict[str, int | str])
    """Config field -> value, for the fields that may not change while groups are in flight."""
    checkpoint: QueueSnapshot | None = None
    """The queue in the checkpoint; None if there is no checkpoint."""
    train_step: int = 0
    """Optimizer steps in the checkpoint."""
    prompt_cursor: int = 0
    """First prompt that was never handed out by the checkpoint; used if the journal is new."""
    waiting: Sequence[int] = ()
    """Prompts before the cursor that are readmitted; used if the journal is new."""
    incomplete: frozenset[int] = frozenset()
    """Groups whose content is missing or damaged: they are reopened."""
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
    trajectories: Mapping[int, int]
    """Ready group -> number of its trajectories, failed ones included."""
    replay: int
    """Batches that `take` hands out first, to be repeated."""
    prompt_cursor: int
    """First prompt that was never admitted."""
    waiting: tuple[int, ...]
    """Prompts before the cursor that the driver readmits, in order."""
    version: int
    """Newest `param_version` that was published."""
    diverged: bool
    """Whether the weights of `version` are not the ones that replay makes."""
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
    place: JournalPlace, *, policy: Policy, max_ready: int | None = None
) -> tuple[TrajectoryQueue, EventJournal, Restored]:
    """The queue of a run with its journal; close the journal when the queue is not used any more.

    Raises:
        JournalError: the journal cannot be used; the type is the reason, and the message has the way out.
    """
    journal = await _open_journal(place)
    try:
        state, restored = recover(await asyncio.to_thread(journal.read), place, policy=policy)
        await journal.record([state.dump()])
    except BaseException:
        await journal.close()
        raise
    return TrajectoryQueue(policy, max_ready=max_ready, state=state, journal=journal), journal, restored


async def _open_journal(place: JournalPlace) -> EventJournal:
    clock = asyncio.get_running_loop().time
    until = clock() + place.busy_s
    make = partial(EventJournal, place.directory, run=place.run, settings=place.settings, config=place.config)
    while True:
        try:
            return await asyncio.to_thread(make)
        except JournalBusy:
            if clock() >= until:
                raise
        await asyncio.sleep(min(0.5, place.busy_s))


def recover(stored: StoredEvents | None, place: JournalPlace, *, policy: Policy) -> tuple[QueueState, Restored]:
    """The state that the queue starts with.

    Args:
        stored: contents of the journal; None if it is new.

    Raises:
        JournalMismatch: the journal is not of the checkpoint, or a setting changed while groups are in flight.
    """
    given_up, notes = list[Dropped](), list[str]()
    if stored is None:
        state = state_of_checkpoint(place)
    else:
        before = _followed(stored, place)
        state, given_up = _restarted(before, place, policy=policy)
        notes = list(_notes(before, state, given_up, incomplete=place.incomplete))
    return state, Restored(
        began=stored is None,
        open=tuple(group.admission for group in state.open.values()),
        ready=tuple(group.admission for group in state.ready.values()),
        trajectories={n: len(group.head.trajectories) for n, group in state.ready.items() if group.head is not None},
        replay=len(state.replay),
        prompt_cursor=state.prompt_cursor,
        waiting=tuple(state.returned),
        version=max(state.versions),
        diverged=state.diverged,
        version_updates=dict(state.versions),
        given_up=frozenset(event.group for event in given_up),
        next_group=state.next_group,
        notes=tuple(notes),
    )


def state_of_checkpoint(place: JournalPlace) -> QueueState:
    """State after a checkpoint without a journal: groups that were unfinished count as dropped.

    The driver readmits their prompts.
    """
    snapshot = place.checkpoint or QueueSnapshot()
    counts, unfinished = snapshot.ledger, len(snapshot.unfinished)
    stopped = {DropKind.STOPPED: counts.reasons.get(DropKind.STOPPED, 0) + unfinished} if unfinished else {}
    return QueueState.of(
        StoredState(
            next_group=snapshot.next_group,
            next_update=snapshot.next_update,
            prompt_cursor=place.prompt_cursor,
            train_step=place.train_step,
            settled_step=place.train_step,
            served=snapshot.version,
            versions={snapshot.version: snapshot.update},
            returned=list(place.waiting),
            requeues=dict(snapshot.requeues),
            ledger=replace(
                counts,
                dropped=counts.dropped + unfinished,
                dropped_tokens=counts.dropped_tokens + counts.open_tokens,
                reasons=counts.reasons | stopped,
                open=0,
                open_tokens=0,
            ),
        )
    )


def _followed(stored: StoredEvents, place: JournalPlace) -> StoredState:
    """The state at the end of the journal."""
    base, events = stored
    state = QueueState.of(base.state)
    for event in events:
        state.apply(event)
    _require_step(state, place)
    state.apply(Checkpointed(train_step=place.train_step))
    _require_settings(state, base.settings, place)
    return state.dump()


def _notes(
    before: StoredState, state: QueueState, given_up: Sequence[Dropped], *, incomplete: frozenset[int]
) -> Iterator[str]:
    for group in sorted(incomplete & state.open.keys()):
        yield f"group {group} is open again: content is missing"
    again = sum(group.replay_update is not None for group in before.groups) - sum(map(len, state.replay))
    if again:
        yield (
            f"{again} groups that were trained after the checkpoint are not trained again in the same batches, because "
            "their batches are incomplete"
        )
    for requeue, end in ((False, "are dropped"), (True, "are dropped, and their prompts admitted again")):
        if reasons := [event.reason for event in given_up if event.requeue == requeue]:
            yield f"{len(reasons)} groups {end}: {reasons[0]}"


def _restarted(stored: StoredState, place: JournalPlace, *, policy: Policy) -> tuple[QueueState, list[Dropped]]:
    """(the state after the restart, groups dropped by it)."""
    snapshot = place.checkpoint or QueueSnapshot()
    groups = [GroupState(admission=g.admission) if g.group in place.incomplete else g for g in stored.groups]
    replay = _replayed(groups, next_update=snapshot.next_update, policy=policy)
    end = snapshot.next_update + len(replay) * policy.updates_per_batch
    newest = max(stored.versions)
    versions = {version: min(update, end) for version, update in stored.versions.items()}
    replayed = {group for batch in replay for group in batch}
    state = QueueState.of(
        msgspec.structs.replace(
            stored,
            next_turn=len(groups),
            next_update=snapshot.next_update,
            train_step=place.train_step,
            served=newest,
            versions=versions,
            diverged=stored.diverged or stored.versions[newest] > end,
            replay=replay,
            groups=tuple(
                _restart(group, turn, versions, replayed) for turn, group in enumerate(sorted(groups, key=_start_order))
            ),
        )
    )
    given_up = list(_given_up(state, replayed, policy=policy, next_update=end))
    for event in given_up:
        state.apply(event)
    state.returned = list(dict.fromkeys((*state.returned, *state.requeued)))
    state.requeued.clear()
    return state, given_up


def _replayed(groups: Iterable[GroupState], *, next_update: int, policy: Policy) -> list[tuple[int, ...]]:
    """Batches trained after the checkpoint, up to the first that is incomplete or does not follow on the one before."""
    batches: dict[int, list[GroupState]] = {}
    for group in groups:
        if group.replay_update is not None and group.head is not None:
            batches.setdefault(group.replay_update, []).append(group)
    replay: list[tuple[int, ...]] = []
    while True:
        batch = batches.get(next_update + len(replay) * policy.updates_per_batch, [])
        if len(batch) != policy.batch_groups:
            return replay
        replay.append(tuple(group.group for group in sorted(batch, key=lambda g: g.turn)))


def _restart(group: GroupState, turn: int, versions: Mapping[int, int], replayed: set[int]) -> GroupState:
    """The group as it starts: open or ready, and admitted on weights that are made again."""
    admission, head = group.admission, group.head
    update = min(admission.admitted_update, versions[admission.admitted_version])
    return msgspec.structs.replace(
        group,
        admission=replace(admission, admitted_update=update),
        head=None if head is None else replace(head, admitted_update=update),
        life="open" if head is None else "ready",
        turn=turn,
        masked=0,
        taken_update=None,
        train_step=None,
        trained_tokens=0,
        replay_update=group.replay_update if group.group in replayed else None,
    )


def _start_order(group: GroupState) -> tuple[float, float, int, int]:
    """Groups to repeat first, then those that were taken, then those that were put."""
    replay, taken = (math.inf if update is None else update for update in (group.replay_update, group.taken_update))
    return (replay, taken, group.turn, group.group)


def _given_up(state: QueueState, replayed: set[int], *, policy: Policy, next_update: int) -> Iterator[Dropped]:
    """Ends of groups that cannot be trained within the bound any more."""
    waiting = [g for g in (*state.open.values(), *state.ready.values()) if g.group not in replayed]
    waiting.sort(key=lambda g: (g.admitted_update, g.group))
    places = 0
    for group in waiting:
        if isinstance(policy, WaitPolicy):  # it would wait for a group without a place forever
            at = next_update + places // policy.batch_groups * policy.updates_per_batch
            if policy.is_expired(group.admitted_update, next_update=at):
                yield Dropped(group=group.group, reason=TOO_MANY)
            else:
                places += 1
            continue
        newest = state.newest_update(group.head)
        reason = policy.expiry(group.admitted_update, newest_update=newest, next_update=next_update)
        if reason is not None:
            reason = policy.end_of_expired(reason, times=state.requeues.get(group.admission.prompt, 0))
            yield Dropped(group=group.group, reason=reason)


def _require_step(state: QueueState, place: JournalPlace) -> None:
    way_out = f"remove {place.directory}, which drops its groups in flight"
    if place.train_step > state.train_step:
        raise JournalMismatch(
            f"the checkpoint is of train step {place.train_step}, the journal in {place.directory} ends at step "
            f"{state.train_step}: its last events are missing; resume from an older checkpoint, or {way_out}"
        )
    if place.train_step < state.settled_step:
        raise JournalMismatch(
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
        raise JournalMismatch(
            f"{values}, but {in_flight} groups of the journal in {place.directory} are in flight; continue with the "
            f"old values, or remove {place.directory}, which drops these groups and admits their prompts again from "
            "the last checkpoint"
        )
