"""The content of groups on its way through the queue: what is appended, what is put, and what a batch is read from.

A group whose content was appended as it grew is put as its head alone: nothing crosses a process twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import numpy as np

from message_queue.contract import QueueError
from message_queue.progress import CallBegun, RolloutRecord, Sampled, TrajectoryClosed
from message_queue.tokens import RoutingSpec, TokenOutput
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire import (
    EncodedGroup,
    decode_group,
    decode_segment,
    pack_group,
    pack_segment,
    unpack_group,
    unpack_segment,
)
from message_queue.wire.format import GROUP, unseal
from message_queue.wire.messages import group_of
from message_queue.wire.packed import Buffers, Packed, Shared, SharedMemory, share


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A group that is what was appended. head: of its message. records: in order; none where the queue has them."""

    head: bytes
    records: tuple[RolloutRecord, ...] = ()


UNKNOWN = -1  # the length of a trajectory of which somebody else appended a part
GroupMessage: TypeAlias = bytes | Packed | Shared | Recorded


# ---- the client's side


class AppendedLengths:
    """How far groups were appended from their start on; says which of them are whole."""

    def __init__(self) -> None:
        self._lengths: dict[int, dict[int, int]] = {}
        self._closed: set[tuple[int, int]] = set()

    def add(self, records: Sequence[RolloutRecord]) -> None:
        """The queue has these."""
        for record in records:
            lengths, tokens = self._lengths.setdefault(record.group, {}), _num_tokens(record)
            if tokens is None or lengths.get(record.trajectory, 0) != record.at:
                lengths[record.trajectory] = UNKNOWN
                continue
            lengths[record.trajectory] = record.at + tokens
            if isinstance(record.what, TrajectoryClosed):
                self._closed.add((record.group, record.trajectory))

    def whole(self, group: PromptGroup) -> bool:
        """Whether the queue has all of the group."""
        lengths = self._lengths.get(group.group, {})
        return all(
            lengths.get(number) == len(trajectory) and (group.group, number) in self._closed
            for number, trajectory in enumerate(group.trajectories)
        )

    def forget(self, group: int) -> None:
        """It was put, or dropped."""
        for number in self._lengths.pop(group, {}):
            self._closed.discard((group, number))


def outgoing_record(record: RolloutRecord, memory: SharedMemory) -> RolloutRecord:
    """The record as it is to travel."""
    what = record.what
    if not isinstance(what, Sampled) or not isinstance(what.segment, TokenOutput):
        return record
    return replace(record, what=Sampled(share(pack_segment(what.segment), memory)))


def outgoing_group(group: PromptGroup, memory: SharedMemory, *, appended: bool, rank_coded: bool) -> GroupMessage:
    """The group as it is to travel."""
    packed = pack_group(group, rank_coded=rank_coded)
    return Recorded(packed.head) if appended else share(packed, memory)


def references(message: GroupMessage) -> list[object]:
    """Of all that a group is read from, in order."""
    match message:
        case Shared():
            return [message.reference]
        case Recorded():
            return [segment.reference for segment in map(_segment_of, message.records) if isinstance(segment, Shared)]
        case bytes() | Packed():
            return []
        case _:
            assert_never(message)


def read_group(message: GroupMessage, shared: Iterator[Buffers], *, routing: RoutingSpec | None) -> PromptGroup:
    """The group of a message.

    Args:
        shared: what its references are of.

    Raises:
        WireError, ContractError: as `wire.decode_group`.
    """
    match message:
        case bytes():
            return decode_group(message, routing=routing)
        case Packed():
            return unpack_group(message.head, message.buffers, routing=routing)
        case Shared():
            return unpack_group(message.head, next(shared), routing=routing)
        case Recorded():
            return _replayed(message, shared, routing)
        case _:
            assert_never(message)


def _replayed(message: Recorded, shared: Iterator[Buffers], routing: RoutingSpec | None) -> PromptGroup:
    head, _ = unseal(message.head, kind=GROUP)
    trajectories = [Trajectory(routing=routing, resume_routing=t.resume_routing) for t in head.trajectories]
    for record in message.records:
        trajectory, what = trajectories[record.trajectory], record.what
        match what:
            case Sampled():
                trajectory.extend(_read_segment(what.segment, shared, routing))
            case TrajectoryClosed():
                trajectory.close(stop_reason=what.stop_reason, reward=what.reward, info=dict(what.info))
            case CallBegun():
                pass
            case _:
                trajectory.observe(what)
    return group_of(head, trajectories)


