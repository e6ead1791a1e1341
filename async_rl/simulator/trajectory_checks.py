"""Whether a trajectory that is trained is what the engines made: every token, logprob, lag and row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from agent_loop.loop import Message
from async_rl.config import RunConfig
from async_rl.simulator import model
from async_rl.simulator.engine import Answered
from async_rl.simulator.violations import require
from async_rl.trainer.batch.training_batch import TrainingBatch
from message_queue.tokens import Int32Array
from message_queue.training_sequence import TrainingSequence

NO_ROW = [[-1] * model.ROUTING.top_k] * len(model.ROUTING.layers)


Alternatives = tuple[tuple[int, ...], ...]
"""Tokens of a message; several if it has the text of several answers."""


class AgentCall(NamedTuple):
    """A call of an agent that was answered."""

    conversation: tuple[Alternatives, ...]
    """What the engine has to be sent, in order."""
    message: Message | None
    """The answer as the agent saw it; None for tokens."""
    tokens: tuple[int, ...]
    """Of the answer."""

    def ends_at(self, tokens: tuple[int, ...]) -> set[int]:
        """Positions after the answer if `tokens` start with the call; none if they do not."""
        ends = {0}
        for part in (*self.conversation, (self.tokens,)):
            ends = {end + len(one) for end in ends for one in part if tokens[end : end + len(one)] == one}
        return ends


@dataclass(slots=True, eq=False)
class Rollout:
    """What engines, tools and agents did for one path of a trajectory, over all restarts."""

    session: str
    """Of its requests to engines."""
    answers: list[Answered] = field(default_factory=list[Answered])
    """Of engines to its requests."""
    received: list[int] = field(default_factory=list[int])
    """Prompt and answers that its worker received, since the rollout started or was continued."""
    tool_calls: int = 0
    """Tools that were started."""
    kept: int = 0
    """Tokens that are not regenerated."""
    interrupted: bool = False
    """Whether a restart or the death of its worker came in between: a call that was started is not repeated then."""
    reward: float | None = None
    """Last value that the task or the agent gave."""
    calls: list[AgentCall] = field(default_factory=list[AgentCall])
    """Of its agent, those that were answered."""
    num_calls: int = 0
    """Of its agent, retries left out."""
    written: set[str] = field(default_factory=set[str])
    """Texts of the assistant that its agent wrote; each may be that of an answer too."""

    def conversation(self, messages: Sequence[Message]) -> tuple[Alternatives, ...]:
        """What the engine has to be sent for a conversation: answers as they were sampled."""
        parts: list[Alternatives] = []
        for message in messages:
            texts = {call.tokens for call in self.calls if _same(call.message, message)}
            if not texts or message.content in self.written:
                texts.add(tuple(model.SimulatedTokenizer().encode(message.content)))
            parts += [((model.SPECIAL[f"<{message.role}>"],),), tuple(sorted(map(_ended, texts)))]
        return (*parts, ((model.ASSISTANT,),))


def _same(one: Message | None, other: Message) -> bool:
    """Whether `other` is the answer `one`, or has its text and calls."""
    if one is None or one.role != other.role:
        return False
    return (one.content, len(one.tool_calls)) == (other.content, len(other.tool_calls))


def _ended(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tokens if tokens[-1:] == (model.END,) else (*tokens, model.END)


@dataclass(slots=True, eq=False)
class _Path:
    """A path of a trajectory."""

    sequences: list[TrainingSequence]
    """Its sequences; the last has all tokens."""
    rollout: Rollout
    """What was done for it."""
    tokens: list[int] = field(init=False)
    """Token ids."""
    versions: list[int] = field(init=False)
    """Of the weights that sampled each token, on this path or another; -1 for the others."""
    is_own: list[bool] = field(init=False)
    """Whether each token was sampled on this path."""
    covered: list[bool] = field(init=False)
    """Whether each token is in a loss."""

    def __post_init__(self) -> None:
        self.tokens = self.sequences[-1].token_ids.tolist()
        self.versions, self.is_own = [-1] * len(self.tokens), [False] * len(self.tokens)
        self.covered = list(self.is_own)
        for sequence in self.sequences:
            for runs, is_own in ((sequence.shared, False), (sequence.runs, True)):
                for start, count, version, *_ in runs:
                    self.versions[start : start + count] = [version] * count
                    self.is_own[start : start + count] = [is_own] * count

    @property
    def session(self) -> str:
        """Of its requests."""
        return self.rollout.session

    @property
    def turns(self) -> list[list[int]]:
        """Positions of each turn that was sampled on this path."""
        grouped = groupby(range(len(self.tokens)), key=lambda i: self.is_own[i])
        return [list(run) for is_own, run in grouped if is_own]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryJudge:
    """Judges trajectories of one mini-batch."""

    config: RunConfig
    """Settings of the run."""
    batch: TrainingBatch
    """All mini-batches."""
    weights: Mapping[int, model.Weights]
    """By version."""
    updates: Mapping[int, int]
    """That each version holds."""
    update: int
    """That the weights hold whose gradient is taken."""
    oldest: int
    """That weights hold whose tokens are within the bound in the whole batch."""

    def check(
        self,
        sequences: Sequence[TrainingSequence],
        number: int,
        *,
        prompt: Int32Array,
        rollout_of: Callable[[int], Rollout],
    ) -> int:
        """Judge one trajectory and its rows in the batch; returns its number of sampled tokens.

        Args:
            sequences: all sequences of the trajectory; each sampled token is in the loss of one.
            number: place of the trajectory in the batch.
            prompt: tokens that it starts with.
            rollout_of: path -> what was done for it.
        """
        root = rollout_of(0)
        require("exactly once", bool(sequences), "{} has no content, and is trained", root.session)
        of_path = groupby(sequences, key=lambda sequence: sequence.path)
        paths = {number: _Path(list(found), rollout_of(number)) for number, found in of_path}
        for path in paths.values():
            self._check_tokens(path)
            self._check_answers(path)
            self._check_shared(path, paths.values())
        self._check_limits(paths.values(), root.session)
        if root.num_calls:
            self._check_calls(paths.values(), root)
        else:
            self._check_tools(paths[0], prompt)
        rows = (self.batch.trajectory == number).nonzero()[0].tolist()
        advantages = set(self.batch.advantages[rows].tolist())
        require("reward", len(advantages) == 1, "{} has the advantages {}", root.session, advantages)
        missing = {p for path in paths.values() for answer in path.rollout.answers for p in answer.unavailable}
        for at in rows:
            path = paths[self.batch.sequence(at).path]
            in_loss = self._check_sequence(at, path)
            self._check_rows(self.batch.sequence(at), in_loss, path, missing)
        for path in paths.values():
            sampled = [own and not self._masked(v) for own, v in zip(path.is_own, path.versions, strict=True)]
            text = "{}: the loss covers {}, not {}"
            require("provenance", path.covered == sampled, text, path.session, path.covered, sampled)
        return sum(sum(path.is_own) for path in paths.values())

    def _masked(self, version: int) -> bool:
        """Whether tokens of a version take no gradient."""
        return self.config.staleness.policy == "mask" and self.updates.get(version, self.oldest) < self.oldest

    # ---- tokens

    def _check_tokens(self, path: _Path) -> None:
        """Each token sampled here, and the tokens that the sampler kept with it, are those of its weights."""
        tokens, session = path.tokens, path.session
        contexts, number = model.contexts(tokens), model.session_number(session)
        calls, kept = self.config.rollout.limits.max_turns > 1, _kept_tokens(path.sequences)
        for i, version in enumerate(path.versions):
            if not path.is_own[i]:
                continue
            weights = self.weights.get(version)
            require("versions", weights is not None, "{} has version {} at {}", session, version, i)
            assert weights is not None
            expected = weights.token(contexts[i - 1], number, calls=calls)
            text = "{}: token {} is {}; version {} samples {}"
            require("provenance", tokens[i] == expected, text, session, i, tokens[i], version, expected)
            of = weights.kept(contexts[i - 1], tokens[i]) if self.config.rollout.sampling.is_cut else None
            require("provenance", kept.get(i) == of, "{}: token {} is of {}, not {}", session, i, kept.get(i), of)

    def _check_answers(self, path: _Path) -> None:
        """Up to the end of each turn, the tokens are those that an engine was sent and answered."""
        sent = [
            [*answer.request.token_ids.tolist(), *(i for part in answer.segments for i in part.token_ids.tolist())]
            for answer in path.rollout.answers
        ]
        for turn in path.turns:
            tokens = path.tokens[: turn[-1] + 1]
            require("provenance", tokens in sent, "{}: no engine had {}", path.session, tokens)
        received = path.rollout.received
        require("kept", path.tokens[: len(received)] == received, "{} lost a part of {}", path.session, received)

    def _check_shared(self, path: _Path, paths: Collection[_Path]) -> None:
        """Tokens that another path sampled are in its loss."""
        for start, count, version, *_ in path.sequences[0].shared:
            end = start + count
            sampled = any(
                other.tokens[:end] == path.tokens[:end]
                and other.versions[start:end] == [version] * count
                and all(other.is_own[start:end])
                for other in paths
            )
            require("exactly once", sampled, "{}: tokens {} to {} are in no loss", path.session, start, end - 1)

    def _check_limits(self, paths: Collection[_Path], session: str) -> None:
        limits, length = self.config.rollout.limits, max(len(path.tokens) for path in paths)
        require("exactly once", length <= limits.max_tokens, "{} has {} tokens", session, length)
        turns = sum(len(path.turns) for path in paths)
        require("exactly once", turns <= limits.max_turns, "{} has {} turns", session, turns)

    def _check_calls(self, paths: Collection[_Path], root: Rollout) -> None:
        """Each answer that the agent had is one turn, after the conversation that it sent; no call is sampled twice."""
        turns = sum(len(path.turns) for path in paths)
        text = "{} has {} turns, and its agent made {} calls"
        require("exactly once", turns <= root.num_calls, text, root.session, turns, root.num_calls)
        ended = [(tuple(path.tokens), turn) for path in paths for turn in path.turns]
        for call in root.calls:
            found = any(
                len(turn) == len(call.tokens) and turn[-1] + 1 in call.ends_at(tokens[: turn[-1] + 1])
                for tokens, turn in ended
            )
            require("exactly once", found, "{}: no path has the call {}", root.session, call)

    def _check_tools(self, path: _Path, prompt: Int32Array) -> None:
        tokens, session, rollout = path.tokens, path.session, path.rollout
        require("exactly once", tokens[: len(prompt)] == prompt.tolist(), "{} starts with {}", session, tokens[:8])
        turns = [[tokens[i] for i in turn] for turn in path.turns]
        *before, last = [sum(token == model.CALL for token in turn) for turn in turns] or [0]
        executed, ended = sum(before), bool(turns) and turns[-1][-1] == model.END
        most = executed + last if ended and len(turns) < self.config.rollout.limits.max_turns else executed
        calls = rollout.tool_calls
        held = calls <= most if rollout.interrupted else calls == most
        require("exactly once", held, "{} made {} tool calls, not {}", session, calls, most)

    # ---- the batch

    def _check_sequence(self, at: int, path: _Path) -> list[bool]:
        """Mark tokens in the loss of a sequence as covered; returns which they are."""
        ids, loss, session = self.batch.sequence(at).token_ids.tolist(), self.batch.loss_tokens(at), path.session
        require("provenance", ids == path.tokens[: len(ids)], "{}: other tokens are trained", session)
        contexts, bound, in_loss = model.contexts(ids), self.config.staleness.max_staleness, [False] * len(ids)
        for i, logprob, lag in zip(loss.positions.tolist(), loss.logprobs.tolist(), loss.lag.tolist(), strict=True):
            require("provenance", not path.covered[i], "{}: token {} is in two losses", session, i)
            path.covered[i] = in_loss[i] = True
            version = path.versions[i]
            expected = float(self.weights[version].logprob(contexts[i - 1], ids[i]))
            require("provenance", logprob == expected, "{}: logprob {} is {}, not {}", session, i, logprob, expected)
            true_lag = self.update - self.updates[version]
            require("staleness", true_lag <= bound, "{}: token {} is {} updates old", session, i, true_lag)
            require("staleness", lag == true_lag, "{}: token {} has lag {}, not {}", session, i, lag, true_lag)
        return in_loss

    # ---- rows

    def _check_rows(self, sequence: TrainingSequence, in_loss: list[bool], path: _Path, missing: set[int]) -> None:
        """There are T - 1 rows, each of the forward pass that `resume_routing` names.

        Args:
            missing: positions whose rows an engine did not give.
        """
        assert sequence.routed_experts is not None
        rows, contexts = sequence.routed_experts.tolist(), model.contexts(sequence.token_ids.tolist())
        count = sum(run.rows for run in sequence.row_runs)
        require("rows", count == len(rows) - 1, "{}: {} rows for {} tokens", path.session, count, len(rows))
        require("rows", rows[-1] == NO_ROW, "{}: the last token has a row", path.session)
        answers, versions = path.rollout.answers, path.versions
        match self.config.rollout.resume_routing:
            case "append" | "force":
                owners = [next((v for v in versions[p + 1 :] if v >= 0), -1) for p in range(len(rows) - 1)]
                candidates = [([owners], True)]
            case "replace":
                missing = set()
                candidates = [(self._passes(answers, versions, at=len(versions) - 1), True)]
            case "split":
                ends = _ends(in_loss, {len(answer.request.token_ids) for answer in answers})
                missing = set()
                candidates = [(self._passes(answers, versions, at=at), False) for at in ends]
        for passes, ordered in candidates:
            wrong = [self._differs(rows, contexts, owners, missing, ordered) for owners in passes]
            require("rows", None in wrong, "{}: rows {} are of no forward pass that gave them", path.session, wrong)

    def _passes(self, answers: Sequence[Answered], versions: list[int], *, at: int) -> list[list[int]]:
        """Versions that gave rows 0..at-1 of the answer in which the token at `at` was sampled; one list per answer
        that it may have been."""
        numbered: list[tuple[list[int], list[int]]] = []
        for answer in answers:
            sampled = [segment.weights.version for segment in answer.segments for _ in range(len(segment))]
            start = len(answer.request.token_ids)
            inside = sampled[: at - start + 1]
            if not (start <= at < start + len(sampled)) or versions[start : at + 1] != inside:
                continue
            number = [int(part) for part in answer.request.request_id.rpartition("#")[2].rstrip(".").split("-")]
            numbered.append((number, [inside[max(0, p + 1 - start)] for p in range(at)]))
        newest = max((number for number, _ in numbered), default=None)
        return [owners for number, owners in numbered if number == newest]

    def _differs(
        self, rows: list[Any], contexts: list[int], owners: list[int], missing: set[int], ordered: bool
    ) -> int | None:
        """First position whose row is not that of its owner."""
        for p, owner in enumerate(owners):
            if p in missing and rows[p] == NO_ROW:
                continue
            expected = self.weights[owner].row(contexts[p])
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
