"""Append-only assembly of segments into a trajectory. This module alone holds the merge rule for routing rows.

    observe(prompt) -> extend(segment)* -> observe(tool reply) -> extend(segment)* ... -> close(...)

Merge rule: a segment contributes rows from the first position that is not yet covered. Existing rows are never
replaced, also not after aborts, resumes, new turns or weight updates. A gap is an error, unless the engine states that
it cannot give the rows; those are -1 and counted.

That is `append`. Rows of a segment for positions already covered are, by `resume_routing`:

    append   left out
    force    left out; the engine is given the existing rows, and forwards those positions over them
    replace  taken from the segment's first row on, in place of the existing rows (the way of other systems)
    split    left out if equal; if they differ, the segment starts a training sequence of its own, over its own rows

A segment without tokens brings no rows in `replace` and `split`: nothing was sampled over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from message_queue.routing_rows import TrajectoryRows
from message_queue.tokens import (
    ContractError,
    Int32Array,
    RoutedExperts,
    RoutingSpec,
    StopReason,
    TokenOutput,
)
from message_queue.training_sequence import TrainingSequence, training_sequence

ResumeRouting = Literal["append", "force", "replace", "split"]


@dataclass(slots=True, eq=False)
class Turn:
    """One model call plus the tokens that it was given."""

    observation: Int32Array
    """int32 [n], tokens that no policy sampled, such as a prompt or a tool reply."""
    segments: list[TokenOutput] = field(default_factory=list[TokenOutput])
    """Segments of the call, in order."""

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in this turn."""
        return sum(len(s) for s in self.segments)


class SequenceBranch(NamedTuple):
    """Rows over which segments were decoded: the start of a training sequence."""

    first_segment: int
    """Number of the first segment in the trajectory."""
    rows: TrajectoryRows | None
    """None without routing."""


