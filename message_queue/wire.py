"""Groups, trajectories and segments as bytes, for crossing a process: compact, checked, copied once.

Rows are those that the merge rule takes, sent once, by the segment that owns them: with `append` and `force` T-1 rows
for a trajectory of T tokens, whatever happened to it. `replace` sends the rows that are left in the end, `split` those
of every training sequence. They are never widened, and the RoutingSpec is not sent: the receiver has it.
`wire_format.py` has the layout.

Rank-coded rows (`rank_code.py`) take about the fewest bytes there are and lose the order within the top-k, which
training does not need.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from message_queue.rank_code import RankCode
from message_queue.tokens import RoutingSpec, StopReason, TokenOutput
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire_arrays import MessageReader, MessageWriter
from message_queue.wire_format import (
    GROUP,
    SEGMENT,
    TRAJECTORY,
    MessageHead,
    TrajectoryHead,
    TurnHead,
    WireError,
    unseal,
)
from message_queue.wire_size import EncodedSize, encoded_size

__all__ = [
    "EncodedGroup",
    "EncodedSize",
    "WireError",
    "check_rank_code",
    "decode_group",
    "decode_segment",
    "decode_trajectory",
    "encode_group",
    "encode_segment",
    "encode_trajectory",
    "encoded_size",
]


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
    ids = (group.group, group.prompt, group.admitted_version, group.admitted_update)
    return writer.message(GROUP, trajectories, ids=ids)


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
    turn = TurnHead(observation=0, segments=[writer.segment(segment, rows=segment.routed_experts, routing=routing)])
    head = TrajectoryHead(resume_routing="append", turns=[turn], stop_reason=None, reward=None, info={})
    return writer.message(SEGMENT, [head])


def decode_group(data: bytes, *, routing: RoutingSpec | None) -> PromptGroup:
    """The group that `encode_group` was given. Its arrays are read-only views of `data`.

    Raises:
        WireError: the bytes are damaged, no group, or have rows that do not fit `routing`.
        ContractError: the content breaks the contract of tokens and trajectories.
    """
    head, payload = unseal(data, kind=GROUP)
    group, prompt, admitted_version, admitted_update = head.ids
    return PromptGroup(
        group=group,
        prompt=prompt,
        admitted_version=admitted_version,
        admitted_update=admitted_update,
        trajectories=MessageReader(head, payload, routing).trajectories(),
    )


def decode_trajectory(data: bytes, *, routing: RoutingSpec | None) -> Trajectory:
    """The trajectory that `encode_trajectory` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=TRAJECTORY)
    return MessageReader(head, payload, routing).trajectories()[0]


def decode_segment(data: bytes, *, routing: RoutingSpec | None) -> TokenOutput:
    """The segment that `encode_segment` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=SEGMENT)
    segment = MessageReader(head, payload, routing).segment(next(head.segments()))
    if routing is not None and segment.routed_experts is not None:
        segment.routed_experts.check(routing)
    return segment


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A prompt group that stays bytes: the queue reads its head, nobody touches its arrays.

    Raises:
        WireError: the bytes are damaged, or no group.
    """

    data: bytes
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
