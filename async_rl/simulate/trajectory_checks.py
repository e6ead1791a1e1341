"""Whether a trajectory that is trained is what the engines made: every token, logprob, lag and row of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tensordict import TensorDict

from async_rl.simulate import model
from async_rl.simulate.engine import Answered
from async_rl.simulate.scenario import Scenario
from message_queue.tokens import Int32Array
from message_queue.trajectory import Trajectory

Require = Callable[..., None]
NO_ROW = [[-1] * model.ROUTING.top_k] * len(model.ROUTING.layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceData:
    """One row of the trainer's batch, without its padding."""

    trajectory: int
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    lags: list[int]
    rows: list[list[list[int]]]
    padding_is_empty: bool

    @classmethod
    def of(cls, batch: TensorDict) -> list[SequenceData]:
        """All rows of a batch."""
        lengths = batch["lengths"].tolist()
        columns = {name: batch[name].numpy() for name in ("token_ids", "loss_mask", "behaviour_logprobs", "lag")}
        rows = batch["routed_experts"].numpy()
        return [
            cls(
                trajectory=int(of),
                token_ids=columns["token_ids"][s, :length].tolist(),
                mask=columns["loss_mask"][s, :length].tolist(),
                logprobs=columns["behaviour_logprobs"][s, :length].tolist(),
                lags=columns["lag"][s, :length].tolist(),
                rows=rows[s, :length].tolist(),
                padding_is_empty=not columns["loss_mask"][s, length:].any() and bool((rows[s, length:] == -1).all()),
            )
            for s, (of, length) in enumerate(zip(batch["trajectory"].tolist(), lengths, strict=True))
        ]


class TrajectoryJudge:
    """Judges trajectories of one batch.

    Args:
        weights: by version. lags: updates between each version and the gradient. updates: that each version holds.
        oldest: updates that weights hold whose tokens are within the bound.
        require: called with (invariant, whether it holds, text, values).
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        weights: Mapping[int, model.Weights],
        lags: Mapping[int, int],
        updates: Mapping[int, int],
        oldest: int,
        require: Require,
    ) -> None:
        self._scenario = scenario
        self._weights = weights
        self._lags = lags
        self._updates = updates
        self._oldest = oldest
        self._require = require

    def check(
        self,
        trajectory: Trajectory,
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
        tokens, versions = trajectory.token_ids().tolist(), trajectory.param_versions().tolist()
        self._require("exactly once", bool(sequences), "{} is not in the batch", session)
        self._require(
            "exactly once", tokens[: len(prompt)] == prompt.tolist(), "{} starts with {}", session, tokens[:8]
        )
        self._check_tokens(tokens, versions, session)
        self._check_support(trajectory, tokens, versions, session)
        self._check_turns(tokens, versions, session, tool_calls, interrupted=interrupted)
        covered = [False] * len(tokens)
        for sequence in sequences:
            self._check_sequence(sequence, tokens, versions, covered, session)
            self._check_rows(sequence, versions, session, answers)
        sampled = [version >= 0 and not self._masked(version) for version in versions]
        self._require("provenance", covered == sampled, "{}: the loss covers {}, not {}", session, covered, sampled)

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
            self._require("versions", weights is not None, "{} has version {} at {}", session, version, i)
            assert weights is not None
            expected = weights.token(contexts[i - 1], number, calls=calls)
            self._require(
                "provenance",
                tokens[i] == expected,
                "{}: token {} is {}; version {} samples {}",
                session,
                i,
                tokens[i],
                version,
                expected,
            )

    def _check_support(self, trajectory: Trajectory, tokens: list[int], versions: list[int], session: str) -> None:
        support = trajectory.support()
        if self._scenario.top_p == 1 or not trajectory.num_sampled:
            self._require("provenance", support is None, "{} has kept tokens of the whole vocabulary", session)
            return
        self._require("provenance", support is not None, "{} has no kept tokens", session)
        assert support is not None
        contexts, (counts, ids) = model.contexts(tokens), support.unpack()
        found = np.split(ids, np.cumsum(counts)[:-1])
        for i, version in enumerate(versions):
            kept = self._weights[version].kept(contexts[i - 1], tokens[i]) if version >= 0 else []
            same = found[i].tolist() == kept
            self._require("provenance", same, "{}: token {} is of {}, not {}", session, i, found[i].tolist(), kept)

    def _check_turns(
        self, tokens: list[int], versions: list[int], session: str, tool_calls: int, *, interrupted: bool
    ) -> None:
        limit, scenario = self._scenario.max_tokens, self._scenario
        self._require("exactly once", len(tokens) <= limit, "{} has {} tokens of {}", session, len(tokens), limit)
        turns = [tokens[start:end] for start, end in _sampled_runs(versions)]
        self._require("exactly once", len(turns) <= scenario.max_turns, "{} has {} turns", session, len(turns))
        *before, last = [sum(token == model.CALL for token in turn) for turn in turns] or [0]
        executed, ended = sum(before), bool(turns) and turns[-1][-1] == model.END
        most = executed + last if ended and len(turns) < scenario.max_turns else executed
        held = tool_calls <= most if interrupted else tool_calls == most
        self._require("exactly once", held, "{} made {} tool calls, not {}", session, tool_calls, most)

    # ---- the batch

    def _check_sequence(
        self, data: SequenceData, tokens: list[int], versions: list[int], covered: list[bool], session: str
    ) -> None:
        length = len(data.token_ids)
        self._require("provenance", data.token_ids == tokens[:length], "{}: other tokens are trained", session)
        self._require("rows", data.padding_is_empty, "{}: its padding is not empty", session)
        contexts, bound = model.contexts(data.token_ids), self._scenario.max_staleness
        for i, (in_loss, logprob, lag) in enumerate(zip(data.mask, data.logprobs, data.lags, strict=True)):
            if not in_loss:
                self._require("provenance", logprob == 0, "{}: token {} has a logprob and no loss", session, i)
                continue
            self._require("provenance", not covered[i], "{}: token {} is in two losses", session, i)
            covered[i] = True
            expected = float(self._weights[versions[i]].logprob(contexts[i - 1], data.token_ids[i]))
            self._require(
                "provenance", logprob == expected, "{}: logprob {} is {}, not {}", session, i, logprob, expected
            )
            true_lag = self._lags[versions[i]]
            self._require("staleness", true_lag <= bound, "{}: token {} is {} updates old", session, i, true_lag)
            self._require("staleness", lag == true_lag, "{}: token {} has lag {}, not {}", session, i, lag, true_lag)

    # ---- rows

    def _check_rows(self, data: SequenceData, versions: list[int], session: str, answers: Sequence[Answered]) -> None:
        contexts = model.contexts(data.token_ids)
        self._require("rows", data.rows[-1] == NO_ROW, "{}: the last token has a row", session)
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
        self._require("rows", None in wrong, "{}: rows {} are of no answer", session, wrong)

    def _compare(
        self, data: SequenceData, contexts: list[int], owners: list[int], session: str, *, missing: set[int]
    ) -> None:
        wrong = self._differs(data, contexts, owners, missing, True)
        at = -1 if wrong is None else wrong
        self._require(
            "rows", wrong is None, "{}: row {} is {}, not of version {}", session, at, data.rows[at], owners[at:][:1]
        )

    def _differs(
        self, data: SequenceData, contexts: list[int], owners: list[int], missing: set[int], ordered: bool
    ) -> int | None:
        """First position whose row is not that of its owner."""
        ordered = ordered and not self._scenario.rank_code_rows
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
