"""Content of the groups in flight: on disk as rollouts append it, in memory from the end of a group to its training."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from message_queue.content import ContentWriter
from message_queue.content_reader import read_groups, remove_settled
from message_queue.heads import GroupHead, head_of
from message_queue.progress import RolloutRecord
from message_queue.recovery import Restored
from message_queue.sequence import GroupContent, content_of
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup, ResumeRouting


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPlace:
    """Where rollouts of a run store their content, and how it is read."""

    directory: Path
    """Folder of the files of all writers."""
    run: str
    """Name that is the same at every restart, and no other run's."""
    fsync: bool
    """Whether a loss of power costs nothing that was written."""
    trajectories: int
    """Rollouts of each group."""
    routing: RoutingSpec | None
    """Of the routing rows; None if the run captures none."""
    resume_routing: ResumeRouting
    """How rows of resumed requests are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """Content of the groups that a restart continues."""

    groups: Mapping[int, PromptGroup] = field(default_factory=dict[int, PromptGroup])
    """By id; a group without a record has empty trajectories."""
    incomplete: frozenset[int] = frozenset()
    """Groups that were ready, and that miss a part of their content."""
    notes: tuple[str, ...] = ()
    """Damage that was found, for the user."""


async def read_content(place: ContentPlace, restored: Restored) -> StoredContent:
    """Read the groups in flight.

    Raises:
        JournalError: a file is of another run or format, or cannot be opened.
    """
    admissions = {admission.group: admission for admission in (*restored.open, *restored.ready)}
    if not admissions or not place.directory.is_dir():
        missing = frozenset(admission.group for admission in restored.ready)
        return StoredContent(incomplete=missing)
    found = await asyncio.to_thread(
        read_groups,
        place.directory,
        admissions,
        run=place.run,
        trajectories=place.trajectories,
        routing=place.routing,
        resume_routing=place.resume_routing,
    )
    ready = (found.groups[admission.group] for admission in restored.ready)
    return StoredContent(
        groups=found.groups,
        incomplete=frozenset(group.group for group in ready if not group.closed),
        notes=tuple(found.notes),
    )


class GroupContents:
    """Stores content and hands it to the trainer.

    Args:
        writer: stores the records of rollouts; None stores nothing.
        unfinished: groups whose rollouts continue, by id.
    """

    def __init__(
        self, writer: ContentWriter | None = None, *, unfinished: Mapping[int, PromptGroup] | None = None
    ) -> None:
        self.unfinished = dict(unfinished or {})
        self._writer = writer
        self._finished: dict[int, GroupContent] = {}
        self._trained: dict[int, int] = {}  # group -> train step

    @classmethod
    async def open(cls, place: ContentPlace, restored: Restored, stored: StoredContent) -> GroupContents:
        """Contents of a run that continues from `stored`, with a writer of their own."""
        name = await asyncio.to_thread(_new_name, place.directory)
        writer = await ContentWriter.open(place.directory, name=name, run=place.run, fsync=place.fsync)
        await asyncio.to_thread(partial(remove_settled, place.directory, restored.live, keep={name}))
        contents = cls(
            writer, unfinished={a.group: stored.groups[a.group] for a in restored.open if a.group in stored.groups}
        )
        for admission in restored.ready:
            contents.add(stored.groups[admission.group])
        return contents

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        """Store records; they survive a kill of this process when this returns."""
        if self._writer is not None:
            await self._writer.append(records)

    def add(self, group: PromptGroup) -> GroupHead:
        """Keep the content of a finished group until it is trained; returns its head."""
        self.unfinished.pop(group.group, None)
        self._finished[group.group] = content_of(group)
        return head_of(group)

    def of(self, groups: Iterable[int]) -> list[GroupContent]:
        """Content of finished groups."""
        return [self._finished[group] for group in groups]

    async def drop(self, groups: Collection[int]) -> None:
        """Forget groups that were given up."""
        for group in groups:
            self.unfinished.pop(group, None)
            self._finished.pop(group, None)
        if self._writer is not None and groups:
            await self._writer.forget(groups)

    def trained(self, groups: Iterable[int], *, train_step: int) -> None:
        """The trainer does not need these any more, unless a restart trains them again."""
        for group in groups:
            del self._finished[group]
            self._trained[group] = train_step

    async def checkpointed(self, train_step: int) -> None:
        """No restart trains again what was trained up to `train_step`."""
        settled = [group for group, step in self._trained.items() if step <= train_step]
        for group in settled:
            del self._trained[group]
        await self.drop(settled)

    async def close(self) -> None:
        """Store what waits. Idempotent."""
        if self._writer is not None:
            await self._writer.close()


def _new_name(directory: Path) -> str:
    """A name that no writer of the directory has had."""
    numbers = [int(path.stem.removeprefix("rollout-").partition("-")[0]) for path in directory.glob("rollout-*.sqlite")]
    return f"rollout-{max(numbers, default=-1) + 1:04d}"
