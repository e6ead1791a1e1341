"""Whether a trajectory that is trained is what the engines made: every token, logprob, lag and row of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.batch.training_batch import TrainingBatch
from async_rl.simulate import model
from async_rl.simulate.engine import Answered
from async_rl.simulate.scenario import Scenario
from async_rl.simulate.violations import require
from message_queue.sequence import TrainingSequence
from message_queue.tokens import Int32Array

NO_ROW = [[-1] * model.ROUTING.top_k] * len(model.ROUTING.layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceData:
    """One sequence of the trainer's batch."""

    trajectory: int
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    lags: list[int]
    rows: list[list[list[int]]]

    @classmethod
    def of(cls, batch: TrainingBatch) -> list[SequenceData]:
        """All sequences of a batch."""
        return [cls._of(batch, number) for number in range(len(batch))]

    @classmethod
    def _of(cls, batch: TrainingBatch, number: int) -> SequenceData:
        sequence, loss = batch.sequence(number), batch.loss_tokens(number)
        mask, logprobs, lags = np.zeros(len(sequence), bool), np.zeros(len(sequence)), np.full(len(sequence), -1)
        mask[loss.positions], logprobs[loss.positions], lags[loss.positions] = True, loss.logprobs, loss.lag
        rows = sequence.routed_experts
        assert rows is not None
        return cls(
            trajectory=int(batch.trajectory[number]),
            token_ids=sequence.token_ids.tolist(),
            mask=mask.tolist(),
            logprobs=logprobs.tolist(),
            lags=lags.tolist(),
            rows=rows.tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A trajectory as its training sequences have it."""

    tokens: list[int]
    """All tokens."""
    versions: list[int]
    """Of the weights that sampled each; -1 if none did."""
    kept: list[list[int]] | None
    """Tokens that the sampler kept, for each sampled one; empty for others. None if it kept all."""

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence]) -> Trained:
        """Each sampled token is in the loss of one sequence; the last sequence has all tokens."""
        tokens = sequences[-1].token_ids.tolist()
        versions, kept = [-1] * len(tokens), [list[int]() for _ in tokens]
        for sequence in sequences:
            sets = list[list[int]]()
            if sequence.support is not None:
                counts, ids = sequence.support.unpack()
                sets = [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])]
            for start, count, version in sequence.runs:
                for at in range(start, start + count):
                    versions[at], kept[at] = version, sets[at] if sets else []
        cut = any(sequence.support is not None for sequence in sequences)
        return cls(tokens=tokens, versions=versions, kept=kept if cut else None)


class TrajectoryJudge:
    """Judges trajectories of one batch.

    Args:
        weights: by version. lags: updates between each version and the gradient. updates: that each version holds.
        oldest: updates that weights hold whose tokens are within the bound.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        weights: Mapping[int, model.Weights],
        lags: Mapping[int, int],
        updates: Mapping[int, int],
        oldest: int,
    ) -> None:
        self._scenario = scenario
        self._weights = weights
        self._lags = lags
        self._updates = updates
        self._oldest = oldest

    def check(
        self,
        trajectory: Trained,
        sequences: Sequence[SequenceData],
        *,
        prompt: Int32Array,
        session: str,
        answers: Sequence[Answered],
        tool_calls: int,
        interrupted: bool,
    ) -> None:
        """Judge one trajectory and its rows in the batch.

        Args:
            prompt: what it starts with. answers: of engines to its requests. tool_calls: tools that were started.
            interrupted: a restart came in between, after which a call that was begun is not made again.
        """
        tokens, versions = trajectory.tokens, trajectory.versions
        require("exactly once", bool(sequences), "{} is not in the batch", session)
        require("exactly once", tokens[: len(prompt)] == prompt.tolist(), "{} starts with {}", session, tokens[:8])
        self._check_tokens(tokens, versions, session)
        self._check_support(trajectory, session)
        self._check_turns(tokens, versions, session, tool_calls, interrupted=interrupted)
        covered = [False] * len(tokens)
        for sequence in sequences:
            self._check_sequence(sequence, tokens, versions, covered, session)
            self._check_rows(sequence, versions, session, answers)
        sampled = [version >= 0 and not self._masked(version) for version in versions]
        require("provenance", covered == sampled, "{}: the loss covers {}, not {}", session, covered, sampled)

    def _masked(self, version: int) -> bool:
        """Whether tokens of a version take no gradient."""
        return self._scenario.policy == "mask" and self._updates.get(version, self._oldest) < self._oldest

    # ---- tokens

    def _check_tokens(self, tokens: list[int], versions: list[int], session: str) -> None:
        contexts, number = model.contexts(tokens), model.session_number(session)
        calls = self._scenario.max_turns > 1
        for i, version in enumerate(versions):
            if version < 0:
                continue
            weights = self._weights.get(version)
            require("versions", weights is not None, "{} has version {} at {}", session, version, i)
            assert weights is not None
            expected = weights.token(contexts[i - 1], number, calls=calls)
            require(
                "provenance",
                tokens[i] == expected,
                "{}: token {} is {}; version {} samples {}",
                session,
                i,
                tokens[i],
                version,
                expected,
            )

    def _check_support(self, trajectory: Trained, session: str) -> None:
        cut = self._scenario.top_p < 1 and any(version >= 0 for version in trajectory.versions)
        require("provenance", (trajectory.kept is not None) == cut, "{}: kept tokens are not {}", session, cut)
        contexts = model.contexts(trajectory.tokens)
        for i, kept in enumerate(trajectory.kept or ()):
            version = trajectory.versions[i]
            expected = self._weights[version].kept(contexts[i - 1], trajectory.tokens[i]) if version >= 0 else []
            require("provenance", kept == expected, "{}: token {} is of {}, not {}", session, i, kept, expected)

    def _check_turns(
        self, tokens: list[int], versions: list[int], session: str, tool_calls: int, *, interrupted: bool
    ) -> None:
        limit, scenario = self._scenario.max_tokens, self._scenario
        require("exactly once", len(tokens) <= limit, "{} has {} tokens of {}", session, len(tokens), limit)
        turns = [tokens[start:end] for start, end in _sampled_runs(versions)]
        require("exactly once", len(turns) <= scenario.max_turns, "{} has {} turns", session, len(turns))
        *before, last = [sum(token == model.CALL for token in turn) for turn in turns] or [0]
        executed, ended = sum(before), bool(turns) and turns[-1][-1] == model.END
        most = executed + last if ended and len(turns) < scenario.max_turns else executed
        held = tool_calls <= most if interrupted else tool_calls == most
        require("exactly once", held, "{} made {} tool calls, not {}", session, tool_calls, most)

    # ---- the batch

    def _check_sequence(
        self, data: SequenceData, tokens: list[int], versions: list[int], covered: list[bool], session: str
    ) -> None:
        length = len(data.token_ids)
        require("provenance", data.token_ids == tokens[:length], "{}: other tokens are trained", session)
        contexts, bound = model.contexts(data.token_ids), self._scenario.max_staleness
        for i, (in_loss, logprob, lag) in enumerate(zip(data.mask, data.logprobs, data.lags, strict=True)):
            if not in_loss:
                require("provenance", logprob == 0, "{}: token {} has a logprob and no loss", session, i)
                continue
            require("provenance", not covered[i], "{}: token {} is in two losses", session, i)
            covered[i] = True
            expected = float(self._weights[versions[i]].logprob(contexts[i - 1], data.token_ids[i]))
            require("provenance", logprob == expected, "{}: logprob {} is {}, not {}", session, i, logprob, expected)
            true_lag = self._lags[versions[i]]
            require("staleness", true_lag <= bound, "{}: token {} is {} updates old", session, i, true_lag)
            require("staleness", lag == true_lag, "{}: token {} has lag {}, not {}", session, i, lag, true_lag)

    # ---- rows

    def _check_rows(self, data: SequenceData, versions: list[int], session: str, answers: Sequence[Answered]) -> None:
        contexts = model.contexts(data.token_ids)
        require("rows", data.rows[-1] == NO_ROW, "{}: the last token has a row", session)
        match self._scenario.resume_routing:
            case "append" | "force":
                missing = {p for answer in answers for p in answer.unavailable}
                owners = [_first(v for v in versions[p + 1 :] if v >= 0) for p in range(len(contexts) - 1)]
                self._compare(data, contexts, owners, session, missing=missing)
            case "replace":
                made = self._passes(answers, versions, at=len(versions) - 1)
                self._any(data, contexts, made, session, ordered=True)
            case "split":
                starts = {answer.start for answer in answers}
                for at in _ends(data.mask, starts):
                    self._any(data, contexts, self._passes(answers, versions, at=at), session, ordered=False)

    def _passes(self, answers: Sequence[Answered], versions: list[int], *, at: int) -> list[list[int]]:
        """Versions that gave rows 0..at-1 of the answer in which the token at `at` was sampled; one list per answer
        that it may have been."""
        numbered: list[tuple[int, list[int]]] = []
        for answer in answers:
            sampled = [segment.weights.version for segment in answer.segments for _ in range(len(segment))]
            inside = sampled[: at - answer.start + 1]
            if not (answer.start <= at < answer.start + len(sampled)) or versions[answer.start : at + 1] != inside:
                continue
            number = int(answer.request.rpartition("#")[2].rstrip("."))
            numbered.append((number, [inside[max(0, p + 1 - answer.start)] for p in range(at)]))
        newest = max((number for number, _ in numbered), default=-1)
        return [owners for number, owners in numbered if number == newest]

    def _any(
        self, data: SequenceData, contexts: list[int], owners: list[list[int]], session: str, *, ordered: bool
    ) -> None:
        """The rows are those of one of the answers."""
        wrong = [self._differs(data, contexts, of, set(), ordered) for of in owners]
        require("rows", None in wrong, "{}: rows {} are of no answer", session, wrong)

    def _compare(
        self, data: SequenceData, contexts: list[int], owners: list[int], session: str, *, missing: set[int]
    ) -> None:
        wrong = self._differs(data, contexts, owners, missing, True)
        at = -1 if wrong is None else wrong
        require(
            "rows", wrong is None, "{}: row {} is {}, not of version {}", session, at, data.rows[at], owners[at:][:1]
        )

    def _differs(
        self, data: SequenceData, contexts: list[int], owners: list[int], missing: set[int], ordered: bool
    ) -> int | None:
        """First position whose row is not that of its owner."""
        for p, owner in enumerate(owners):
            row = data.rows[p]
            if p in missing and row == NO_ROW:
                continue
            expected = self._weights[owner].row(contexts[p])
            if row != expected and (ordered or [sorted(e) for e in row] != [sorted(e) for e in expected]):
                return p
        return None


def _sampled_runs(versions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each stretch of sampled tokens."""
    start = None
    for i, version in enumerate([*versions, -1]):
        if version >= 0 and start is None:
            start = i
        elif version < 0 and start is not None:
            yield start, i
            start = None


def _ends(mask: Sequence[bool], starts: set[int]) -> list[int]:
    """Positions in the loss after which the loss or an answer ends: what holds for their rows holds before."""
    after = [*mask[1:], False]
    return [i for i, in_loss in enumerate(mask) if in_loss and (not after[i] or i + 1 in starts)]


def _first(values: Iterator[int]) -> int:
    return next(values, -1)