class Trajectory:
    """Ordered turns of one rollout, reward and stop reason.

    Args:
        routing: meaning of a row; None for a model without experts or a run that does not capture routing.
        resume_routing: treatment of rows for positions that are covered already.

    Raises:
        ContractError: no such resume_routing.
    """

    def __init__(self, *, routing: RoutingSpec | None, resume_routing: ResumeRouting = "append") -> None:
        if resume_routing not in get_args(ResumeRouting):
            raise ContractError(
                f"Trajectory.resume_routing is {resume_routing!r}; choose one of {', '.join(get_args(ResumeRouting))}"
            )
        self.routing = routing
        self.resume_routing: ResumeRouting = resume_routing
        self.turns: list[Turn] = []
        self.reward: float | None = None
        self.stop_reason: StopReason | None = None
        self.info: dict[str, float] = {}
        self.unsure_call: str | None = None  # started before a restart; it may have happened or not
        self._length = self._num_segments = 0
        self._branches = [SequenceBranch(0, None if routing is None else TrajectoryRows(routing))]

    def __len__(self) -> int:
        """T: prompt, observation and sampled tokens."""
        return self._length

    @property
    def num_rows(self) -> int:
        """Positions 0..num_rows-1 are covered."""
        return 0 if self._rows is None else len(self._rows)

    @property
    def num_unavailable_rows(self) -> int:
        """Rows among those held that no engine could give."""
        return 0 if self._rows is None else self._rows.num_unavailable

    @property
    def closed(self) -> bool:
        return self.stop_reason is not None

    @property
    def segments(self) -> list[TokenOutput]:
        """All segments in order."""
        return [s for turn in self.turns for s in turn.segments]

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    def observe(self, token_ids: Int32Array) -> None:
        """Append tokens that no policy sampled (prompt, tool reply) and open a turn.

        Raises:
            ContractError: closed trajectory, wrong dtype, or no tokens for the first turn.
        """
        self._require_open()
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise ContractError(f"observation is {token_ids.dtype}{list(token_ids.shape)}; need int32[n]")
        if not self.turns and not len(token_ids):
            raise ContractError("the prompt is empty; a trajectory starts with at least one token")
        self.turns.append(Turn(observation=token_ids))
        self._length += len(token_ids)

    def extend(self, segment: TokenOutput) -> None:
        """Append a segment that was decoded right after the tokens held so far, and merge its rows.

        Raises:
            ContractError: no turn is open, rows are missing, overlap the future, or leave a gap. Nothing is changed.
        """
        self._require_open()
        if not self.turns:
            raise ContractError("a segment came before the prompt; call observe first")
        rows = self._checked_rows(segment)
        if rows is not None and self._rows is not None:
            existing = self._rows_before(rows, self._rows)
            existing.add(rows, version=segment.weights.version)
        self.turns[-1].segments.append(segment)
        self._length += len(segment)
        self._num_segments += 1

    def check(self, segment: TokenOutput) -> None:
        """Refuse a segment that `extend` would refuse; nothing is changed.

        Raises:
            ContractError: as of `extend`.
        """
        self._require_open()
        self._checked_rows(segment)

    async def start_call(self, call: str) -> None:
        """Announce an outside call that must happen once; the recorder of the trajectory notes it."""

    def close(self, *, stop_reason: StopReason, reward: float, info: dict[str, float] | None = None) -> None:
        """End the trajectory with its reward."""
        self._require_open()
        if not np.isfinite(reward):
            raise ContractError(f"reward is {reward}; rewards are finite")
        numbers = {key: float(value) for key, value in (info or {}).items()}
        self.stop_reason, self.reward, self.info = stop_reason, float(reward), numbers

    # ---- contents

    def token_ids(self) -> Int32Array:
        """int32 [T]."""
        parts = [p for turn in self.turns for p in (turn.observation, *(s.token_ids for s in turn.segments))]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def leading_rows(self) -> RoutedExperts | None:
        """Rows from position 0 to the first that is -1, as forced rows for an engine; None without any."""
        return None if self._rows is None else self._rows.leading()

    def sequences(self) -> list[TrainingSequence]:
        """Inputs of the trainer's forward: one sequence, or several with `split`.

        Every sampled token is in the loss of exactly one.
        """
        token_ids = self.token_ids()
        return [
            training_sequence(segments, token_ids=token_ids[:length], rows=rows)
            for length, segments, rows in self.sequence_parts()
        ]

    def sequence_parts(self) -> Iterator[tuple[int, list[tuple[int, TokenOutput]], TrajectoryRows | None]]:
        """(tokens, placed segments with tokens, rows) of each of `sequences`."""
        placed = self._placed()
        ends = [*(branch.first_segment for branch in self._branches[1:]), len(placed)]
        for branch, end in zip(self._branches, ends, strict=True):
            own = [(at, segment) for at, segment in placed[branch.first_segment : end] if len(segment)]
            length = len(self) if branch is self._branches[-1] else own[-1][0] + len(own[-1][1])
            yield length, own, branch.rows

    # ---- inside

    @property
    def _rows(self) -> TrajectoryRows | None:
        """Rows of the training sequence that is still growing; None without routing."""
        return self._branches[-1].rows

    def _require_open(self) -> None:
        if self.closed:
            raise ContractError(f"the trajectory is closed ({self.stop_reason}); nothing can be appended")

    def _placed(self) -> list[tuple[int, TokenOutput]]:
        """(absolute position of its first token, segment) in order."""
        placed: list[tuple[int, TokenOutput]] = []
        at = 0
        for turn in self.turns:
            at += len(turn.observation)
            for segment in turn.segments:
                placed.append((at, segment))
                at += len(segment)
        return placed

    def _rows_before(self, rows: RoutedExperts, existing: TrajectoryRows) -> TrajectoryRows:
        """The held rows that stay; the merge adds the part of `rows` after them."""
        match self.resume_routing:
            case "append" | "force":
                return existing
            case "replace":
                kept = existing.first(rows.first_position)
                self._branches[-1] = self._branches[-1]._replace(rows=kept)
                return kept
            case "split":
                if not existing.differ(rows):
                    return existing
                kept = existing.first(rows.first_position - rows.unavailable)
                self._branches.append(SequenceBranch(self._num_segments, kept))
                return kept

    def _checked_rows(self, segment: TokenOutput) -> RoutedExperts | None:
        """Rows of `segment` for the merge; None without any."""
        given = segment.routed_experts
        if self.routing is None:
            if given is not None:
                raise ContractError(
                    f"segment from replica {segment.replica} has routed_experts with {len(given.experts)} rows, "
                    "but the trajectory captures no routing; give it the model's RoutingSpec"
                )
            return None
        if given is None:
            if not len(segment):
                return None
            raise ContractError(
                f"segment of {len(segment)} tokens from replica {segment.replica} carries no routing rows; "
                f"expected rows {self.num_rows}..{self._length + len(segment) - 2}"
            )
        given.check(self.routing)
        self._check_extent(segment, given)
        return given if len(segment) or self.resume_routing in ("append", "force") else None

    def _check_extent(self, segment: TokenOutput, given: RoutedExperts) -> None:
        """Refuse rows that start late, or that do not end with the last token that was forwarded."""
        end, last_forwarded = given.end_position, self._length + len(segment) - 2
        if len(segment) and end != last_forwarded + 1:
            raise ContractError(
                f"segment from replica {segment.replica} has rows up to position {end - 1}; "
                f"its {len(segment)} tokens after position {self._length - 1} need rows up to {last_forwarded}"
            )
        if end > last_forwarded + 1:
            raise ContractError(
                f"segment from replica {segment.replica} has a row at position {end - 1}, "
                f"but only positions up to {last_forwarded} were forwarded"
            )
        stated = given.first_position - given.unavailable
        if stated > self.num_rows:
            raise ContractError(
                f"segment from replica {segment.replica} has rows from position {given.first_position}; "
                f"rows {self.num_rows}..{stated - 1} are missing"
            )


@dataclass(slots=True, kw_only=True, eq=False)
class PromptGroup:
    """The n trajectories of one prompt: the unit of the queue and of the trainer's normalisation."""

    group: int
    """Id, unique in a run and never reused."""
    prompt: int
    """Index of the prompt in its source."""
    admitted_version: int
    """`param_version` of the weights when the group was admitted; no token is older."""
    admitted_update: int
    """Optimizer updates held by those weights, the unit of staleness."""
    trajectories: list[Trajectory]
    """The n trajectories."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(t.num_sampled for t in self.trajectories)

    @property
    def closed(self) -> bool:
        """Whether every trajectory has its stop reason and reward."""
        return bool(self.trajectories) and all(t.closed for t in self.trajectories)
