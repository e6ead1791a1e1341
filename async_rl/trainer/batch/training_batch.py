"""A training batch: lengths and coordinates of its sequences, and their content or references to the content.

Nothing is padded or cut. The driver plans with the numbers only. A trajectory is one sequence, or several with
`resume_routing=split` or forks. If several agents are trained, the sequences of each agent in a rollout count as a
trajectory; those of an untrained agent are not in the batch. Every sampled token is in the loss of at most one
sequence. Tokens from weights older than `min_update` (staleness.policy=mask) are excluded from the loss and from
normalisation; they still serve as context.

A token is *exact* if the engine and a trainer with the weights that sampled it can differ on it by rounding only: every
position before it has a routing row, and its K/V comes from these weights over this row:
    append, replace, split   K/V of a position is at least as new as its row: every row before the token must come from
                             the weights that sampled it.
    force                    a resumed request recomputes K/V over the existing rows: the age of the rows is irrelevant.
    without rows             a resumed request recomputes K/V; both route with their live routers.
    kept K/V                 a request may read any K/V that its group left in the prefix cache. The cache is salted by
                             group, so its K/V comes from the weights of the token only if they admitted the group.
An exact token with lag 0 is *pure*.

Example: a sequence of 7 tokens with the runs (3, 2, 4) and (6, 1, 5) and the row runs (4, 4) and (2, 5) is trained at
update 5, and version v has v updates. Positions 3 and 4 have lag 1 and are exact; position 6 has lag 0. It is not
exact, because rows 0 to 3 come from version 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple, cast

import numpy as np

from async_rl.trainer.batch.advantage import Advantages, BatchRewards
from async_rl.trainer.batch.forest import Int64Array, Prefix
from message_queue.errors import AsyncRLError
from message_queue.heads import GroupHead, SequenceHead
from message_queue.tokens import Float32Array, Int32Array, StopReason
from message_queue.training_sequence import (
    BoolArray,
    Content,
    GroupContent,
    RowRun,
    SampledRun,
    TeacherScores,
    TrainingSequence,
    joined_scores,
)


class BatchError(AsyncRLError, ValueError):
    """Trajectories cannot form a batch, or their routing rows cannot be replayed; the message names the fault."""


class LossTokens(NamedTuple):
    """The n tokens in the loss of a sequence, in order of position."""

    positions: Int64Array
    """int64 [n], position in the sequence."""
    logprobs: Float32Array
    """float32 [n], behaviour logprobs."""
    lag: Int64Array
    """int64 [n], staleness in optimizer steps in the mini-batch that trains the sequence."""
    exact: BoolArray
    """bool [n], exact as defined at the top of this module."""
    teacher: TeacherScores | None
    """n scores of a teacher, those of `TeacherScores.absent` without one; None if no token of the sequences has one."""

    @property
    def pure(self) -> BoolArray:
        """bool [n], exact with lag 0."""
        return self.exact & (self.lag == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroups:
    """Groups of a batch whose rollouts are written to disk; see `async_rl.trainer.recording`."""

    train_step: int = 0
    """Train step that the batch ends with."""
    heads: Mapping[int, GroupHead] = field(default_factory=dict[int, GroupHead])
    """Index in `TrainingBatch.contents` -> head; empty if none are written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """S sequences of a batch of G groups, in the order of the groups.

    One group of three trajectories. The first has a prompt of 3 tokens; version 4 samples 2 tokens, an abort ends the
    segment, and version 5 samples 2 more (`resume_routing=split`). The second failed. The third has 4 tokens, one of
    them sampled by version 5. The advantages are 0.5 and -0.5, current_update is 5 and version v has v updates:

        index      lengths  num_loss_tokens  trajectory  advantages  informative
        (0, 0, 0)  5        2                0            0.5        True
        (0, 0, 1)  7        2                0            0.5        True
        (0, 2, 0)  4        1                1           -0.5        True

    With min_update=5 the first row has num_loss_tokens 0 and informative False.
    """

    contents: Sequence[Content]
    """[G], the content of each group or a reference to it; empty if this process does not need it."""
    index: Int64Array
    """int64 [S, 3], indices of the content: group in `contents`, trajectory in the group, sequence in the
    trajectory."""
    lengths: Int64Array
    """int64 [S], tokens."""
    num_loss_tokens: Int64Array
    """int64 [S], tokens in the loss."""
    trajectory: Int64Array
    """int64 [S], number of the trajectory in the batch; failed trajectories are not counted."""
    mini_batch: Int64Array
    """int64 [S], optimizer step of the batch that trains the sequence, from 0."""
    advantages: Float32Array
    """float32 [S], advantage of the trajectory."""
    informative: BoolArray
    """bool [S]; False if the rewards were all equal or all sampled tokens are too old: the sequence has no gradient
    except from KL and entropy."""
    current_update: int
    """Optimizer updates of the weights at the start of the batch."""
    version_updates: Mapping[int, int]
    """`param_version` -> optimizer updates of the weights."""
    min_update: int = 0
    """Tokens sampled by weights with fewer optimizer updates are not in the loss."""
    retained_kv: bool = False
    """Whether the engines keep K/V across weight updates (rollout.on_update=keep with rollout.kv=keep)."""
    temperature: float = 1.0
    """Sampling temperature of the tokens in the loss; logits are divided by it."""
    admitted_updates: Sequence[int] = ()
    """[G], optimizer updates of the weights when each group was admitted."""
    shared: Sequence[Prefix] = ()
    """[S], the longest prefix of each sequence that an earlier one has too, as its number in the batch and tokens;
    empty if they are not known. The micro-batches are planned by them; ranks compare the content itself."""
    heads: Sequence[SequenceHead] = ()
    """[S], versions that sampled the tokens of each sequence; empty if they are not known."""
    only_update: int | None = None
    """Optimizer updates of the weights whose tokens alone are in the loss; None for all. See `of_update`."""
    rewards: BatchRewards | None = None
    """Rewards of the trajectories, for advantages with a KL (loss.kl_in=reward); None if the batch has none."""
    truncated: Sequence[int] = ()
    """Numbers of the trajectories that a token limit cut (LENGTH), ascending; with several agents, of all of them."""
    recorded: RecordedGroups = field(default_factory=RecordedGroups)
    """Groups whose rollouts are written to disk."""

    def __len__(self) -> int:
        """Number of sequences S."""
        return len(self.lengths)

    @property
    def prefixes(self) -> Sequence[Prefix]:
        """`shared`, or no shared prefixes if they are not known."""
        return self.shared or [(-1, 0)] * len(self)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories that did not fail."""
        return int(self.trajectory.max()) + 1

    def content(self, group: int) -> GroupContent:
        """Content of a group that this process has fetched."""
        return cast(GroupContent, self.contents[group])

    def sequence(self, number: int) -> TrainingSequence:
        """Content of sequence `number`.

        Raises:
            BatchError: its length differs from `lengths`.
        """
        group, trajectory, at = self.index[number].tolist()
        sequence = self.content(group)[trajectory][at]
        if self.only_update is not None:
            return first_tokens(sequence, int(self.lengths[number]))
        if len(sequence) != self.lengths[number]:
            raise BatchError(
                f"sequence {at} of trajectory {trajectory} of group {group} of the batch has {len(sequence)} tokens, "
                f"but its head says {self.lengths[number]}; head and content must be of the same group"
            )
        return sequence

    def loss_tokens(self, number: int) -> LossTokens:
        """The tokens in the loss of sequence `number`; see `loss_tokens_of`."""
        return self.loss_tokens_of([number])[0]

    def loss_tokens_of(self, numbers: Sequence[int]) -> tuple[LossTokens, Int64Array]:
        """The tokens in the loss of the sequences `numbers`, one sequence after the other, and how many each has.

        Raises:
            BatchError: a content has another length, or a token was sampled by a version that was not published.
        """
        sequences = [self.sequence(number) for number in numbers]
        now = self.current_update + self.mini_batch[list(numbers)]
        place, starts, tokens, updates = (
            np.array(
                [(i, r.start, r.tokens, self._updates(r.version)) for i, s in enumerate(sequences) for r in s.runs],
                np.int64,
            )
            .reshape(-1, 4)
            .T
        )
        of, first = place.repeat(tokens), tokens.cumsum() - tokens
        positions = np.arange(tokens.sum()) + (starts - first).repeat(tokens)
        lag, kept = (now[place] - updates).repeat(tokens), (updates >= self.min_update).repeat(tokens)
        if self.only_update is not None:
            kept &= (updates == self.only_update).repeat(tokens)
        ends = np.array(
            [self._end_of_exact(numbers[i], sequences[i], update) for i, update in zip(place, updates, strict=True)],
            np.int64,
        )
        exact = positions <= ends.repeat(tokens)
        logprobs = np.concatenate([np.zeros(0, np.float32), *(sequence.logprobs for sequence in sequences)])
        counts = np.bincount(of[kept], minlength=len(sequences))
        teacher = joined_scores(sequences)
        taught = None if teacher is None else teacher.take(kept)
        return LossTokens(positions[kept], logprobs[kept], lag[kept], exact[kept], taught), counts

    def of_update(self, update: int) -> TrainingBatch:
        """The batch with the tokens alone that weights of `update` optimizer updates sampled.

        A sequence ends with the last of these; without one it keeps its length.
        """
        lengths, counts = self.lengths.copy(), np.zeros(len(self), np.int64)
        for number, head in enumerate(self.heads):
            for (version, tokens), end in zip(head.spans, head.ends, strict=True):
                if self._updates(version) == update >= self.min_update and tokens:
                    counts[number] += tokens
                    lengths[number] = end
        return replace(self, lengths=lengths, num_loss_tokens=counts, only_update=update, rewards=None)

    @property
    def sampled_at(self) -> list[int]:
        """Optimizer updates of the weights that sampled the tokens in the loss, newest first."""
        found = {self._updates(version) for head in self.heads for version, tokens in head.spans if tokens}
        return sorted((update for update in found if update >= self.min_update), reverse=True)

    def _end_of_exact(self, number: int, sequence: TrainingSequence, update: int) -> int:
        """The last position at which a token that weights of `update` updates sampled is exact; -1 for none."""
        if self.retained_kv and self._admitted_update(number) != update:
            return -1
        if sequence.rows is None:
            return len(sequence)
        any_age = sequence.recomputed and not self.retained_kv
        of_token = takewhile(
            lambda run: run.version >= 0 and (any_age or self._updates(run.version) == update), sequence.row_runs
        )
        return sum(run.rows for run in of_token)

    def _admitted_update(self, number: int) -> int:
        return self.admitted_updates[self.index[number, 0]]

    def _updates(self, version: int) -> int:
        return _updates_of(version, self.version_updates)


def training_batch(
    heads: Sequence[GroupHead],
    contents: Sequence[Content],
    *,
    advantages: Advantages,
    current_update: int,
    version_updates: Mapping[int, int],
    min_update: int = 0,
    retained_kv: bool = False,
    temperature: float = 1.0,
    mini_batches: Mapping[int, int] | None = None,
    rewards: BatchRewards | None = None,
) -> TrainingBatch:
    """Build the input of a train step from heads. Failed rollouts are left out; `TrainingBatch` has an example.

    Args:
        heads: [G].
        contents: [G], content of each group or a reference to it.
        advantages: one per trajectory that did not fail, in the order of `batch_rewards`.
        current_update, version_updates, min_update, retained_kv, temperature: see TrainingBatch.
        mini_batches: group id -> mini-batch, from 0; None if the batch is one optimizer step.
        rewards: see TrainingBatch.

    Raises:
        BatchError: all trajectories failed, the number of advantages differs, a token was sampled by a version that
            was not published, or by weights newer than the current ones.
    """
    places = _trained(heads)
    sequences = [heads[g].trajectories[t].sequences[at] for g, t, at, _ in places]
    table = np.array(places, np.int64)
    index, of = table[:, :3], table[:, 3]
    if of[-1] + 1 != len(advantages.values):
        raise BatchError(f"{of[-1] + 1} trajectories, but {len(advantages.values)} advantages")
    of_group = [0 if mini_batches is None else mini_batches[head.group] for head in heads]
    mini_batch = np.array(of_group, np.int64)[index[:, 0]]
    tokens = [
        _young_tokens(sequence, version_updates, min_update=min_update, now=current_update + number)
        for sequence, number in zip(sequences, mini_batch.tolist(), strict=True)
    ]
    is_left = [young > 0 or not sequence.spans for young, sequence in zip(tokens, sequences, strict=True)]
    return TrainingBatch(
        contents=contents,
        index=index,
        lengths=np.array([sequence.length for sequence in sequences], np.int64),
        num_loss_tokens=np.array(tokens, np.int64),
        trajectory=of,
        mini_batch=mini_batch,
        advantages=advantages.values[of],
        informative=advantages.informative[of] & is_left,
        current_update=current_update,
        version_updates=version_updates,
        min_update=min_update,
        retained_kv=retained_kv,
        temperature=temperature,
        admitted_updates=[head.admitted_update for head in heads],
        shared=_prefixes(heads, of_group=index[:, 0]),
        heads=sequences,
        rewards=rewards,
        truncated=sorted({n for g, t, _, n in places if heads[g].trajectories[t].stop_reason is StopReason.LENGTH}),
    )


def _trained(heads: Sequence[GroupHead]) -> list[tuple[int, int, int, int]]:
    """Group, trajectory and sequence as in `TrainingBatch.index`, and `trajectory`, of each sequence that is trained.

    Raises:
        BatchError: there are none.
    """
    of_agents = [
        (g, t, of_agent)
        for g, head in enumerate(heads)
        for t, trajectory in enumerate(head.trajectories)
        for of_agent in trajectory.trained.values()
    ]
    if not of_agents:
        raise BatchError("the batch has no trajectories")
    return [(g, t, at, number) for number, (g, t, of_agent) in enumerate(of_agents) for at in of_agent]


def _prefixes(heads: Sequence[GroupHead], *, of_group: Int64Array) -> list[Prefix]:
    """Prefixes of all sequences, with numbers in the batch; none are shared in a group whose head has no prefixes."""
    found: list[Prefix] = []
    for head, count in zip(heads, np.bincount(of_group, minlength=len(heads)).tolist(), strict=True):
        first = len(found)
        own = head.prefixes if len(head.prefixes) == count else [(-1, 0)] * count
        found += [(first + number if number >= 0 else -1, tokens) for number, tokens in own]
    return found


def first_tokens(sequence: TrainingSequence, length: int) -> TrainingSequence:
    """The first `length` tokens of a sequence, without scores; they end before or after a sampled run, not in it."""

    def before(runs: Sequence[SampledRun]) -> tuple[SampledRun, ...]:
        return tuple(run for run in runs if run.start < length)

    runs, starts = before(sequence.runs), np.cumsum([0, *(run.rows for run in sequence.row_runs)]).tolist()
    return replace(
        sequence,
        token_ids=sequence.token_ids[:length],
        runs=runs,
        logprobs=sequence.logprobs[: sum(run.tokens for run in runs)],
        rows=None if sequence.rows is None else sequence.rows[:length],
        row_runs=tuple(
            RowRun(min(run.rows, length - start), run.version)
            for run, start in zip(sequence.row_runs, starts, strict=False)
            if start < length
        ),
        support=None if sequence.support is None else sequence.support.take(np.arange(length)),
        shared=before(sequence.shared),
        teacher=None,
    )


def supervised_batch(examples: Sequence[tuple[Int32Array, BoolArray]]) -> TrainingBatch:
    """A batch of examples (token ids int32 [t], loss mask bool [t]) for `TrainerRank.train_supervised`.

    Raises:
        BatchError: there are no examples, an example is empty, or its mask has another length than its tokens.
    """
    if not examples:
        raise BatchError("the supervised batch has no examples")
    for number, (ids, mask) in enumerate(examples):
        if len(ids) != len(mask) or not len(ids):
            raise BatchError(
                f"example {number} has {len(ids)} tokens and a loss mask of {len(mask)}; both lengths must be equal "
                "and >= 1"
            )
    count, tokens = len(examples), np.array([mask.sum() for _, mask in examples], np.int64)
    sequences = [
        TrainingSequence(
            token_ids=ids,
            runs=_runs(mask),
            logprobs=np.zeros(mask.sum(), np.float32),
            rows=None,
            row_runs=(),
        )
        for ids, mask in examples
    ]
    nothing = np.zeros(count, np.int64)
    return TrainingBatch(
        contents=[tuple((sequence,) for sequence in sequences)],
        index=np.stack([nothing, np.arange(count), nothing], axis=1),
        lengths=np.array([len(ids) for ids, _ in examples], np.int64),
        num_loss_tokens=tokens,
        trajectory=np.arange(count),
        mini_batch=nothing,
        advantages=np.zeros(count, np.float32),
        informative=np.ones(count, np.bool_),
        current_update=0,
        version_updates={0: 0},
        admitted_updates=[0],
    )


def _runs(mask: BoolArray) -> tuple[SampledRun, ...]:
    """Runs of tokens in the loss, as of version 0."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return tuple(SampledRun(start, end - start, 0) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _young_tokens(sequence: SequenceHead, version_updates: Mapping[int, int], *, min_update: int, now: int) -> int:
    """Number of tokens in the loss: sampled by weights with at least `min_update` optimizer updates.

    Spans (3, 4), (4, 2) with version v = v updates and min_update=4: 2.
    """
    young = 0
    for version, tokens in sequence.spans:
        updates = _updates_of(version, version_updates)
        if updates > now:
            raise BatchError(
                f"param_version {version} has {updates} optimizer updates, more than current_update={now}; a batch "
                "cannot be sampled by newer weights"
            )
        young += tokens if updates >= min_update else 0
    return young


def _updates_of(version: int, version_updates: Mapping[int, int]) -> int:
    if version not in version_updates:
        raise BatchError(f"param_version {version} sampled tokens, but only {sorted(version_updates)} were published")
    return version_updates[version]
