"""Opens the journal of a queue whose content is with holders, by what those have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from message_queue.contract import Admission
from message_queue.journal import Journal
from message_queue.log import BooksLog
from message_queue.policies import StalenessPolicy
from message_queue.restart import JournalPlace, Restored, open_patiently, restored_of
from message_queue.shards.inventory import HeldGroup, Inventory, empty_group
from message_queue.start import QueueStart, admission_of, start_of_journal, with_ready
from message_queue.wire import EncodedGroup, pack_group, with_ids


@dataclass(slots=True)
class RestoredHead:
    """A group by its admission and the head of its message."""

    group: int
    prompt: int
    admitted_version: int
    admitted_update: int
    content: EncodedGroup

    @property
    def num_segments(self) -> int:
        return self.content.num_segments

    @property
    def num_tokens(self) -> int:
        return self.content.num_tokens

    @property
    def closed(self) -> bool:
        return self.content.closed

    def tokens_per_version(self) -> Mapping[int, int]:
        return self.content.tokens_per_version()

    def encoded(self) -> EncodedGroup:
        """As it is queued."""
        ids = (self.group, self.prompt, self.admitted_version, self.admitted_update)
        return EncodedGroup(with_ids(self.content.data, ids))


async def open_books(
    place: JournalPlace, inventories: Sequence[Inventory], *, policy: StalenessPolicy
) -> tuple[Journal, BooksLog, QueueStart[EncodedGroup], Restored[Admission]]:
    """`restart.open_journal`, of the books."""
    held = {group: found for inventory in inventories for group, found in inventory.groups.items()}
    records = {group: found.records for group, found in held.items()}
    journal, recovered = await open_patiently(place, replace(place.start(), held=records))
    try:
        groups = {
            g.admission.group: _head(g.admission, held.get(g.admission.group), place)
            for g in (*recovered.open, *recovered.ready)
        }
        next_update = 0 if place.checkpoint is None else place.checkpoint.next_update
        start = start_of_journal(recovered, groups, next_update=next_update, policy=policy)
        for ended in start.given_up:
            await journal.dropped(ended.admission.group, reason=ended.reason, tokens=ended.tokens, again=ended.again)
    except BaseException:
        await journal.close()
        raise
    log = BooksLog(journal, trajectories=place.trajectories, resume_routing=place.resume_routing)
    encoded = with_ready(start, (group.encoded() for group in start.ready))
    restored = restored_of(recovered, start, {group: admission_of(head) for group, head in groups.items()})
    notes = [note for inventory in inventories for note in inventory.notes]
    if not recovered.began:
        notes += [
            f"there was no journal of shard {shard}: what its groups had is lost"
            for shard, inventory in enumerate(inventories)
            if inventory.began
        ]
    calls = {a.group: dict(held[a.group].calls) for a in start.open if a.group in held and held[a.group].calls}
    return journal, log, encoded, replace(restored, notes=(*restored.notes, *notes), calls=calls)


def _head(admission: Admission, found: HeldGroup | None, place: JournalPlace) -> RestoredHead:
    if found is None:
        empty = empty_group(admission, place.trajectories, resume_routing=place.resume_routing, routing=None)
        found = HeldGroup(pack_group(empty).head, 0, {})
    a = admission
    return RestoredHead(a.group, a.prompt, a.admitted_version, a.admitted_update, EncodedGroup(found.head))
