"""Groups, trajectories and segments as bytes, for crossing a process: compact, checked, copied once at most.

Rows are those that the merge rule takes, sent once, by the segment that owns them: with `append` and `force` T-1 rows
for a trajectory of T tokens, whatever happened to it. `replace` sends the rows that are left in the end, `split` those
of every training sequence. They are never widened, and the RoutingSpec is not sent: the receiver has it.
`format.py` has the layout.

Rank-coded rows (`rank_code.py`) take about the fewest bytes there are and lose the order within the top-k, which
training does not need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from message_queue.tokens import RoutingSpec, StopReason, TokenOutput
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire.arrays import MessageReader, MessageWriter
from message_queue.wire.format import (
    GROUP,
    SEGMENT,
    TRAJECTORY,
    MessageHead,
    TrajectoryHead,
    TurnHead,
    seal,
    unseal,
)
from message_queue.wire.packed import Buffers, Packed
from message_queue.wire.rank_code import RankCode


def check_rank_code(routing: RoutingSpec) -> None:
    """Refuse a model whose rows cannot be rank-coded.

    Raises:
        ContractError: its expert sets take more than 128 bits.
    """
    RankCode(num_experts=routing.num_experts, top_k=routing.top_k)


def encode_group(group: PromptGroup, *, rank_coded: bool = False) -> bytes:
    """A prompt group, its trajectories closed or not.

    Raises:
        WireError: its rows are not of one model.
        ContractError: rank_coded, and an expert set takes more than 128 bits.
    """
    writer = MessageWriter(rank_coded=rank_coded)
    trajectories = [writer.trajectory(t) for t in group.trajectories]
    return writer.message(GROUP, trajectories, ids=_ids(group))


def pack_group(group: PromptGroup, *, rank_coded: bool = False) -> Packed:
    """The same with its arrays apart; rows are not copied. Raises as `encode_group` does."""
    writer = MessageWriter(rank_coded=rank_coded)
    trajectories = [writer.trajectory(t) for t in group.trajectories]
    return writer.packed(GROUP, trajectories, ids=_ids(group))


def with_ids(head: bytes, ids: tuple[int, int, int, int]) -> bytes:
    """The head of a group's message with other ids: group, prompt, admitted version, admitted update."""
    message, _ = unseal(head, kind=GROUP)
    return seal(GROUP, msgspec.structs.replace(message, ids=ids), [])


def encode_trajectory(trajectory: Trajectory, *, rank_coded: bool = False) -> bytes:
    """One trajectory, closed or not; raises as `encode_group` does."""
    writer = MessageWriter(rank_coded=rank_coded)
    return writer.message(TRAJECTORY, [writer.trajectory(trajectory)])


def encode_segment(segment: TokenOutput, *, routing: RoutingSpec | None = None, rank_coded: bool = False) -> bytes:
    """One segment with the rows it has; rank coding needs `routing`.

    Raises:
        WireError: rank_coded without routing.
    """
    writer = MessageWriter(rank_coded=rank_coded)
    return writer.message(SEGMENT, [_segment_head(writer, segment, routing)])


def pack_segment(segment: TokenOutput) -> Packed:
    """The same with its arrays apart, its rows as they are and not copied."""
    writer = MessageWriter(rank_coded=False)
    return writer.packed(SEGMENT, [_segment_head(writer, segment, None)])


def decode_group(data: bytes, *, routing: RoutingSpec | None) -> PromptGroup:
    """The group that `encode_group` was given. Its arrays are read-only views of `data`.

    Raises:
        WireError: the bytes are damaged, no group, or have rows that do not fit `routing`.
        ContractError: the content breaks the contract of tokens and trajectories.
    """
    head, payload = unseal(data, kind=GROUP)
    return group_of(head, MessageReader(head, payload, routing).trajectories())


def unpack_group(data: bytes, buffers: Buffers, *, routing: RoutingSpec | None) -> PromptGroup:
    """The group that `pack_group` was given, as views of the buffers; `data` is the head. Raises as `decode_group`."""
    head, _ = unseal(data, kind=GROUP)
    return group_of(head, MessageReader(head, buffers, routing).trajectories())


def decode_trajectory(data: bytes, *, routing: RoutingSpec | None) -> Trajectory:
    """The trajectory that `encode_trajectory` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=TRAJECTORY)
    return MessageReader(head, payload, routing).trajectories()[0]


def decode_segment(data: bytes, *, routing: RoutingSpec | None) -> TokenOutput:
    """The segment that `encode_segment` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=SEGMENT)
    return _segment(head, payload, routing)


def unpack_segment(data: bytes, buffers: Buffers, *, routing: RoutingSpec | None) -> TokenOutput:
    """The segment that `pack_segment` was given, as views of the buffers; `data` is the head. Raises as above."""
    head, _ = unseal(data, kind=SEGMENT)
    return _segment(head, buffers, routing)


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A prompt group that stays bytes: the queue reads its head, nobody touches its arrays.

    data: its message, or the head of one. content: whatever the holder keeps with it.

    Raises:
        WireError: the bytes are damaged, or no group.
    """

    data: bytes
    content: Any = field(default=None, repr=False, compare=False)
    _head: MessageHead = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_head", unseal(self.data, kind=GROUP)[0])

    @property
    def group(self) -> int:
        return self._head.ids[0]

    @property
    def prompt(self) -> int:
        return self._head.ids[1]

    @property
    def admitted_version(self) -> int:
        return self._head.ids[2]

    @property
    def admitted_update(self) -> int:
        return self._head.ids[3]

    @property
    def closed(self) -> bool:
        """Whether every trajectory has its stop reason and reward."""
        trajectories = self._head.trajectories
        return bool(trajectories) and all(t.stop_reason is not None for t in trajectories)

    @property
    def num_segments(self) -> int:
        return sum(1 for _ in self._head.segments())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return self._head.num_sampled()

    def tokens_per_version(self) -> dict[int, int]:
        """`param_version` -> tokens that it sampled, of rollouts that did not fail."""
        counts: dict[int, int] = {}
        sound = (t for t in self._head.trajectories if t.stop_reason is not StopReason.ERROR)
        for segment in (segment for t in sound for turn in t.turns for segment in turn.segments):
            if segment.tokens:
                version = self._head.weights[segment.weights][0]
                counts[version] = counts.get(version, 0) + segment.tokens
        return counts


def _ids(group: PromptGroup) -> tuple[int, int, int, int]:
    return group.group, group.prompt, group.admitted_version, group.admitted_update


def group_of(head: MessageHead, trajectories: list[Trajectory]) -> PromptGroup:
    """The group that a head is of."""
    group, prompt, admitted_version, admitted_update = head.ids
    return PromptGroup(
        group=group,
        prompt=prompt,
        admitted_version=admitted_version,
        admitted_update=admitted_update,
        trajectories=trajectories,
    )


def _segment_head(writer: MessageWriter, segment: TokenOutput, routing: RoutingSpec | None) -> TrajectoryHead:
    turn = TurnHead(observation=0, segments=[writer.segment(segment, rows=segment.routed_experts, routing=routing)])
    return TrajectoryHead(resume_routing="append", turns=[turn], stop_reason=None, reward=None, info={})


def _segment(head: MessageHead, payload: memoryview | Buffers, routing: RoutingSpec | None) -> TokenOutput:
    segment = MessageReader(head, payload, routing).segment(next(head.segments()))
    if routing is not None and segment.routed_experts is not None:
        segment.routed_experts.check(routing)
    return segment
