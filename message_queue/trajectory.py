"""Append-only assembly of segments into a trajectory. The merge rule for routing rows lives here and nowhere else.

    observe(prompt) -> extend(segment)* -> observe(tool reply) -> extend(segment)* ... -> close(...)

Merge rule: a segment contributes rows from the first position that is not yet covered. Rows already held are never
replaced, whatever aborts, resumes, new turns or weight updates did. A gap is an error, unless the engine states that
it cannot give the rows; those are -1 and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from message_queue.tokens import ContractError, Float32Array, Int32Array, RoutingSpec, StopReason, TokenOutput

BoolArray = NDArray[np.bool_]
Int16Array = NDArray[np.int16]

NOT_ROUTED = -1  # a row the trainer routes with its live router
NOT_SAMPLED = -1  # param_version of a token that no policy sampled


@dataclass(slots=True, eq=False)
class Turn:
    """One model call plus what preceded it: the tokens it was given, then its segments in order."""

    observation: Int32Array
    segments: list[TokenOutput] = field(default_factory=list[TokenOutput])

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in this turn."""
        return sum(len(s) for s in self.segments)


class Trajectory:
    """Ordered turns of one rollout, reward and stop reason.

    Args:
        routing: what a row means; None for a model without experts or a run that does not capture routing.
    """

    def __init__(self, *, routing: RoutingSpec | None) -> None:
        self.routing = routing
        self.turns: list[Turn] = []
        self.reward: float | None = None
        self.stop_reason: StopReason | None = None
        self.info: dict[str, float] = {}
        self.num_unavailable_rows = 0
        self._length = 0
        self._rows: list[Int16Array] = []
        self._num_rows = 0

    def __len__(self) -> int:
        """T: prompt, observation and sampled tokens."""
        return self._length

    @property
    def num_rows(self) -> int:
        """Routing rows held: positions 0..num_rows-1 are covered."""
        return self._num_rows

    @property
    def closed(self) -> bool:
        return self.stop_reason is not None

    @property
    def segments(self) -> list[TokenOutput]:
        """All segments in order."""
        return [s for turn in self.turns for s in turn.segments]

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
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
        rows, unavailable = self._new_rows(segment)
        self.turns[-1].segments.append(segment)
        self._length += len(segment)
        if rows is not None:
            self._rows.append(rows)
            self._num_rows += len(rows)
            self.num_unavailable_rows += unavailable

    def close(self, *, stop_reason: StopReason, reward: float, info: dict[str, float] | None = None) -> None:
        """End the trajectory with its reward."""
        self._require_open()
        if not np.isfinite(reward):
            raise ContractError(f"reward is {reward}; rewards are finite")
        self.stop_reason, self.reward, self.info = stop_reason, float(reward), dict(info or {})

    # ---- arrays, all of length T

    def token_ids(self) -> Int32Array:
        """int32 [T]."""
        parts = [p for turn in self.turns for p in (turn.observation, *(s.token_ids for s in turn.segments))]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def loss_mask(self) -> BoolArray:
        """bool [T], True where the policy sampled the token."""
        return self.param_versions() != NOT_SAMPLED

    def behaviour_logprobs(self) -> Float32Array:
        """float32 [T], 0 where the token was not sampled."""
        out = np.zeros(self._length, np.float32)
        for start, segment in self._placed():
            out[start : start + len(segment)] = segment.logprobs
        return out

    def param_versions(self) -> Int32Array:
        """int32 [T], version of the weights that sampled each token, -1 where it was not sampled."""
        out = np.full(self._length, NOT_SAMPLED, np.int32)
        for start, segment in self._placed():
            out[start : start + len(segment)] = segment.weights.version
        return out

    def row_versions(self) -> Int32Array:
        """int32 [T], version of the weights whose forward pass gave row p; -1 where there is no row."""
        out = np.full(self._length, NOT_SAMPLED, np.int32)
        covered = 0
        for start, segment in self._placed():
            end = max(covered, start + len(segment) - 1) if self.routing is not None and len(segment) else covered
            out[covered:end] = segment.weights.version
            covered = end
        return out

    def routed_experts(self) -> Int16Array | None:
        """int16 [T, moe_layers, top_k], -1 where the trainer uses its live router (always the last row)."""
        if self.routing is None:
            return None
        out = np.full((self._length, *self.routing.row_shape), NOT_ROUTED, np.int16)
        if self._rows:
            out[: self._num_rows] = np.concatenate(self._rows)
        return out

    # ---- inside

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

    def _new_rows(self, segment: TokenOutput) -> tuple[Int16Array | None, int]:
        """Rows of `segment` for positions not yet covered, and how many of them the engine could not give."""
        given = segment.routed_experts
        if self.routing is None or (given is None and not len(segment)):
            return None, 0
        if given is None:
            raise ContractError(
                f"segment of {len(segment)} tokens from replica {segment.replica} carries no routing rows; "
                f"expected rows {self._num_rows}..{self._length + len(segment) - 2}"
            )
        given.check(self.routing)
        last_forwarded = self._length + len(segment) - 2
        if len(segment) and given.end_position != last_forwarded + 1:
            raise ContractError(
                f"segment from replica {segment.replica} has rows up to position {given.end_position - 1}; "
                f"its {len(segment)} tokens after position {self._length - 1} need rows up to {last_forwarded}"
            )
        if given.end_position > last_forwarded + 1:
            raise ContractError(
                f"segment from replica {segment.replica} has a row at position {given.end_position - 1}, "
                f"but only positions up to {last_forwarded} were forwarded"
            )
        stated = given.first_position - given.unavailable
        if stated > self._num_rows:
            raise ContractError(
                f"segment from replica {segment.replica} has rows from position {given.first_position}; "
                f"rows {self._num_rows}..{stated - 1} are missing"
            )
        absent = max(0, given.first_position - self._num_rows)
        fresh = given.experts[max(0, self._num_rows - given.first_position) :].astype(np.int16)
        filler = np.full((absent, *self.routing.row_shape), NOT_ROUTED, np.int16)
        return np.concatenate([filler, fresh]) if absent else fresh, absent


@dataclass(slots=True, kw_only=True, eq=False)
class PromptGroup:
    """The n trajectories of one prompt: what the queue holds and the trainer normalises over.

    group: id, unique in a run and never reused. prompt: index of the prompt in its source.
    admitted_version: `param_version` of the weights when the group was admitted; no token is older.
    admitted_update: optimizer updates held by those weights, the unit staleness is counted in.
    """

    group: int
    prompt: int
    admitted_version: int
    admitted_update: int
    trajectories: list[Trajectory]

    @property
    def num_segments(self) -> int:
        return sum(len(t.segments) for t in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(t.num_sampled for t in self.trajectories)

    @property
    def closed(self) -> bool:
        """Whether every trajectory has its stop reason and reward."""
        return bool(self.trajectories) and all(t.closed for t in self.trajectories)

    def tokens_per_version(self) -> dict[int, int]:
        """`param_version` -> tokens that it sampled."""
        counts: dict[int, int] = {}
        for trajectory in self.trajectories:
            for segment in trajectory.segments:
                counts[segment.weights.version] = counts.get(segment.weights.version, 0) + len(segment)
        return {version: tokens for version, tokens in counts.items() if tokens}
