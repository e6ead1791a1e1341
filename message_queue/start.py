"""What a queue goes on from: nothing, a snapshot of a queue without its groups, or all that a journal gave back.

From a journal. What was trained after the checkpoint is trained again, in the same batches and at the same updates,
which makes the same weights again; then the run goes on where it was. So staleness is counted as it was, and the groups
that were open go on under weights that are not older than those they were admitted on.

    checkpoint      trained again          open, ready
    ----|-----------------------------|------------------->
       next_update                   end

Where a batch is not whole any more (records were lost, or the batches have another size now), or would not be trained
as it was (the bound or the policy is another one now), it and those after it are ready groups like all others. What is
too old by the bound and the policy of now is given up. Weights that were published after `end` are counted as of `end`
then: nobody can tell how far they are from those that will be trained, which get a version of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from message_queue.contract import Admission, QueuedGroup, QueueSnapshot
from message_queue.delivery import masked_tokens
from message_queue.holdings import Holdings
from message_queue.journal import Recovered
from message_queue.ledger import Ledger, LedgerCounts
from message_queue.policies import StalenessPolicy, WaitPolicy, end_of_expired
from message_queue.staleness import newest_update
from message_queue.versions import known_updates


class RestoredGroup(QueuedGroup, Protocol):
    """A group that a journal gave back; it may count as admitted on weights that are made again."""

    @property
    def admitted_update(self) -> int: ...
    @admitted_update.setter
    def admitted_update(self, update: int) -> None: ...


G = TypeVar("G", bound=QueuedGroup)
R = TypeVar("R", bound=RestoredGroup)
STOPPED = "stopped before it was trained: its prompt is admitted again"
HOPELESS = "recycled: more groups were in flight than can be trained within the bound after the restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A group that does not survive the restart. segments and tokens were generated in vain.

    again: its prompt is admitted again.
    """

    admission: Admission
    reason: str
    again: bool = False
    segments: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStart(Generic[G]):
    """next_group: id of the next admission. next_update: at which the next batch is taken.

    versions: `param_version` -> optimizer updates. served: of them, by the replicas. diverged: its weights are not
    those that are made again. open: groups that go on. ready: in the order they were put. replay: batches to hand out
    first, groups of `ready`. given_up: end at once. recycles: prompt -> times that it was to be admitted again; those
    that wait for it are asked for by whoever restores. ledger: counts of the groups that ended before, and of no other.
    """

    next_group: int = 0
    next_update: int = 0
    versions: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    served: int = 0
    diverged: bool = False
    open: tuple[Admission, ...] = ()
    ready: tuple[G, ...] = ()
    replay: tuple[tuple[int, ...], ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    recycles: Mapping[int, int] = field(default_factory=dict[int, int])
    ledger: LedgerCounts = field(default_factory=LedgerCounts)


def start_of_snapshot(snapshot: QueueSnapshot) -> QueueStart[QueuedGroup]:
    """After a snapshot; its unfinished groups end as dropped. All of `snapshot.prompts` are asked for again."""
    return QueueStart(
        next_group=snapshot.next_group,
        next_update=snapshot.next_update,
        versions={snapshot.version: snapshot.update},
        served=snapshot.version,
        given_up=tuple(GivenUp(admission=admission, reason=STOPPED) for admission in snapshot.unfinished),
        recycles=snapshot.recycles,
        ledger=replace(
            without_open_tokens(snapshot.ledger),
            admitted=snapshot.ledger.admitted - len(snapshot.unfinished),
            open=0,
        ),
    )


def with_ready(start: QueueStart[Any], ready: Iterable[G]) -> QueueStart[G]:
    """The same with its ready groups in another form."""
    return replace(start, ready=tuple(ready))


def queue_start(restored: QueueSnapshot | QueueStart[G] | None) -> QueueStart[G] | QueueStart[QueuedGroup]:
    """What a queue that is given `restored` goes on from."""
    return start_of_snapshot(restored) if isinstance(restored, QueueSnapshot) else restored or QueueStart()


def start_of_journal(
    recovered: Recovered, groups: Mapping[int, R], *, next_update: int, policy: StalenessPolicy
) -> QueueStart[R]:
    """After a restart from a journal.

    Args:
        groups: content of all that are open or ready.
        next_update: optimizer updates in the checkpoint.
        policy: of the queue; groups that it can no longer train are given up.
    """
    budget = policy.budget
    known = known_updates(
        recovered.version_updates,
        admitted=((group.admitted_version, group.admitted_update) for group in groups.values()),
        used=(version for group in groups.values() for version in group.tokens_per_version()),
    )
    replay = _replayed(recovered, groups, known, next_update=next_update, policy=policy)
    end = next_update + len(replay) * budget.updates_per_batch
    versions = {version: min(update, end) for version, update in known.items()}
    for group in groups.values():
        group.admitted_update = min(group.admitted_update, versions[group.admitted_version])
    replayed = {group for batch in replay for group in batch}
    ready = [groups[g.admission.group] for g in recovered.ready]
    waiting = [groups[g.admission.group] for g in recovered.open] + [g for g in ready if g.group not in replayed]
    hopeless = _hopeless(waiting, policy, next_update=end)
    too_old = _too_old(recovered, groups, waiting, versions, policy=policy, next_update=end)
    given_up = [
        *(_give_up(groups[group], reason=HOPELESS, again=True) for group in hopeless),
        *(_give_up(groups[group], reason=reason, again=again) for group, (reason, again) in too_old.items()),
    ]
    gone = {ended.admission.group for ended in given_up}
    return QueueStart(
        next_group=recovered.next_group,
        next_update=next_update,
        versions=versions,
        served=max(known),
        diverged=max(known) > recovered.version or known[max(known)] > end,
        open=tuple(admission_of(groups[g.admission.group]) for g in recovered.open if g.admission.group not in gone),
        ready=tuple(group for group in ready if group.group not in gone),
        replay=replay,
        given_up=tuple(given_up),
        recycles=_recycles(recovered.recycles, given_up),
        ledger=replace(recovered.ledger, admitted=recovered.ledger.admitted - len(groups), open=0),
    )


def admission_of(group: QueuedGroup) -> Admission:
    """What the group was admitted as."""
    return Admission(
        group=group.group,
        prompt=group.prompt,
        admitted_version=group.admitted_version,
        admitted_update=group.admitted_update,
    )


def restore(start: QueueStart[G], *, held: Holdings[G], ledger: Ledger) -> None:
    """Put the groups of `start` where they belong."""

    def begin(admission: Admission) -> None:
        held.start(admission)
        ledger.admitted(admission.group, version=admission.admitted_version)

    for admission in start.open:
        begin(admission)
    for group in start.ready:
        begin(admission_of(group))
        ledger.delivered(group.group, segments=group.num_segments, tokens=group.num_tokens)
        held.deliver(group, newest_update=newest_update(group.tokens_per_version(), start.versions))
    for ended in start.given_up:
        begin(ended.admission)
        ledger.dropped(ended.admission.group, reason=ended.reason, segments=ended.segments, tokens=ended.tokens)
        held.end(ended.admission.group)


def ended_counts(snapshot: QueueSnapshot) -> LedgerCounts:
    """The ledger of a snapshot whose unfinished groups ended as dropped, their prompts to be admitted again."""
    counts, unfinished = snapshot.ledger, len(snapshot.unfinished)
    reason, reasons = STOPPED.partition(":")[0], dict(counts.reasons)
    if unfinished:
        reasons[reason] = reasons.get(reason, 0) + unfinished
    return replace(without_open_tokens(counts), dropped=counts.dropped + unfinished, open=0, reasons=reasons)


def without_open_tokens(counts: LedgerCounts) -> LedgerCounts:
    """The counts where tokens of groups that were held are dropped."""
    return replace(counts, dropped_tokens=counts.dropped_tokens + counts.open_tokens, open_tokens=0)


def _replayed(
    recovered: Recovered,
    groups: Mapping[int, QueuedGroup],
    updates: Mapping[int, int],
    *,
    next_update: int,
    policy: StalenessPolicy,
) -> tuple[tuple[int, ...], ...]:
    """Batches trained after the checkpoint, as long as they are whole, one follows on the other, and the same tokens
    of them take gradient."""
    batches: dict[int, list[int]] = {}
    for group in recovered.ready:
        if group.admission.group in recovered.trained:
            batches.setdefault(recovered.trained[group.admission.group], []).append(group.admission.group)
    whole: list[tuple[int, ...]] = []
    while True:
        update = next_update + len(whole) * policy.budget.updates_per_batch
        batch = batches.get(update, [])
        if len(batch) != policy.budget.batch_groups:
            return tuple(whole)
        for number in batch:
            masked = recovered.masked_tokens.get(number, 0)
            if not _is_trained_as_before(groups[number], updates, masked=masked, update=update, policy=policy):
                return tuple(whole)
        whole.append(tuple(batch))


def _is_trained_as_before(
    group: QueuedGroup, updates: Mapping[int, int], *, masked: int, update: int, policy: StalenessPolicy
) -> bool:
    """Whether the policy gives gradient to the tokens of a group to which the one before gave it, at `update`."""
    oldest = policy.min_update(next_update=update)
    young = [updates[v] for v, tokens in group.tokens_per_version().items() if tokens and updates[v] >= oldest]
    if any(policy.budget.is_expired(of, next_update=update) for of in young):
        return False
    return masked_tokens(group, updates, min_update=oldest) == masked


def _hopeless(groups: Iterable[QueuedGroup], policy: StalenessPolicy, *, next_update: int) -> list[int]:
    """Groups that find no place before their deadline, those admitted last among those that compete.

    Policy wait would wait for them for ever, so their prompts start again; the others give up what is too old, when it
    is.
    """
    if not isinstance(policy, WaitPolicy):
        return []
    budget = policy.budget
    places, hopeless = 0, list[int]()
    for group in sorted(groups, key=lambda g: (g.admitted_update, g.group)):
        at = next_update + places // budget.batch_groups * budget.updates_per_batch
        if budget.is_expired(group.admitted_update, next_update=at):
            hopeless.append(group.group)
        else:
            places += 1
    return hopeless


def _too_old(
    recovered: Recovered,
    groups: Mapping[int, QueuedGroup],
    waiting: Sequence[QueuedGroup],
    versions: Mapping[int, int],
    *,
    policy: StalenessPolicy,
    next_update: int,
) -> dict[int, tuple[str, bool]]:
    """Groups that expired by the bound and the policy of now -> why they end, and whether their prompt starts again."""
    complete = {g.admission.group for g in recovered.ready}
    ended: dict[int, tuple[str, bool]] = {}
    for group in waiting:
        newest = newest_update(group.tokens_per_version(), versions) if group.group in complete else None
        reason = policy.expiry(group.admitted_update, newest_update=newest, next_update=next_update)
        if reason is not None:
            ended[group.group] = end_of_expired(policy, reason, times=recovered.recycles.get(group.prompt, 0))
    return ended


def _give_up(group: QueuedGroup, *, reason: str, again: bool = False) -> GivenUp:
    return GivenUp(
        admission=admission_of(group),
        reason=reason,
        again=again,
        segments=group.num_segments,
        tokens=group.num_tokens,
    )


def _recycles(before: Mapping[int, int], given_up: Iterable[GivenUp]) -> dict[int, int]:
    """prompt -> times that it was to be admitted again, while it is not done."""
    recycles = dict(before)
    for ended in given_up:
        times = recycles.pop(ended.admission.prompt, 0)
        if ended.again:
            recycles[ended.admission.prompt] = times + 1
    return recycles
