"""Append-only assembly of segments into a trajectory. This module alone holds the merge rule for routing rows.

    observe(prompt) -> extend(segment)* -> observe(tool reply) -> extend(segment)* ... -> close(...)

Merge rule: a segment contributes rows from the first position that is not yet covered. Existing rows are never
replaced, also not after aborts, resumes, new turns or weight updates. A gap is an error, unless the engine states that
it cannot give the rows; those are -1 and counted.

That is `append`. Rows of a segment for positions already covered are, by `resume_routing`:

    append   left out
    force    left out; the engine is given the existing rows, and forwards those positions over them
    replace  taken from the segment's first row on, in place of the existing rows (the way of other systems)
    split    left out if equal; if they differ, the segment starts a separate training sequence, over its own rows

A segment without tokens brings no rows in `replace` and `split`: nothing was sampled over them.

Paths: `fork` starts another path that shares the first turns, for an agent program that rewrites its history. The
trajectory that the agent loop was given is the root, path 0, and owns all paths. Version 4 samples two turns of the
root; the program then replaces everything after the first by a summary (positions 5 and 6), and version 5 continues:

    position             0    1    2    3    4    5    6    7    8    9
    root                                4    4         4    4               T = 8, runs (3, 2, 4), (6, 2, 4)
    root.fork(turns=1)                  |    |              5    5    5     T = 10, runs (7, 3, 5)

The fork shares positions 0 to 4. Tokens 3 and 4 are in the loss of the root's sequence only: each sampled token is in
the loss of the path that sampled it. Rows 0..3 of the fork are those that the shared segments gave. Its first own
segment gives row 4, which the root's second turn gave too, and rows 5..8. Its rows therefore do not depend on the
growth of the root. The tree has 8 + 5 tokens; 7 are sampled.

Each path is of one agent, and `close` says which agents are trained:

    made.agent, fork.agent = "planner", "critic"
    made.close(stop_reason=STOP, reward=1.2, rewards={"planner": 1.0})    the tokens of the critic take no gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from message_queue.errors import ContractError
from message_queue.tokens import Int32Array, RoutedExperts, RoutingSpec, StopReason, TokenOutput, shape_of
from message_queue.training_sequence import TrainingSequence, TrajectoryRows, TrajectoryScores, training_sequence

PlacedSegment = tuple[int, TokenOutput]  # (position of its first token, segment)
ResumeRouting = Literal["append", "force", "replace", "split"]
POLICY = "policy"
"""Agent of a path, if it has no other name."""


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


class SequencePart(NamedTuple):
    """A training sequence before its arrays are made."""

    path: Trajectory
    """Path that sampled it."""
    length: int
    """Tokens, from the start of the path."""
    segments: list[PlacedSegment]
    """Segments with tokens in the loss."""
    rows: TrajectoryRows | None
    """Rows over which they were decoded; None without routing."""


class SequenceBranch(NamedTuple):
    """Rows over which segments were decoded: the start of a training sequence."""

    first_segment: int
    """Number of the first segment in the trajectory."""
    rows: TrajectoryRows | None
    """None without routing."""


class Trajectory:
    """Ordered turns of one rollout, reward and stop reason; with `fork`, one path of several.

    `turns`, `token_ids`, the length and the rows are of this path, its shared turns included. `segments`, `num_sampled`
    and the training sequences are of all paths if this is the root, and those of a fork are its own: shared ones are
    counted by the path that sampled them.

    Attributes:
        path: number of the path; 0 is the root.
        agent: name of the agent whose turns the path has; a fork has that of its parent until it is set.
        parent: number of the path that was forked; None for the root.
        shared_turns: number of turns shared with the parent; 0 for the root.
        shared_tokens: number of tokens in them.
        awaits_scores: whether a teacher scores the trajectory when it is closed, and has not yet.
        scores: of each of its `sequences`; None without a teacher.

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
        self.rewards: dict[str, float] | None = None
        self.stop_reason: StopReason | None = None
        self.info: dict[str, float] = {}
        self.unsure_call: str | None = None  # started before a restart; it may have happened or not
        self.agent = POLICY
        self.path = self.shared_turns = self.shared_tokens = 0
        self.parent: int | None = None
        self.awaits_scores = False
        self.scores: TrajectoryScores | None = None
        self._root: Trajectory | None = None  # None for the root itself
        self._forks: list[Trajectory] = []  # of the root, in order of creation
        self._length = 0
        self._placed: list[PlacedSegment] = []
        self._branches = [SequenceBranch(0, None if routing is None else TrajectoryRows(routing))]

    def __len__(self) -> int:
        """T: prompt, observation and sampled tokens."""
        return self._length

    @property
    def num_rows(self) -> int:
        """Positions 0..num_rows-1 are covered."""
        return 0 if self._rows is None else len(self._rows)

    @property
    def num_missing_rows(self) -> int:
        """Forwarded positions of this path without a row; of a fork, from its last shared token on.

        The last sampled token and what was observed after it were not forwarded.
        """
        if self._rows is None:
            return 0
        start = max(0, self.shared_tokens - 1)
        end = max((at + len(segment) for at, segment in self._placed), default=0) - 1
        rows, before = self._rows.first(max(0, end)), self._rows.first(start)
        available = len(rows) - rows.num_unavailable
        return max(0, end - start - (available - len(before) + before.num_unavailable))

    @property
    def closed(self) -> bool:
        return (self._root or self).stop_reason is not None

    @property
    def paths(self) -> tuple[Trajectory, ...]:
        """The root and its forks of all depths in order of creation."""
        root = self._root or self
        return root, *root._forks

    @property
    def segments(self) -> list[TokenOutput]:
        """All segments in order, path after path."""
        return [s for path in self._counted for _, s in path._placed[path._branches[0].first_segment :]]

    @property
    def shared_segments(self) -> list[PlacedSegment]:
        """Segments in the turns that this path shares with its parent, in order."""
        return self._placed[: self._branches[0].first_segment]

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, shared ones once."""
        return sum(map(len, self.segments))

    def observe(self, token_ids: Int32Array) -> None:
        """Append tokens that no policy sampled (prompt, tool reply) and open a turn.

        Raises:
            ContractError: closed trajectory, wrong dtype, or no tokens for the first turn.
        """
        self._require_open()
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise ContractError(f"observation is {shape_of(token_ids)}; need int32[n]")
        if not self.turns and not len(token_ids):
            raise ContractError("the prompt is empty; a trajectory starts with at least one token")
        self.turns.append(Turn(observation=token_ids))
        self._length += len(token_ids)

    def extend(self, segment: TokenOutput) -> None:
        """Append a segment that was decoded right after the tokens held so far, and merge its rows.

        Raises:
            ContractError: no turn is open, rows are missing, overlap the future, or leave a gap. Nothing is changed.
        """
        self.check(segment)
        self._append(segment)

    def check(self, segment: TokenOutput) -> None:
        """Raise ContractError if `extend` would refuse a segment."""
        self._require_open()
        if len(self.turns) == self.shared_turns:
            shared = f"path {self.path} has only shared turns" if self.turns else "a segment came before the prompt"
            raise ContractError(f"{shared}; call observe first")
        segment.check_rows(self.routing)
        if (given := segment.routed_experts) is None:
            return
        end, last_forwarded = given.end_position, self._length + len(segment) - 2
        if end > last_forwarded + 1 or (len(segment) and end <= last_forwarded):
            raise ContractError(
                f"segment from replica {segment.replica} has rows up to position {end - 1}; "
                f"its {len(segment)} tokens after position {self._length - 1} need rows up to {last_forwarded}"
            )
        stated = given.first_position - given.unavailable
        if stated > self.num_rows:
            raise ContractError(
                f"segment from replica {segment.replica} has rows from position {given.first_position}; "
                f"rows {self.num_rows}..{stated - 1} are missing"
            )

    def fork(self, *, turns: int) -> Trajectory:
        """A new path of the same rollout that shares the first turns as they are now; both paths may grow afterwards.

        Arrays are shared, not copied. A segment that this path appends to a shared turn later is not in the fork.

        Args:
            turns: number of shared turns; 0 for a path with its own prompt.

        Raises:
            ContractError: closed trajectory, the root has no prompt yet, or not as many turns.
        """
        if not 0 <= turns <= len(self.turns):
            raise ContractError(
                f"fork.turns is {turns}; path {self.path} has {len(self.turns)} turns; choose 0 to {len(self.turns)}"
            )
        tokens = sum(len(turn.observation) + turn.num_sampled for turn in self.turns[:turns])
        return self.fork_as(1 + max(path.path for path in self.paths), turns=turns, tokens=tokens)

    def fork_as(self, number: int, *, turns: int, tokens: int) -> Trajectory:
        """As `fork`, for a path that was stored: segments of the last shared turn after `tokens` are left out.

        Args:
            number: path number of the fork.
            turns: number of shared turns.
            tokens: number of tokens in them.

        Raises:
            ContractError: as of `fork`, or the shared turns do not end at `tokens`.
        """
        self._require_open()
        root = self._root or self
        if not root.turns:
            raise ContractError("a fork came before the prompt of its trajectory; call observe first")
        made = copy(self)  # of the same class and, if it is recorded, with the same recorder
        Trajectory.__init__(made, routing=self.routing, resume_routing=self.resume_routing)
        made._root, made.path, made.parent, made.agent = root, number, self.path, self.agent
        for number_of_turn, turn in enumerate(self.turns[:turns], start=1):
            made.turns.append(Turn(turn.observation))
            made._length += len(turn.observation)
            for segment in turn.segments:
                if number_of_turn == turns and made._length + len(segment) > tokens:
                    break
                made._append(segment)
        if (len(made.turns), len(made)) != (turns, tokens):
            raise ContractError(
                f"path {number} shares {turns} turns of {tokens} tokens with path {self.path}, whose first "
                f"{len(made.turns)} have {len(made)}; fork at the end of a turn"
            )
        made.shared_turns, made.shared_tokens = turns, tokens
        made._branches = [SequenceBranch(len(made._placed), made._rows)]
        root._forks.append(made)
        return made

    async def start_call(self, call: str) -> None:
        """Announce an outside call that must happen once; the recorder of the trajectory notes it."""

    def close(
        self,
        *,
        stop_reason: StopReason,
        reward: float,
        info: dict[str, float] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """End the trajectory with its reward: all its paths.

        Args:
            rewards: agent -> its reward, for the agents that are trained; None trains all paths with `reward`.

        Raises:
            ContractError: closed before, a reward that is not finite, no path is of an agent that is trained, or a
                fork: only the root is closed.
        """
        if self._root is not None:
            raise ContractError(
                f"close of path {self.path}, which is a fork; close path 0, which the agent loop was given"
            )
        self._require_open()
        if not np.isfinite([reward, *(rewards or {}).values()]).all():
            raise ContractError(f"reward is {reward} and rewards is {rewards}; rewards are finite")
        agents = {part.path.agent for part in self.sequence_parts()}
        if rewards is not None and not agents & rewards.keys():
            raise ContractError(f"rewards is of {sorted(rewards)}, and the paths are of {sorted(agents)}; train one")
        numbers = {key: float(value) for key, value in (info or {}).items()}
        self.stop_reason, self.reward, self.info = stop_reason, float(reward), numbers
        self.rewards = None if rewards is None else {agent: float(value) for agent, value in rewards.items()}

    def fail(self) -> None:
        """End the trajectory as a failed rollout, also after `close`: its tokens take no gradient."""
        self.stop_reason, self.awaits_scores, self.scores = None, False, None
        self.close(stop_reason=StopReason.ERROR, reward=0.0)

    def add_scores(self, scores: TrajectoryScores) -> None:
        """Add the scores of a teacher to a closed trajectory.

        Raises:
            ContractError: it is open, or they are not of its sequences.
        """
        sampled = [sum(len(segment) for _, segment in part.segments) for part in self.sequence_parts()]
        found = [None if each is None else len(each) for each in scores]
        if not self.closed or not _fits(found, sampled):
            raise ContractError(f"scores are of {found} tokens, and the sequences of the trajectory sampled {sampled}")
        self.awaits_scores, self.scores = False, scores

    # ---- contents

    def token_ids(self) -> Int32Array:
        """int32 [T]."""
        parts = [p for turn in self.turns for p in (turn.observation, *(s.token_ids for s in turn.segments))]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def leading_rows(self) -> RoutedExperts | None:
        """Rows from position 0 to the first that is -1, as forced rows for an engine; None without any."""
        return None if self._rows is None else self._rows.leading()

    def sequences(self) -> list[TrainingSequence]:
        """Inputs of the trainer's forward: one sequence for each path, or several with `split`.

        Every sampled token is in the loss of exactly one. A sequence ends with a sampled token; observed tokens after
        it, as those of a call that was not answered, are left out. A path that sampled no token itself has no
        sequence; if no path has any, the root has one.
        """
        parts = list(self.sequence_parts())
        return [training_sequence(p, teacher=t) for p, t in zip(parts, self.scores or [None] * len(parts), strict=True)]

    def sequence_parts(self) -> Iterator[SequencePart]:
        """The parts of `sequences`, in order."""
        for path in self._counted:
            ends = [*(branch.first_segment for branch in path._branches[1:]), len(path._placed)]
            for branch, end in zip(path._branches, ends, strict=True):
                own = [(at, segment) for at, segment in path._placed[branch.first_segment : end] if len(segment)]
                last = branch is path._branches[-1]
                if own or (last and path._root is None and not path.num_sampled):
                    yield SequencePart(path, own[-1][0] + len(own[-1][1]) if own else len(path), own, branch.rows)

    # ---- inside

    @property
    def _rows(self) -> TrajectoryRows | None:
        """Rows of the training sequence that is still growing; None without routing."""
        return self._branches[-1].rows

    @property
    def _counted(self) -> tuple[Trajectory, ...]:
        """Paths that count here: all paths at the root."""
        return self.paths if self._root is None else (self,)

    def _require_open(self) -> None:
        if self.closed:
            raise ContractError(
                f"the trajectory is closed ({(self._root or self).stop_reason}); nothing can be appended"
            )

    def _append(self, segment: TokenOutput) -> None:
        """Take a checked segment, and its rows by `resume_routing`."""
        rows, existing = segment.routed_experts, self._rows
        if rows is not None and existing is not None and (len(segment) or self.resume_routing in ("append", "force")):
            if self.resume_routing == "replace":
                existing = existing.first(rows.first_position)
                self._branches[-1] = self._branches[-1]._replace(rows=existing)
            elif self.resume_routing == "split" and existing.differ(rows):
                existing = existing.first(rows.first_position - rows.unavailable)
                self._branches.append(SequenceBranch(len(self._placed), existing))
            existing.add(rows, version=segment.weights.version)
        self.turns[-1].segments.append(segment)
        self._placed.append((self._length, segment))
        self._length += len(segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Permission to roll out one prompt."""

    group: int
    """Id, unique in a run and never reused."""
    prompt: int
    """Index of the prompt in its source."""
    admitted_version: int
    """Newest `param_version` that every replica serves; no token of the group is older."""
    admitted_update: int
    """Optimizer updates held by those weights, the unit of staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup(Admission):
    """The n trajectories of one prompt: the unit of the queue and of the trainer's normalisation."""

    trajectories: list[Trajectory]
    """The n trajectories."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(t.num_sampled for t in self.trajectories)

    @property
    def closed(self) -> bool:
        """Whether every trajectory has its stop reason and reward, and the scores that it awaits."""
        return bool(self.trajectories) and all(t.closed and not t.awaits_scores for t in self.trajectories)


def _fits(found: list[int | None], sampled: list[int]) -> bool:
    """Whether there are scores for each sequence, or None, and for each of its tokens."""
    return len(found) == len(sampled) and all(
        n is None or n == tokens for n, tokens in zip(found, sampled, strict=True)
    )
