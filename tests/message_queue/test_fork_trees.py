"""Random trees of paths against a slow, obvious model of the merge rule, in memory and from the content store.

Every sampled token has a unique id, so that a token in two losses, in none or at another position is seen.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from async_rl.rollout.content.format import RolloutRecord
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.recorded import RecordedTrajectory
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from tests.async_rl.rollout.test_content import flipped
from tests.helpers.dense import loss_mask, row_versions
from tests.helpers.groups import sets_of, support_of
from tests.helpers.stored import RUN, read

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


def segment_of(tokens, version, rows):
    return TokenOutput(
        token_ids=np.array([t for t, _ in tokens], np.int32),
        logprobs=np.array([p for _, p in tokens], np.float32),
        routed_experts=rows,
        weights=WeightVersion(version, f"digest-{version}"),
        stop_reason=StopReason.ABORT,
        replica="replica-0",
    )


MODES = ("append", "force", "replace", "split")


@dataclass
class ModelPath:
    """Turns of a path, each (observed ids, arguments of `Model.extend` for each segment)."""

    parent: int | None
    shared: int
    turns: list[tuple[list[int], list[tuple]]] = field(default_factory=list)

    def model(self, mode):
        """The merge rule on the shared turns, and from there on a separate sequence: its parts, ids, and rows."""
        made, own = Model(mode), 0
        for number, (observed, segments) in enumerate(self.turns):
            if number == self.shared:
                made.sequences, own = made.sequences[-1:], len(made.tokens)
                made.sequences[0].loss.clear()
            made.tokens += [(token, 0.0, -1) for token in observed]
            for segment in segments:
                made.extend(*segment)
        sequences = [s for s in made.sequences if s.loss] if len(self.turns) > self.shared else []
        return sequences, [token for token, _, _ in made.tokens], own, made.rows


class Tree:
    """A recorded trajectory that grows, with its model and all its records."""

    def __init__(self, trajectory, *, handout, paths, fresh):
        self.records = []
        self.trajectory = RecordedTrajectory(trajectory, record=self.record)
        self.handout, self.paths, self.fresh = handout, paths, fresh
        self.touched = set()  # paths that have a record of this hand-out

    @classmethod
    def started(cls, *, mode, routing, fresh):
        made = Trajectory(routing=SPEC if routing else None, resume_routing=mode)
        return cls(made, handout=0, paths={0: ModelPath(None, 0)}, fresh=fresh)

    def record(self, at, what, path):
        self.touched.add(path)
        self.records.append(RolloutRecord(group=0, trajectory=0, path=path, handout=self.handout, at=at, what=what))

    def real(self, path):
        (found,) = [p for p in self.trajectory.paths if p.path == path]
        return found

    def observe(self, path, tokens):
        observed = [next(self.fresh) for _ in range(tokens)]
        self.real(path).observe(np.array(observed, np.int32))
        self.paths[path].turns.append((observed, []))

    def extend(self, data, path, *, version, fewest=0, may_lack=True):
        real = self.real(path)
        logprobs = data.draw(st.lists(LOGPROBS, min_size=fewest, max_size=3))
        tokens = [(next(self.fresh), logprob) for logprob in logprobs]
        first, rows, unavailable = self.draw_rows(data, path, len(tokens), may_lack=may_lack)
        without = not self.trajectory.routing or (not tokens and data.draw(st.booleans()))
        segment = segment_of(tokens, version, None if without else routed(first, rows, unavailable))
        if data.draw(st.booleans()):
            segment = replace(segment, support=support_of([[token, token + 1] for token, _ in tokens]))
        real.extend(segment)
        drawn = (0, [], 0) if without else (first, rows, unavailable)
        self.paths[path].turns[-1][1].append((tokens, version, *drawn))

    def draw_rows(self, data, path, tokens, *, may_lack):
        """Position of the first row, rows, and how many before them no engine can give."""
        real = self.real(path)
        end, held = len(real) + tokens - 1, min(len(real) + tokens - 1, real.num_rows)
        first = data.draw(st.integers(0, held))
        if not tokens:  # of a prefill that ended
            end = data.draw(st.integers(first, end))
        lacking = data.draw(st.integers(0, end - first)) if tokens and may_lack else 0
        first += lacking
        rows = data.draw(st.lists(ROW, min_size=end - first, max_size=end - first))
        if data.draw(st.booleans()):  # the same experts as before, in another order
            known = self.paths[path].model(self.trajectory.resume_routing)[-1][first:end]
            for at, row in enumerate(known):
                if row is not None:
                    rows[at] = tuple(tuple(data.draw(st.permutations(experts))) for experts in row[0])
        return first, rows, lacking

    def fork(self, path, turns):
        made = self.real(path).fork(turns=turns)
        shared = [(observed, [*segments]) for observed, segments in self.paths[path].turns[:turns]]
        assert made.path not in self.paths
        self.paths[made.path] = ModelPath(path, turns, shared)

    def check(self):
        check(self.trajectory, self.paths)


def check(root, paths):
    """A trajectory is the tree of the model: structure, tokens, rows, and each sampled token in one loss."""
    assert [path.path for path in root.paths] == list(paths)
    expected, losses, sampled = [], {}, {}
    for path, model in zip(root.paths, paths.values(), strict=True):
        sequences, ids, own, rows = model.model(root.resume_routing)
        assert (path.parent, path.shared_turns) == (model.parent, model.shared)
        assert path.token_ids().tolist() == ids and len(path) == len(ids)
        assert path.shared_tokens == sum(len(o) + sum(len(s[0]) for s in g) for o, g in model.turns[: model.shared])
        assert path.shared_tokens == own or not sequences
        if root.routing:
            assert (path.num_rows, path._rows.num_unavailable) == (len(rows), rows.count(None))
        expected += [(path, ids, s) for s in sequences]
        for tokens, version, *_ in (s for _, segments in model.turns for s in segments):
            sampled |= {token: (logprob, version) for token, logprob in tokens}
    made = root.sequences()
    assert root.num_sampled == len(sampled) == sum(len(s) for s in root.segments)
    if not sampled:
        assert [(s.path, len(s), s.runs) for s in made] == [(0, len(root), ())]
        return
    assert len(made) == len(expected)
    for sequence, (path, ids, model) in zip(made, expected, strict=True):
        at = np.flatnonzero(loss_mask(sequence)).tolist()
        assert sequence.path == path.path and set(at) == model.loss
        length = max(model.loss) + 1
        assert sequence.token_ids.tolist() == ids[:length]
        check_rows(sequence, model.rows[:length] if root.routing else None)
        versions = [run.version for run in sequence.runs for _ in range(run.tokens)]
        kept = sets_of(sequence.support) or [[]] * length
        for position, logprob, version in zip(at, sequence.logprobs.tolist(), versions, strict=True):
            token = ids[position]
            assert token not in losses, "in two losses"
            losses[token] = logprob, version
            assert kept[position] in ([], [token, token + 1])
    assert losses == sampled


def check_rows(sequence, rows):
    if rows is None:
        assert sequence.rows is None and sequence.row_runs == ()
        return
    rows = [*rows, *[None] * (len(sequence) - len(rows))]
    assert row_versions(sequence).tolist() == [-1 if r is None else r[1] for r in rows]
    for found, row in zip(sequence.routed_experts.tolist(), rows, strict=True):
        assert as_sets(found) == ((frozenset([-1]),) * 2 if row is None else as_sets(row[0]))


def content(root):
    """Structure and content of a tree as plain values."""
    return [
        (
            (path.path, path.parent, path.shared_turns, path.shared_tokens, path.num_rows, path.unsure_call),
            [(t.observation.tolist(), [s.token_ids.tolist() for s in t.segments]) for t in path.turns],
            [(s.path, s.token_ids.tolist(), s.runs, s.shared, s.row_runs, dense(s)) for s in path.sequences()],
            (path.stop_reason, path.reward, path.rewards, path.agent),
        )
        for path in root.paths
    ]


def dense(sequence):
    rows = None if sequence.rows is None else sequence.rows.tolist()
    return sequence.logprobs.tolist(), rows, sets_of(sequence.support)


def read_back(folder, like):
    """The tree in a folder; nothing is left out with a note."""
    found = read(folder, 0, routing=like.routing, resume_routing=like.resume_routing)
    assert found.notes == []
    return found.groups[0].trajectories[0]


async def write(folder, name, records):
    writer = await ContentWriter.open(folder, name=name, run=RUN, fsync=False)
    await writer.append(records)
    await writer.close()


class Schedule(RuleBasedStateMachine):
    """One tree that grows on all its paths."""

    def __init__(self, mode, routing):
        super().__init__()
        self.tree = Tree.started(mode=mode, routing=routing, fresh=iter(range(1000)))
        self.version = 0
        self.contents = [content(self.tree.trajectory)]  # after so many records
        self.tree.observe(0, 2)
        self.note()

    def note(self):
        self.contents.append(content(self.tree.trajectory))
        assert len(self.contents) == 1 + len(self.tree.records)

    def any_path(self, data):
        return data.draw(st.sampled_from(list(self.tree.paths)))

    @rule(data=st.data(), tokens=st.integers(0, 3))
    def observe(self, data, tokens):
        path = self.any_path(data)
        self.tree.observe(path, tokens if self.tree.paths[path].turns else 1 + tokens)
        self.note()

    @rule(data=st.data(), update=st.booleans())
    def extend(self, data, update):
        """Also after an abort, or without a token."""
        self.version += update
        path = self.any_path(data)
        if len(self.tree.paths[path].turns) == self.tree.paths[path].shared:
            self.tree.observe(path, 1)
            self.note()
        self.tree.extend(data, path, version=self.version)
        self.note()

    @precondition(lambda self: len(self.tree.paths) < 6)
    @rule(data=st.data())
    def fork(self, data):
        path = self.any_path(data)
        self.tree.fork(path, data.draw(st.integers(0, len(self.tree.paths[path].turns))))
        self.note()

    @rule(data=st.data())
    def call(self, data):
        """A call outside, whose result is observed later."""
        real = self.tree.real(self.any_path(data))
        asyncio.run(real.start_call("deploy"))
        real.unsure_call = "deploy"  # as a restart finds it
        self.note()
        real.unsure_call = None
        real.observe(np.zeros(1, np.int32))
        self.tree.paths[real.path].turns.append(([0], []))
        self.note()

    @invariant()
    def the_tree_is_that_of_the_model(self):
        self.tree.check()

    def teardown(self):
        """A kill after any record leaves the tree as it was then."""
        root = self.tree.trajectory
        for path in root.paths:
            path.agent = ("policy", "planner", "critic")[path.path % 3]
        agents = sorted({part.path.agent for part in root.sequence_parts()})
        root.close(stop_reason=StopReason.STOP, reward=1.0, rewards={agents[0]: 0.25})
        self.note()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            asyncio.run(write(folder, "a", self.tree.records))
            for number in range(len(self.tree.records), -1, -1):
                with sqlite3.connect(folder / "a.sqlite") as index:
                    index.execute("DELETE FROM records WHERE number > ?", (number,))
                assert content(read_back(folder, root)) == self.contents[number]


@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_any_tree_is_that_of_the_model_and_comes_back_after_a_kill(mode, routing):
    run_state_machine_as_test(
        lambda: Schedule(mode, routing),
        settings=settings(max_examples=40 if routing else 10, stateful_step_count=20, deadline=None),
    )


# ---- two hand-outs


def grow(data, tree, *, version, most_paths=6):
    """One step of a tree as an agent loop takes it: observations and segments have tokens."""
    path = data.draw(st.sampled_from(list(tree.paths)))
    model = tree.paths[path]
    actions = ["observe"]
    actions += ["extend"] * (2 * (len(model.turns) > model.shared))
    actions += ["fork"] * (len(tree.paths) < most_paths and bool(tree.paths[0].turns))
    match data.draw(st.sampled_from(actions)):
        case "observe":
            tree.observe(path, data.draw(st.integers(1, 2)))
        case "extend":
            tree.extend(data, path, version=version, fewest=1, may_lack=False)
        case _:
            tree.fork(path, data.draw(st.integers(0, len(model.turns))))


def shell(paths):
    return {number: ModelPath(p.parent, p.shared, [(o, [*s]) for o, s in p.turns]) for number, p in paths.items()}


async def open_writer(folder, name):
    return await ContentWriter.open(folder, name=name, run=RUN, fsync=False)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(MODES), st.booleans())
async def test_the_tree_of_a_successor_replaces_what_it_did_not_know(data, mode, routing):
    """A worker that was taken for dead writes on while its successor grows the same tree, and closes it."""
    old = Tree.started(mode=mode, routing=routing, fresh=iter(range(10_000)))
    old.observe(0, 2)
    for _ in range(data.draw(st.integers(0, 10))):
        grow(data, old, version=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = await open_writer(folder, "b"), await open_writer(folder, "a")
        await first.append(old.records)
        known = read_back(folder, old.trajectory)
        assert content(known) == content(old.trajectory)
        new = Tree(known, handout=1, paths=shell(old.paths), fresh=old.fresh)
        before = len(old.records)
        for _ in range(data.draw(st.integers(0, 8))):
            grow(data, old, version=0)
        await first.append(old.records[before:])
        for number in range(data.draw(st.integers(0, 8))):
            grow(data, new, version=1)
            await second.append(new.records[number:])
            found = {path.path: path for path in read_back(folder, old.trajectory).paths}
            for path in new.touched:
                assert found[path].token_ids().tolist() == new.real(path).token_ids().tolist()
        new.check()
        new.trajectory.close(stop_reason=StopReason.STOP, reward=1.0)
        await second.append(new.records[-1:])
        await first.close()
        await second.close()
        found = read_back(folder, old.trajectory)
        check(found, new.paths)
        assert content(found) == content(new.trajectory)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
async def test_a_damaged_record_leaves_the_tree_before_it(data, share, change):
    tree = Tree.started(mode="append", routing=True, fresh=iter(range(10_000)))
    contents = [content(tree.trajectory)]
    tree.observe(0, 2)
    contents.append(content(tree.trajectory))
    for _ in range(data.draw(st.integers(0, 12))):
        grow(data, tree, version=0)
        contents.append(content(tree.trajectory))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = await open_writer(folder, "a")
        await writer.append(tree.records)
        await writer.close()
        path = folder / "a-000001.data"
        with flipped(path, int(share * path.stat().st_size), change):
            found = read(folder, 0, routing=SPEC)
    assert content(found.groups[0].trajectories[0]) in contents[:-1]
    assert len(found.notes) == 1 and str(path) in found.notes[0]


@settings(deadline=None, max_examples=30)
@given(st.data(), st.sampled_from(MODES))
def test_a_tree_that_starts_over_is_the_second_one(data, mode):
    fresh = iter(range(10_000))
    first, second = (Tree.started(mode=mode, routing=True, fresh=fresh) for _ in range(2))
    for tree in (first, second):
        tree.observe(0, 2)
        for _ in range(data.draw(st.integers(0, 8))):
            grow(data, tree, version=0)
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(write(Path(name), "a", [*first.records, *second.records]))
        found = read_back(Path(name), second.trajectory)
        check(found, second.paths)
        assert content(found) == content(second.trajectory)
