"""Random schedules of turns, segments and updates of a trajectory against a slow, obvious model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions, row_versions
from tests.helpers.stored import stored

SPEC = RoutingSpec(layers=(0, 2), num_experts=5, top_k=2)
SETS = st.permutations(range(SPEC.num_experts)).map(lambda p: tuple(p[: SPEC.top_k]))
ROW = st.tuples(SETS, SETS)  # the experts of each layer, in the order of the engine
LOGPROBS = st.sampled_from([-0.25, -0.5, 0.0])

Row = tuple[tuple[int, ...], ...]


@dataclass
class ModelSequence:
    """rows: (row, version) for positions 0, 1, ...; None if no engine could give it. loss: positions."""

    rows: list[tuple[Row, int] | None] = field(default_factory=list)
    loss: set[int] = field(default_factory=set)


@dataclass
class Model:
    """The merge rule on lists, a position at a time."""

    mode: str
    tokens: list[tuple[int, float, int]] = field(default_factory=list)  # (id, logprob, version), -1 if not sampled
    sequences: list[ModelSequence] = field(default_factory=lambda: [ModelSequence()])

    @property
    def rows(self):
        return self.sequences[-1].rows

    def extend(self, tokens, version, first, rows, unavailable):
        if tokens or self.mode in ("append", "force"):
            self.take_rows(version, first, rows, unavailable)
        for token, logprob in tokens:
            self.sequences[-1].loss.add(len(self.tokens))
            self.tokens.append((token, logprob, version))

    def take_rows(self, version, first, rows, unavailable):
        if self.mode == "replace":
            del self.rows[first:]
        if self.mode == "split" and any(
            self.rows[p] is None or as_sets(self.rows[p][0]) != as_sets(row)
            for p, row in enumerate(rows, first)
            if p < len(self.rows)
        ):
            self.sequences.append(ModelSequence(rows=self.rows[: first - unavailable]))
        while len(self.rows) < first:
            self.rows.append(None)
        for position, row in enumerate(rows, first):
            if position == len(self.rows):
                self.rows.append((row, version))


def as_sets(row: Row) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(experts) for experts in row)


def routed(first, rows, unavailable):
    experts = np.array(rows, np.uint8).reshape(len(rows), *SPEC.row_shape)
    return RoutedExperts(first_position=first, experts=experts, unavailable=unavailable)


def segment_of(tokens, version, rows, *, replica="replica-0"):
    return TokenOutput(
        token_ids=np.array([t for t, _ in tokens], np.int32),
        logprobs=np.array([p for _, p in tokens], np.float32),
        routed_experts=rows,
        weights=WeightVersion(version, f"digest-{version}"),
        stop_reason=StopReason.ABORT,
        replica=replica,
    )


class Schedule(RuleBasedStateMachine):
    """One trajectory, its model, and the weights that the engines serve."""

    def __init__(self, mode):
        super().__init__()
        self.trajectory = Trajectory(routing=SPEC, resume_routing=mode)
        self.model = Model(mode)
        self.version = 0
        self.add_turn(2)

    def add_turn(self, tokens):
        ids = np.arange(tokens, dtype=np.int32) + 50
        self.trajectory.observe(ids)
        self.model.tokens += [(token, 0.0, -1) for token in ids.tolist()]

    def add_segment(self, data, tokens, *, first, end, unavailable):
        """A segment whose rows repeat existing ones at some positions, with the experts in another order or not."""
        drawn = data.draw(st.lists(ROW, min_size=end - first, max_size=end - first))
        held = dict(enumerate(self.model.rows))
        for at, position in enumerate(range(first, end)):
            known = held.get(position)
            if known is not None and data.draw(st.booleans()):
                drawn[at] = tuple(tuple(data.draw(st.permutations(experts))) for experts in known[0])
        segment = segment_of(tokens, self.version, routed(first, drawn, unavailable))
        self.trajectory.extend(segment)
        self.model.extend(tokens, self.version, first, drawn, unavailable)

    def some_tokens(self, data, smallest=1):
        return data.draw(st.lists(st.tuples(st.integers(0, 9), LOGPROBS), min_size=smallest, max_size=3))

    # ---- what happens

    @rule(tokens=st.integers(0, 3))
    def turn(self, tokens):
        """A tool reply or a user message, maybe empty."""
        self.add_turn(tokens)

    @rule()
    def update(self):
        """New weights while nothing is in flight: cached rows are recomputed, maybe over other experts."""
        self.version += 1

    @rule(data=st.data(), spans=st.integers(1, 3))
    def decode(self, data, spans):
        """A request as the decoder makes it; in-flight updates cut it into spans."""
        keeps_held = self.model.mode in ("append", "force")
        first = len(self.model.rows) if keeps_held else 0
        for span in range(spans):
            self.version += span > 0
            tokens = self.some_tokens(data)
            end = len(self.model.tokens) + len(tokens) - 1
            self.add_segment(data, tokens, first=first, end=end, unavailable=0)
            first = end

    @rule(data=st.data())
    def retract(self, data):
        """The engine recomputes rows that it gave before, from any position on."""
        tokens = self.some_tokens(data)
        end = len(self.model.tokens) + len(tokens) - 1
        first = data.draw(st.integers(0, len(self.model.rows)))
        self.add_segment(data, tokens, first=first, end=end, unavailable=0)

    @rule(data=st.data())
    def decode_with_rows_unavailable(self, data):
        """The engine cannot give the rows of a prefix; it may be longer than the existing rows."""
        tokens = self.some_tokens(data)
        end = len(self.model.tokens) + len(tokens) - 1
        first = data.draw(st.integers(0, end))
        least = max(0, first - len(self.model.rows))
        self.add_segment(data, tokens, first=first, end=end, unavailable=data.draw(st.integers(least, first)))

    @rule(data=st.data())
    def abort_before_the_first_token(self, data):
        """A segment without tokens; it may bring rows of a prefill that ended."""
        if data.draw(st.booleans()):
            self.trajectory.extend(segment_of([], self.version, None))
            return
        last = len(self.model.tokens) - 1
        first = data.draw(st.integers(0, min(last, len(self.model.rows))))
        self.add_segment(data, [], first=first, end=data.draw(st.integers(first, last)), unavailable=0)

    @rule()
    def write_and_read_back(self):
        self.trajectory = asyncio.run(stored(self.trajectory))

    @precondition(lambda self: len(self.model.tokens) > 40)
    @rule()
    def start_over(self):
        self.__init__(self.model.mode)

    # ---- what holds

    @invariant()
    def tokens_and_logprobs_are_those_of_the_model(self):
        ids, logprobs, versions = zip(*self.model.tokens, strict=True)
        assert self.trajectory.token_ids().tolist() == list(ids)
        assert behaviour_logprobs(self.trajectory).tolist() == list(logprobs)
        assert param_versions(self.trajectory).tolist() == list(versions)
        assert len(self.trajectory) == len(ids)
        assert self.trajectory.num_rows == len(self.model.rows)
        assert self.trajectory._rows.num_unavailable == self.model.rows.count(None)

    @invariant()
    def training_sequences_are_those_of_the_model(self):
        made = self.trajectory.sequences()
        assert len(made) == len(self.model.sequences)
        covered = np.zeros(len(self.trajectory), int)
        for sequence, expected in zip(made, self.model.sequences, strict=True):
            assert len(sequence) == (max(expected.loss) + 1 if expected.loss else len(self.trajectory))
            assert set(np.flatnonzero(loss_mask(sequence)).tolist()) == expected.loss
            covered[: len(sequence)] += loss_mask(sequence)
            rows = [*expected.rows, *[None] * len(sequence)][: len(sequence)]
            assert row_versions(sequence).tolist() == [-1 if r is None else r[1] for r in rows]
            for found, row in zip(sequence.routed_experts.tolist(), rows, strict=True):
                assert as_sets(found) == ((frozenset([-1]),) * 2 if row is None else as_sets(row[0]))
            self.aligned(sequence)
        assert np.array_equal(covered, loss_mask(self.trajectory))

    def aligned(self, sequence):
        ids, logprobs, versions = (np.array(column) for column in zip(*self.model.tokens[: len(sequence)], strict=True))
        assert np.array_equal(sequence.token_ids, ids)
        assert np.array_equal(behaviour_logprobs(sequence), np.where(loss_mask(sequence), logprobs, 0))
        assert np.array_equal(param_versions(sequence), np.where(loss_mask(sequence), versions, -1))


@pytest.mark.parametrize("mode", ["append", "force", "replace", "split"])
def test_any_schedule_gives_the_sequences_of_the_model(mode):
    run_state_machine_as_test(
        lambda: Schedule(mode), settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )
