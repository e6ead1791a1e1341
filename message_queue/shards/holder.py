"""What the process of one shard runs: the content of its groups, in memory and in a journal of its own.

The journal is one as the queue's, in which every group is open until it is forgotten. It does not know prompts: a group
is there under a number of the journal's own, in the order in which groups arrive, and its prompt is its id.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from message_queue.content import Content, Contents, GroupMessage, Recorded
from message_queue.contract import Admission, QueueError
from message_queue.journal import JournalStart
from message_queue.journal.records import Marked
from message_queue.log import JournaledLog
from message_queue.progress import RolloutRecord
from message_queue.restart import JournalPlace, open_patiently
from message_queue.shards.inventory import Books, HeldGroup, Inventory, empty_group
from message_queue.trajectory import PromptGroup
from message_queue.wire import encode_group, pack_group
from message_queue.wire.packed import Buffers, NoSharedMemory, SharedMemory

ENDED = "ended"
NO_BOOKS = Books(0, frozenset(), frozenset())


class ContentHolder:
    """Groups of one shard. Runs in one event loop; give it to an async actor as it is. Call `open`, then `begin`.

    Args:
        place: of its journal; see `shards.shard_place`.
        memory: that every client shares with this process.
    """

    def __init__(self, place: JournalPlace, *, memory: SharedMemory | None = None) -> None:
        self._place = place
        self._contents = Contents(memory or NoSharedMemory())
        self._whole: dict[int, Content] = {}  # put in this life, and not known to be trained
        self._numbers: dict[int, int] = {}  # group -> its number in the journal
        self._next_number = 0
        self._beginning: dict[int, asyncio.Future[None]] = {}
        self._books = NO_BOOKS
        self._opened = False

    async def open(self) -> Inventory:
        """Open the journal, once, before any other call.

        Raises:
            JournalError: it cannot be used; the message says why and the way out.
            QueueError: it is open.
        """
        if self._opened:
            raise QueueError(f"the journal {self._place.directory} was opened before")
        self._opened = True
        self._journal, recovered = await open_patiently(self._place, JournalStart())
        self._log = JournaledLog(
            self._journal, trajectories=self._place.trajectories, resume_routing=self._place.resume_routing
        )
        self._next_number = recovered.next_group
        groups: dict[int, HeldGroup] = {}
        for found in recovered.open:
            number, group = found.admission.group, found.admission.prompt
            self._numbers[group] = number
            content = await self._journal.read(number, routing=self._place.routing)
            groups[group] = HeldGroup(pack_group(content).head, found.records, dict(found.calls))
        notes = () if recovered.began else tuple(f"{self._place.directory.name}: {n}" for n in recovered.report.lines())
        return Inventory(recovered.began, groups, notes)

    async def begin(self, books: Books) -> None:
        """Go on with the groups that are in flight by the books, and drop the others, for good; once.

        Raises:
            QueueError: it goes on already; these books are of a message that came twice.
        """
        if self._books is not NO_BOOKS:
            raise QueueError(f"the groups of {self._place.directory} were begun before")
        self._books = books
        dropped = [number for group, number in self._numbers.items() if group not in books.live]
        for number in dropped:
            await self._journal.dropped(number, reason=ENDED)
        await self._journal.sync()  # no group is admitted under an id that this would give content
        self._numbers = {group: number for group, number in self._numbers.items() if group in books.live}
        for group in self._numbers:
            self._contents.begin(group)

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        """See `TrajectoryQueue.append`."""
        fetched = await self._contents.fetch(records)
        for group in dict.fromkeys(record.group for record in records):
            if not self._books.ended(group):
                await self._begun(group)
        pairs = [(sent, local) for sent, local in zip(records, fetched, strict=True) if sent.group in self._numbers]
        for written in [self._log.appended(replace(local, group=self._numbers[local.group])) for _, local in pairs]:
            await written
        self._contents.keep([sent for sent, _ in pairs], [local for _, local in pairs])

    async def whole(self, group: int, message: GroupMessage) -> Marked | None:
        """A group is finished: how much there is of it, once that is durable; None where it is not in flight.

        Raises:
            JournalError: its trajectories are not all closed. As `Contents.group` otherwise.
        """
        if group not in self._numbers:
            return None
        mark = await self._journal.mark(self._numbers[group])
        if not (group in self._whole and isinstance(message, Recorded)):
            content = (await self._contents.group(message)).content
            if group in self._numbers:
                self._whole[group] = content
                self._contents.forget(group)
        return mark

    async def contents(self, admissions: Sequence[Admission]) -> list[GroupMessage]:
        """Groups of a batch, each as it was put, or as it is in the journal.

        Raises:
            QueueError: one is not here.
        """
        return [
            self._whole[a.group].message if a.group in self._whole else encode_group(await self._read(a))
            for a in admissions
        ]

    async def arrays(self, groups: Sequence[int]) -> list[list[Buffers]]:
        """What the references of groups are of, for who cannot read them."""
        return [list(self._whole[group].shared) if group in self._whole else [] for group in groups]

    async def read(self, admissions: Sequence[Admission]) -> list[bytes]:
        """Groups as far as they are recorded, encoded; one that is not here is empty."""
        return [encode_group(await self._read(a) if a.group in self._numbers else self._empty(a)) for a in admissions]

    async def settle(self, books: Books) -> None:
        """Forget what has ended. Books that come late change nothing."""
        for group in [*self._whole]:
            if group < books.next_group and group not in books.wanted:
                del self._whole[group]
        books = self._books = books.after(self._books)
        written = [
            self._log.dropped(self._numbers.pop(group), reason=ENDED)
            for group in list(self._numbers)
            if books.ended(group)
        ]
        for group in self._contents.groups():
            if books.ended(group):
                self._contents.forget(group)
        for record in written:
            await record

    async def sync(self) -> None:
        """See `Journal.sync`."""
        await self._journal.sync()

    async def close_journal(self) -> None:
        """See `Journal.close`."""
        await self._journal.close()

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    # ---- inside

    async def _begun(self, group: int) -> None:
        """Give a group its place in the journal, if it has none."""
        if group in self._numbers:
            return
        if group not in self._beginning:
            self._beginning[group] = asyncio.ensure_future(self._begin_group(group))
        await asyncio.shield(self._beginning[group])

    async def _begin_group(self, group: int) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        admission = Admission(group=number, prompt=group, admitted_version=0, admitted_update=0)
        try:
            await self._log.admitted(admission)
        finally:
            del self._beginning[group]
        self._numbers[group] = number
        self._contents.begin(group)

    def _empty(self, admission: Admission) -> PromptGroup:
        place = self._place
        return empty_group(admission, place.trajectories, resume_routing=place.resume_routing, routing=place.routing)

    async def _read(self, admission: Admission) -> PromptGroup:
        if admission.group not in self._numbers:
            raise QueueError(f"{self._place.directory.name} does not hold group {admission.group}")
        content = await self._journal.read(self._numbers[admission.group], routing=self._place.routing)
        return replace(
            content,
            group=admission.group,
            prompt=admission.prompt,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
        )
