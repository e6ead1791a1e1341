"""Whether a trajectory that is trained is what the engines made: every token, logprob, lag and row of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from async_rl.config import RunConfig
from async_rl.simulator import model
from async_rl.simulator.engine import Answered
from async_rl.simulator.violations import require
from async_rl.trainer.batch.training_batch import TrainingBatch
from message_queue.tokens import Int32Array
from message_queue.training_sequence import TrainingSequence

NO_ROW = [[-1] * model.ROUTING.top_k] * len(model.ROUTING.layers)


@dataclass(slots=True, eq=False)
class Rollout:
    """What engines and tools did for one trajectory, over all restarts."""

    answers: list[Answered] = field(default_factory=list[Answered])
    """Of engines to its requests."""
    tool_calls: int = 0
    """Tools that were started."""
    kept: int = 0
    """Tokens that are not generated again."""
    interrupted: bool = False
    """Whether a restart or the death of its worker came in between: a call that was started is not made again then."""


class TrajectoryJudge:
    """Judges trajectories of one mini-batch.

    Args:
        weights: by version.
        updates: that each version holds.
        update: that the weights hold whose gradient is taken.
        oldest: that weights hold whose tokens are within the bound in the whole batch.
    """

    def __init__(
        self,
        config: RunConfig,
        batch: TrainingBatch,
        *,
        weights: Mapping[int, model.Weights],
        updates: Mapping[int, int],
        update: int,
        oldest: int,
    ) -> None:
        self._config = config
        self._batch = batch
        self._weights = weights
        self._updates = updates
        self._update = update
        self._oldest = oldest

    def check(
        self,
        sequences: Sequence[TrainingSequence],
        number: int,
        *,
        prompt: Int32Array,
        session: str,
        rollout: Rollout,
    ) -> None:
        """Judge one trajectory and its rows in the batch.

        Args:
            sequences: of the trajectory; each sampled token is in the loss of one, and the last has all tokens.
            number: of the trajectory in the batch.
            prompt: what it starts with.
        """
        require("exactly once", bool(sequences), "{} has no content, and is trained", session)
        tokens = sequences[-1].token_ids.tolist()
        versions = [-1] * len(tokens)  # of the weights that sampled each token
        for start, count, version, *_ in (run for sequence in sequences for run in sequence.runs):
            versions[start : start + count] = [version] * count
        require("exactly once", tokens[: len(prompt)] == prompt.tolist(), "{} starts with {}", session, tokens[:8])
        self._check_tokens(sequences, tokens, versions, session)
        self._check_turns(tokens, versions, session, rollout)
        covered = [False] * len(tokens)
        for at in (self._batch.trajectory == number).nonzero()[0].tolist():
            in_loss = self._check_sequence(at, tokens, versions, covered, session)
            self._check_rows(self._batch.sequence(at), in_loss, versions, session, rollout.answers)
        sampled = [version >= 0 and not self._masked(version) for version in versions]
        require("provenance", covered == sampled, "{}: the loss covers {}, not {}", session, covered, sampled)

    def _masked(self, version: int) -> bool:
        """Whether tokens of a version take no gradient."""
        return self._config.staleness.policy == "mask" and self._updates.get(version, self._oldest) < self._oldest

    # ---- tokens

    def _check_tokens(
        self, sequences: Sequence[TrainingSequence], tokens: list[int], versions: list[int], session: str
    ) -> None:
        """Each sampled token, and the tokens that the sampler kept beside it, are those of its weights."""
        contexts, number = model.contexts(tokens), model.session_number(session)
        calls, kept = self._config.rollout.limits.max_turns > 1, _kept_tokens(sequences)
        for i, version in enumerate(versions):
            if version < 0:
                continue
            weights = self._weights.get(version)
            require("versions", weights is not None, "{} has version {} at {}", session, version, i)
            assert weights is not None
            expected = weights.token(contexts[i - 1], number, calls=calls)
            text = "{}: token {} is {}; version {} samples {}"
            require("provenance", tokens[i] == expected, text, session, i, tokens[i], version, expected)
            of = weights.kept(contexts[i - 1], tokens[i]) if self._config.rollout.sampling.is_cut else None
            require("provenance", kept.get(i) == of, "{}: token {} is of {}, not {}", session, i, kept.get(i), of)

    def _check_turns(self, tokens: list[int], versions: list[int], session: str, rollout: Rollout) -> None:
        limits, length = self._config.rollout.limits, len(tokens)
        require("exactly once", length <= limits.max_tokens, "{} has {} tokens", session, length)
        runs = [list(run) for sampled, run in groupby(range(length), key=lambda i: versions[i] >= 0) if sampled]
        turns = [[tokens[i] for i in run] for run in runs]
        require("exactly once", len(turns) <= limits.max_turns, "{} has {} turns", session, len(turns))
        *before, last = [sum(token == model.CALL for token in turn) for turn in turns] or [0]
        executed, ended = sum(before), bool(turns) and turns[-1][-1] == model.END
        most = executed + last if ended and len(turns) < limits.max_turns else executed
        calls = rollout.tool_calls
        held = calls <= most if rollout.interrupted else calls == most
        require("exactly once", held, "{} made {} tool calls, not {}", session, calls, most)

    # ---- the batch

    def _check_sequence(
        self, at: int, tokens: list[int], versions: list[int], covered: list[bool], session: str
    ) -> list[bool]:
        """Mark tokens in the loss of a sequence in `covered`; returns which they are."""
        ids, loss = self._batch.sequence(at).token_ids.tolist(), self._batch.loss_tokens(at)
        require("provenance", ids == tokens[: len(ids)], "{}: other tokens are trained", session)
        contexts, bound, in_loss = model.contexts(ids), self._config.staleness.max_staleness, [False] * len(ids)
        for i, logprob, lag in zip(loss.positions.tolist(), loss.logprobs.tolist(), loss.lag.tolist(), strict=True):
            require("provenance", not covered[i], "{}: token {} is in two losses", session, i)
            covered[i] = in_loss[i] = True
            expected = float(self._weights[versions[i]].logprob(contexts[i - 1], ids[i]))
            require("provenance", logprob == expected, "{}: logprob {} is {}, not {}", session, i, logprob, expected)
            true_lag = self._update - self._updates[versions[i]]
            require("staleness", true_lag <= bound, "{}: token {} is {} updates old", session, i, true_lag)
            require("staleness", lag == true_lag, "{}: token {} has lag {}, not {}", session, i, lag, true_lag)
        return in_loss

    # ---- rows

    def _check_rows(
        self,
        sequence: TrainingSequence,
        in_loss: list[bool],
        versions: list[int],
        session: str,
        answers: Sequence[Answered],
    ) -> None:
        """Each row is of the forward pass that `resume_routing` names."""
        assert sequence.routed_experts is not None
        rows, contexts = sequence.routed_experts.tolist(), model.contexts(sequence.token_ids.tolist())
        require("rows", rows[-1] == NO_ROW, "{}: the last token has a row", session)
        match self._config.rollout.resume_routing:
            case "append" | "force":
                missing = {p for answer in answers for p in answer.unavailable}
                owners = [next((v for v in versions[p + 1 :] if v >= 0), -1) for p in range(len(rows) - 1)]
                candidates = [([owners], True)]
            case "replace":
                missing, candidates = (
                    set[int](),
                    [(self._passes(answers, versions, at=len(versions) - 1), True)],
                )
            case "split":
                ends = _ends(in_loss, {len(answer.request.token_ids) for answer in answers})
                missing, candidates = (
                    set[int](),
                    [(self._passes(answers, versions, at=at), False) for at in ends],
                )
        for passes, ordered in candidates:
            wrong = [self._differs(rows, contexts, owners, missing, ordered) for owners in passes]
            require("rows", None in wrong, "{}: rows {} are of no forward pass that gave them", session, wrong)

    def _passes(self, answers: Sequence[Answered], versions: list[int], *, at: int) -> list[list[int]]:
        """Versions that gave rows 0..at-1 of the answer in which the token at `at` was sampled; one list per answer
        that it may have been."""
        numbered: list[tuple[int, list[int]]] = []
        for answer in answers:
            sampled = [segment.weights.version for segment in answer.segments for _ in range(len(segment))]
            start = len(answer.request.token_ids)
            inside = sampled[: at - start + 1]
            if not (start <= at < start + len(sampled)) or versions[start : at + 1] != inside:
                continue
            number = int(answer.request.request_id.rpartition("#")[2].rstrip("."))
            numbered.append((number, [inside[max(0, p + 1 - start)] for p in range(at)]))
        newest = max((number for number, _ in numbered), default=-1)
        return [owners for number, owners in numbered if number == newest]

    def _differs(
        self, rows: list[Any], contexts: list[int], owners: list[int], missing: set[int], ordered: bool
    ) -> int | None:
        """First position whose row is not that of its owner."""
        for p, owner in enumerate(owners):
            if p in missing and rows[p] == NO_ROW:
                continue
            expected = self._weights[owner].row(contexts[p])
            if rows[p] != expected and (ordered or [sorted(e) for e in rows[p]] != [sorted(e) for e in expected]):
                return p
        return None


def _kept_tokens(sequences: Sequence[TrainingSequence]) -> dict[int, list[int]]:
    """Position of a sampled token -> tokens that the sampler kept there, if it did not keep all."""
    kept: dict[int, list[int]] = {}
    for sequence in sequences:
        if sequence.support is not None:
            counts, ids = sequence.support.unpack()
            parts = np.split(ids, np.cumsum(counts)[:-1])
            kept |= {p: parts[p].tolist() for start, count, *_ in sequence.runs for p in range(start, start + count)}
    return kept


def _ends(mask: Sequence[bool], starts: set[int]) -> list[int]:
    """Positions in the loss after which the loss or an answer ends: what holds for their rows holds before."""
    after = [*mask[1:], False]
    return [i for i, in_loss in enumerate(mask) if in_loss and (not after[i] or i + 1 in starts)]