def _read_segment(
    segment: TokenOutput | Packed | Shared | bytes, shared: Iterator[Buffers], routing: RoutingSpec | None
) -> TokenOutput:
    match segment:
        case TokenOutput():
            return segment
        case Packed():
            return unpack_segment(segment.head, segment.buffers, routing=routing)
        case Shared():
            return unpack_segment(segment.head, next(shared), routing=routing)
        case bytes():
            return decode_segment(segment, routing=routing)


def _segment_of(record: RolloutRecord) -> TokenOutput | Packed | Shared | bytes | None:
    return record.what.segment if isinstance(record.what, Sampled) else None


def _num_tokens(record: RolloutRecord) -> int | None:
    """Tokens that it appends; None where that is not told without reading it."""
    match record.what:
        case Sampled():
            return len(record.what.segment) if isinstance(record.what.segment, TokenOutput) else None
        case np.ndarray():
            return len(record.what)
        case _:
            return 0


# ---- the queue's side


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """message: what a batch sends of the group. shared: what its references are of, which holds it here."""

    message: GroupMessage
    shared: tuple[Buffers, ...]


class Contents:
    """What was appended to the groups that are open. A group that is not known here is not open either.

    Holds the buffers of what is shared: they stay, whatever becomes of the process that put them there.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._appended: dict[int, list[tuple[RolloutRecord, Buffers | None]]] = {}

    def groups(self) -> list[int]:
        """Those of which something is kept, or to be kept."""
        return list(self._appended)

    def begin(self, group: int) -> None:
        """A group was admitted: what is appended to it is kept until it ends."""
        self._appended.setdefault(group, [])

    async def fetch(self, records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """The records with what is shared at hand.

        Raises:
            SharedMemoryLost: it is gone.
        """
        shared = [s for s in map(_segment_of, records) if isinstance(s, Shared)]
        buffers = iter(await self._memory.get([s.reference for s in shared]) if shared else ())
        return [
            replace(record, what=Sampled(Packed(segment.head, next(buffers))))
            if isinstance(segment, Shared)
            else record
            for record, segment in zip(records, map(_segment_of, records), strict=True)
        ]

    def keep(self, sent: Sequence[RolloutRecord], fetched: Sequence[RolloutRecord]) -> None:
        """These were recorded. sent: as they came. fetched: what `fetch` made of them."""
        for record, local in zip(sent, fetched, strict=True):
            if record.group in self._appended:
                segment = _segment_of(local)
                held = segment.buffers if record is not local and isinstance(segment, Packed) else None
                self._appended[record.group].append((record, held))

    async def group(self, message: GroupMessage) -> EncodedGroup:
        """A group that is put.

        Raises:
            WireError: the bytes are damaged. SharedMemoryLost: its arrays are gone.
            QueueError: it is to be what was appended, and that is something else.
        """
        match message:
            case bytes():
                return EncodedGroup(message, Content(message, ()))
            case Packed():
                return EncodedGroup(message.head, Content(message, ()))
            case Shared():
                return EncodedGroup(message.head, Content(message, tuple(await self._memory.get([message.reference]))))
            case Recorded():
                return self._recorded(message.head)
            case _:
                assert_never(message)

    def forget(self, group: int) -> None:
        """It ended, or is ready."""
        self._appended.pop(group, None)

    def _recorded(self, data: bytes) -> EncodedGroup:
        head, _ = unseal(data, kind=GROUP)
        group = head.ids[0]
        appended = self._appended.get(group, [])
        segments = sum(isinstance(record.what, Sampled) for record, _ in appended)
        ends = sum(isinstance(record.what, TrajectoryClosed) for record, _ in appended)
        expected = (sum(1 for _ in head.segments()), len(head.trajectories))
        if group in self._appended and (segments, ends) != expected:
            raise QueueError(
                f"group {group} was put as (segments, trajectories) {expected}; what was appended to it has "
                f"{(segments, ends)}: put it whole"
            )
        records = tuple(record for record, _ in appended)
        shared = tuple(buffers for _, buffers in appended if buffers is not None)
        return EncodedGroup(data, Content(Recorded(data, records), shared))
