"""What the books and the holders tell each other after a restart, and the names of their journals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from message_queue.contract import Admission
from message_queue.journal import JournalRunError, check_owner
from message_queue.journal.format import FILE_BYTES, MAX_RUN_BYTES, read_run
from message_queue.journal.records import Marked
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup, ResumeRouting, Trajectory

MAX_SHARDS = 64


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """What a holder has of a group: the head of its message, the records that it is, and calls as in RecoveredGroup."""

    head: bytes
    records: int
    calls: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a holder has by its journal. began: there was none. notes: what a person should read."""

    began: bool
    groups: Mapping[int, HeldGroup]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Books:
    """Where all groups below `next_group` are.

    live: in flight, or trained after the checkpoint; the others have ended. wanted: of them, those that were not
    trained.
    """

    next_group: int
    live: frozenset[int]
    wanted: frozenset[int]

    def ended(self, group: int) -> bool:
        return group < self.next_group and group not in self.live

    def after(self, before: Books) -> Books:
        """With what was known before: a group that has ended stays so, in whatever order the books arrive."""
        live = {group for group in self.live if not before.ended(group)}
        later = {group for group in before.live if group >= self.next_group}
        return Books(max(self.next_group, before.next_group), frozenset(live | later), self.wanted)


@dataclass(frozen=True, slots=True)
class Counted:
    """A finished group on its way to the books. head: of its message. mark: what its holder has; None: not a whole."""

    head: bytes
    mark: Marked | None


def empty_group(
    admission: Admission, trajectories: int, *, resume_routing: ResumeRouting, routing: RoutingSpec | None
) -> PromptGroup:
    """A group of which nothing is recorded."""
    return PromptGroup(
        group=admission.group,
        prompt=admission.prompt,
        admitted_version=admission.admitted_version,
        admitted_update=admission.admitted_update,
        trajectories=[Trajectory(routing=routing, resume_routing=resume_routing) for _ in range(trajectories)],
    )


# ---- names


def shard_name(shard: int) -> str:
    """Folder of a holder's journal, below that of the books."""
    return f"shard-{shard:02d}"


def books_run(run: str, *, shards: int) -> str:
    """Name of the journal of a run's queue."""
    return run if shards == 1 else _short(f"{run} shards={shards}")


def shard_run(run: str, shard: int, *, shards: int) -> str:
    """Name of the journal of a holder of a run."""
    return _short(f"{run} {shard}/{shards}")


def check_journal(directory: Path, *, run: str, shards: int) -> None:
    """Refuse a directory that a queue with `shards` shards cannot go on from, by its files' headers.

    Raises:
        JournalError: as `check_owner`, and where the journal is of another number of shards.
    """
    runs = {books_run(run, shards=n): n for n in range(1, MAX_SHARDS + 1)}
    for path in sorted(directory.glob("*.journal")):
        with path.open("rb") as file:
            found = runs.get(read_run(memoryview(file.read(FILE_BYTES))) or "", shards)
        if found != shards:
            raise JournalRunError(
                f"journal {directory} is of a queue with queue.shards={found}, this run has queue.shards={shards}; "
                f"set queue.shards={found} to go on, or give output_dir a directory of its own"
            )
    check_owner(directory, run=books_run(run, shards=shards))


def _short(run: str) -> str:
    """The name, its first part as a digest where it is too long for a journal."""
    if len(run.encode()) <= MAX_RUN_BYTES:
        return run
    of, _, part = run.rpartition(" ")
    return f"{sha256(of.encode()).hexdigest()[:32]} {part}"
