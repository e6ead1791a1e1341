"""Heads: groups without content, for the queue and the driver. Token ids, logprobs and rows stay with their producer.

If version 3 sampled 4 of the 12 tokens of a trajectory and version 4 then 2, its spans are ((3, 4), (4, 2)).
Heads are journaled and travel as msgpack (msgspec); their size depends on the number of trajectories, not of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

import msgspec

from message_queue.tokens import StopReason
from message_queue.trajectory import POLICY, Admission, PromptGroup, SequencePart, Trajectory, Turn

Span = tuple[int, int]  # (param_version, tokens that it sampled)


class SequenceHead(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of `Trajectory.sequences` without its content."""

    length: int
    """Tokens t, prompt and tool replies included."""
    spans: tuple[Span, ...]
    """Tokens in the loss by the version that sampled them, by position; neighbours differ in version."""
    agent: str = POLICY
    """Agent whose calls sampled them."""
    ends: tuple[int, ...] = ()
    """Position after the last token of each span; empty if they are not known."""


class TrajectoryHead(msgspec.Struct, frozen=True, kw_only=True):
    """A finished trajectory without its content."""

    length: int
    """Prompt, tool replies and sampled tokens of all paths, each shared token once; T of a trajectory without forks.

    The rows of the trajectory cover at most `length - 1` positions.
    """
    sequences: tuple[SequenceHead, ...]
    """One sequence for each path, or several with `resume_routing=split`."""
    num_segments: int
    """Uninterrupted decodes."""
    num_aborts: int
    """Decodes that an abort or new weights cut, inside a segment or between two."""
    row_bytes: int
    """Bytes of routing rows that engines returned."""
    missing_rows: int
    """Forwarded positions without a row."""
    reward: float
    """Reward of the whole trajectory."""
    rewards: dict[str, float] | None = None
    """Agent -> its reward, for the agents that are trained; None trains all sequences with `reward`."""
    stop_reason: StopReason
    """Stop reason of its last segment; ERROR for a rollout that failed."""
    info: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Numbers that the agent loop or the task noted."""

    @property
    def failed(self) -> bool:
        """Whether the rollout failed: its tokens take no gradient."""
        return self.stop_reason is StopReason.ERROR

    @property
    def trained(self) -> dict[str, list[int]]:
        """Agent that is trained -> numbers of its sequences; empty if the rollout failed."""
        found: dict[str, list[int]] = {}
        for number, sequence in enumerate(() if self.failed else self.sequences):
            if self.rewards is None or sequence.agent in self.rewards:
                found.setdefault(sequence.agent, []).append(number)
        return found

    def reward_of(self, agent: str) -> float:
        """Reward of an agent that is trained."""
        return self.reward if self.rewards is None else self.rewards[agent]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Sampled tokens by version, by position; neighbours differ in version."""
        return merged_spans(span for sequence in self.sequences for span in sequence.spans)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(tokens for sequence in self.sequences for _, tokens in sequence.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead(Admission):
    """A finished group without its content. The queue orders heads, and the driver plans with them."""

    trajectories: tuple[TrajectoryHead, ...]
    """Trajectories of the prompt, failed ones included."""
    prefixes: tuple[tuple[int, int], ...] = ()
    """For each trained sequence, in order: the longest prefix of tokens and rows that an earlier one has too, as
    (number of that sequence, tokens), (-1, 0) if there is none; empty if the content was not compared."""

    @property
    def num_segments(self) -> int:
        """Uninterrupted decodes of all trajectories."""
        return sum(t.num_segments for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, those of failed rollouts included."""
        return sum(t.num_sampled for t in self.trajectories)

    @property
    def trained(self) -> list[tuple[int, int]]:
        """(trajectory, sequence) of each trained sequence."""
        return [
            (number, at)
            for number, trajectory in enumerate(self.trajectories)
            for of_agent in trajectory.trained.values()
            for at in of_agent
        ]

    def tokens_per_version(self) -> dict[int, int]:
        """`param_version` -> tokens that it sampled (> 0), of rollouts that did not fail and trained agents."""
        counts: Counter[int] = Counter()
        for trajectory in self.trajectories:
            for number in chain.from_iterable(trajectory.trained.values()):
                for version, tokens in trajectory.sequences[number].spans:
                    counts[version] += tokens
        return +counts

    def rewards_by_agent(self) -> dict[str, list[float]]:
        """Trained agent -> its rewards, one for each trajectory with this agent, in order.

        The advantage of an agent is relative to these. A planner made calls in all of three trajectories, a critic in
        two: {"planner": [1.0, 0.0, 1.0], "critic": [0.2, 0.5]}.
        """
        found: dict[str, list[float]] = {}
        for trajectory in self.trajectories:
            for agent in trajectory.trained:
                found.setdefault(agent, []).append(trajectory.reward_of(agent))
        return found


def head_of(group: PromptGroup) -> GroupHead:
    """The head of a finished group.

    Raises:
        ValueError: a trajectory is not closed.
    """
    return GroupHead(
        group=group.group,
        prompt=group.prompt,
        admitted_version=group.admitted_version,
        admitted_update=group.admitted_update,
        trajectories=tuple(_trajectory_head(group.group, number, t) for number, t in enumerate(group.trajectories)),
    )


def merged_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans (3, 4), (3, 1), (4, 2) are (3, 5), (4, 2)."""
    merged: list[Span] = []
    for version, tokens in spans:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + tokens)
        else:
            merged.append((version, tokens))
    return tuple(merged)


def _trajectory_head(group: int, number: int, trajectory: Trajectory) -> TrajectoryHead:
    if trajectory.reward is None or trajectory.stop_reason is None:
        raise ValueError(f"trajectory {number} of group {group} has no reward and stop reason; close it first")
    segments, paths = trajectory.segments, trajectory.paths
    return TrajectoryHead(
        length=sum(len(path) - path.shared_tokens for path in paths),
        sequences=tuple(map(_sequence_head, trajectory.sequence_parts())),
        num_segments=len(segments),
        num_aborts=sum(_num_aborts(turn) for path in paths for turn in path.turns[path.shared_turns :]),
        row_bytes=sum(s.routed_experts.experts.nbytes for s in segments if s.routed_experts is not None),
        missing_rows=sum(path.num_missing_rows for path in paths),
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        stop_reason=trajectory.stop_reason,
        info=trajectory.info,
    )


def _sequence_head(part: SequencePart) -> SequenceHead:
    spans = merged_spans((segment.weights.version, len(segment)) for _, segment in part.segments)
    runs = groupby(part.segments, key=lambda placed: placed[1].weights.version)
    ends = tuple(max(at + len(segment) for at, segment in run) for _, run in runs)
    return SequenceHead(part.length, spans, part.path.agent, ends)


def _num_aborts(turn: Turn) -> int:
    """Segments that an abort ended, and requests that were aborted before their first token.

    The latter left no segment, but the next segment has other weights.
    """
    ended = sum(segment.stop_reason is StopReason.ABORT for segment in turn.segments)
    between = sum(
        before.stop_reason is not StopReason.ABORT and before.weights.version != after.weights.version
        for before, after in pairwise(turn.segments)
    )
    return ended + between
