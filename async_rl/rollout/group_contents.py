"""Content of the groups in flight: on disk while rollouts append, in memory from a group's end to its training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_rl.rollout.content.reader import ContentPlace, read_groups
from message_queue.recovery import Restored
from message_queue.training_sequence import Content, GroupContent, content_of
from message_queue.trajectory import Admission, PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """Content of the groups that a restart continues."""

    groups: Mapping[int, PromptGroup] = field(default_factory=dict[int, PromptGroup])
    """By id; a group without a record has empty trajectories."""
    incomplete: frozenset[int] = frozenset()
    """Groups that were ready but lack a part of their content."""
    notes: tuple[str, ...] = ()
    """Descriptions of damage, for the user."""


async def read_content(place: ContentPlace, restored: Restored) -> StoredContent:
    """Read the groups in flight.

    Raises:
        JournalError: a file belongs to another run, has another format, or cannot be opened.
    """
    found = await read_stored(place, (*restored.open, *restored.ready))

    def is_complete(group: int) -> bool:
        content = found.groups.get(group)
        # A trajectory that replaced a failed one may be lost as a whole; those before it are closed.
        return content is not None and content.closed and len(content.trajectories) == restored.trajectories[group]

    return replace(found, incomplete=frozenset(a.group for a in restored.ready if not is_complete(a.group)))


async def read_stored(place: ContentPlace, admissions: Iterable[Admission]) -> StoredContent:
    """Stored content of groups; `incomplete` stays empty.

    Raises:
        JournalError: see `read_content`.
    """
    wanted = {admission.group: admission for admission in admissions}
    if not wanted or not place.directory.is_dir():
        return StoredContent()
    groups, notes = await asyncio.to_thread(read_groups, place, wanted)
    return StoredContent(groups=groups, notes=tuple(notes))


class GroupContents:
    """The driver's content of groups, from rollout to training.

    Args:
        unfinished: groups whose rollouts continue, by id.
        forget: removes the stored content of groups.
    """

    def __init__(
        self,
        *,
        unfinished: Mapping[int, PromptGroup] | None = None,
        forget: Callable[[Collection[int]], Awaitable[None]] | None = None,
    ) -> None:
        self.unfinished = dict(unfinished or {})
        self._forget = forget
        self._finished: dict[int, Content] = {}
        self._trained: dict[int, int] = {}  # group -> train step

    @classmethod
    def of_restart(
        cls, restored: Restored, stored: StoredContent, *, forget: Callable[[Collection[int]], Awaitable[None]]
    ) -> GroupContents:
        """Contents of a run that continues from `stored`."""
        groups = stored.groups
        contents = cls(unfinished={a.group: groups[a.group] for a in restored.open if a.group in groups}, forget=forget)
        for admission in restored.ready:
            contents.add(admission.group, content_of(groups[admission.group]))
        return contents

    def add(self, group: int, content: Content) -> None:
        """Keep the content of a finished group until it is trained."""
        self.unfinished.pop(group, None)
        self._finished[group] = content

    def of(self, groups: Iterable[int]) -> list[Content]:
        """Content of finished groups."""
        return [self._finished[group] for group in groups]

    async def drop(self, groups: Collection[int]) -> None:
        """Remove groups that were given up."""
        for group in groups:
            self.unfinished.pop(group, None)
            self._finished.pop(group, None)
        if self._forget is not None and groups:
            await self._forget(groups)

    def trained(self, groups: Iterable[int], *, train_step: int) -> None:
        """Note that groups were trained; they are kept in case a restart repeats their step."""
        for group in groups:
            del self._finished[group]
            self._trained[group] = train_step

    async def checkpointed(self, train_step: int) -> None:
        """Remove groups trained up to `train_step`: no restart repeats their steps."""
        settled = [group for group, step in self._trained.items() if step <= train_step]
        for group in settled:
            del self._trained[group]
        await self.drop(settled)


async def fetched(contents: Iterable[Content]) -> list[GroupContent]:
    """The contents themselves."""
    return [await content if isinstance(content, Awaitable) else content for content in contents]


def next_writer(directory: Path) -> int:
    """Lowest number above those of all writers in the directory; `writer_name` makes the name."""
    numbers = [int(path.stem.removeprefix("rollout-").partition("-")[0]) for path in directory.glob("rollout-*.sqlite")]
    return max(numbers, default=-1) + 1


def writer_name(number: int) -> str:
    """Name of a writer; its files start with it."""
    return f"rollout-{number:04d}"
