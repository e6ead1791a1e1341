"""Content store: written trajectories come back exactly, also after a kill and next to damage."""

import asyncio
import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.rollout.content import writer as content
from async_rl.rollout.content.format import FORMAT, CallStarted, RolloutRecord
from async_rl.rollout.content.reader import remove_settled
from async_rl.rollout.content.writer import ContentWriter
from message_queue.errors import (
    ContractError,
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalMismatch,
    JournalUnwritable,
)
from message_queue.tokens import RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from tests.helpers.dense import behaviour_logprobs, loss_mask, param_versions, row_versions
from tests.helpers.groups import SPEC, routed, segment, sets_of, support_of, trajectory
from tests.helpers.stored import RUN, read, records_of, stored

WIDE = RoutingSpec(layers=(2,), num_experts=384, top_k=3)


FIELDS = ("agent", "reward", "rewards", "stop_reason", "info", "num_rows", "routing", "closed", "resume_routing")


def same_trajectory(a: Trajectory, b: Trajectory):
    """Fails if any field or array of two trajectories differs."""
    assert [t.observation.tolist() for t in a.turns] == [t.observation.tolist() for t in b.turns]
    assert [len(t.segments) for t in a.turns] == [len(t.segments) for t in b.turns]
    for one, other in zip(a.segments, b.segments, strict=True):
        assert (one.weights, one.stop_reason, one.replica) == (other.weights, other.stop_reason, other.replica)
        assert one.token_ids.dtype == other.token_ids.dtype
        assert sets_of(one.support) == sets_of(other.support)
    for array in (Trajectory.token_ids, param_versions, behaviour_logprobs):
        one, other = array(a), array(b)
        assert one.dtype == other.dtype and np.array_equal(one, other)
    assert [getattr(a, name) for name in FIELDS] == [getattr(b, name) for name in FIELDS]
    for one, other in zip(a.sequences(), b.sequences(), strict=True):
        assert loss_mask(one).tolist() == loss_mask(other).tolist()
        assert row_versions(one).tolist() == row_versions(other).tolist()
        assert np.array_equal(one.routed_experts, other.routed_experts)
        assert sets_of(one.support) == sets_of(other.support)


async def open_writer(directory, name="a", *, fsync=False):
    return await ContentWriter.open(directory, name=name, run=RUN, fsync=fsync)


async def write(directory, records, name="a", *, at_once=1):
    """Write records by a separate writer, `at_once` in a call."""
    writer = await open_writer(directory, name)
    for start in range(0, len(records), at_once):
        await writer.append(records[start : start + at_once])
    await writer.close()


def several(*, segments=4):
    """Trajectory 0 of `segments` segments of 3 tokens each, closed."""
    return trajectory(*(segment(3, version=v) for v in range(segments)), prompt=2)


def rebuilt(records):
    """The trajectory that records were appended to."""
    made = Trajectory(routing=None)
    for record in records:
        match record.what:
            case TokenOutput():
                made.extend(record.what)
            case np.ndarray():
                made.observe(record.what)
            case end:
                made.close(stop_reason=end.stop_reason, reward=end.reward, info=dict(end.info))
    return made


def call(at, text="deploy"):
    return RolloutRecord(group=0, trajectory=0, handout=0, at=at, what=CallStarted(text))


def files(directory, pattern="*"):
    return sorted(file.name for file in directory.glob(pattern) if not file.name.endswith("-journal"))


LOGPROBS = np.array([-0.0, -(2.0**60), -(2.0**-126)], np.float32)
TEXT, NUMBER = "\u2028", 2**31 - 1


@pytest.mark.parametrize("spec", [SPEC, WIDE, None])
@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
async def test_content_of_a_trajectory_comes_back_exactly(spec, resume_routing):
    """`test_fork_trees` has trees at random."""
    sent = Trajectory(routing=spec, resume_routing=resume_routing)
    sent.observe(np.array([NUMBER, 0, 1], np.int32))
    for version, first in ((2, 0), (3, 4)):
        rows = None if spec is None else routed(first, 5 if version == 2 else 8, spec=spec, unavailable=0)
        part = replace(segment(3), token_ids=np.full(3, NUMBER, np.int32), logprobs=LOGPROBS, routed_experts=rows)
        sent.extend(replace(part, weights=WeightVersion(version, TEXT), support=support_of([[], [NUMBER], [1, 0]])))
    sent.observe(np.zeros(0, np.int32))
    sent.extend(segment(0, stop_reason=StopReason.ABORT, replica=""))
    sent.close(stop_reason=StopReason.LENGTH, reward=-0.0, info={TEXT: 1e300, "": -9.0})
    same_trajectory(sent, await stored(sent))


async def test_content_of_groups_appended_in_turn_comes_back(tmp_path):
    made = {(g, n): several(segments=g + n + 1) for g in range(3) for n in range(2)}
    writer = await open_writer(tmp_path)

    async def roll(stream):
        for record in stream:
            await writer.append([record])

    await asyncio.gather(*(roll(records_of(t, group=g, number=n)) for (g, n), t in made.items()))
    await writer.close()
    found = read(tmp_path, 0, 1, 2, trajectories=1)
    assert found.notes == []
    for group in range(3):
        got = found.groups[group]
        assert [got.prompt, got.admitted_version, got.admitted_update] == [10 * group + 1, group + 2, group + 3]
        assert len(got.trajectories) == 2, "more than were asked for"
        for number, one in enumerate(got.trajectories):
            same_trajectory(made[group, number], one)


@pytest.mark.parametrize("forget", [False, True])
async def test_content_of_an_append_that_waits_is_written_when_cancelled_and_can_be_forgotten(tmp_path, forget):
    writer = await open_writer(tmp_path)
    task = asyncio.create_task(writer.append(records_of(several())))
    await asyncio.sleep(0)
    if forget:
        await writer.forget([0])
    else:
        task.cancel()
    await writer.close()
    await asyncio.wait({task})
    assert task.cancelled() is not forget
    same_trajectory(Trajectory(routing=None) if forget else several(), read(tmp_path, 0).groups[0].trajectories[0])


async def test_content_of_an_unknown_group_and_of_a_writer_killed_while_it_opened_is_empty(tmp_path):
    await write(tmp_path, records_of(several()))
    (tmp_path / "b.sqlite").touch()
    found = read(tmp_path, 7, trajectories=3)
    assert found.notes == [] and [len(t) for t in found.groups[7].trajectories] == [0, 0, 0]
    assert read(tmp_path / "absent", 7).groups[7].trajectories[0].turns == []
    remove_settled(tmp_path, {0}, keep=())
    assert files(tmp_path) == ["a-000001.data", "a.sqlite"]


async def test_content_names_a_tool_call_without_a_result(tmp_path):
    first, *rest = records_of(several(), handout=1)
    await write(tmp_path, [replace(first, handout=0), call(2)], "a")
    found = read(tmp_path, 0)
    assert found.groups[0].trajectories[0].unsure_call == "deploy"
    await write(tmp_path, rest, "b")
    found = read(tmp_path, 0)
    assert found.groups[0].trajectories[0].unsure_call is None


async def test_content_after_damage_is_that_of_the_writer_that_continued(tmp_path):
    await write(tmp_path, records_of(several()), "a")
    data = tmp_path / "a-000001.data"
    with flipped(data, 8 + 24, 1):  # in the second segment
        found = read(tmp_path, 0)
    assert [len(t) for t in found.groups[0].trajectories] == [5]
    assert len(found.notes) == 1
    held = found.groups[0].trajectories[0]
    for version in (7, 8):
        held.extend(segment(3, version=version))
    held.close(stop_reason=StopReason.STOP, reward=2.0)
    await write(tmp_path, records_of(held, handout=1)[2:], "b")
    with flipped(data, 8 + 24, 1):
        same_trajectory(held, read(tmp_path, 0).groups[0].trajectories[0])


KILLED = """
import asyncio, sys
from pathlib import Path
from async_rl.rollout.content.writer import ContentWriter
from tests.helpers.stored import RUN, records_of
from tests.async_rl.rollout.test_content import several

async def run():
    writer = await ContentWriter.open(Path(sys.argv[1]), name="a", run=RUN, fsync=False)
    for group in range(10_000):
        for record in records_of(several(), group=group):
            await writer.append([record])
            print(".", end="", flush=True)

asyncio.run(run())
"""


@pytest.mark.parametrize("answered", [1, 400])
def test_content_that_was_answered_survives_kill_9(tmp_path, answered):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        acknowledged = len(process.stdout.read(answered))
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += len(process.stdout.read())
    whole = records_of(several())
    groups = range(acknowledged // len(whole) + 2)
    found = read(tmp_path, *groups)
    counts = [len(records_of(found.groups[group].trajectories[0])) for group in groups]
    assert found.notes == []
    assert 0 <= sum(counts) - acknowledged <= 1, "at most the append under way is there beyond"
    assert counts == sorted(counts, reverse=True)
    for group, count in zip(groups, counts, strict=True):
        if count == len(whole):
            same_trajectory(several(), found.groups[group].trajectories[0])


def test_content_of_a_cut_or_missing_file_is_a_prefix(tmp_path):
    asyncio.run(write(tmp_path, records_of(several())))
    data = tmp_path / "a-000001.data"
    intact, lengths = data.read_bytes(), set()
    for size in (*range(len(intact)), None):
        if size is None:
            data.unlink()
        else:
            data.write_bytes(intact[:size])
        found = read(tmp_path, 0)
        (note,) = found.notes
        assert ("group 0" in note, str(data) in note) == (True, True)
        assert not found.groups[0].trajectories[0].closed
        lengths.add(len(found.groups[0].trajectories[0]))
    assert lengths == {0, 2, 5, 8, 11}


def assert_prefix(part, whole):
    """The records of one trajectory are the first of another's."""
    same_trajectory(rebuilt(records_of(whole)[: len(records_of(part))]), part)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with three groups of two trajectories."""
    folder = tmp_path_factory.mktemp("written")
    made = {(g, n): several(segments=2) for g in range(3) for n in range(2)}
    asyncio.run(write(folder, [r for (g, n), t in made.items() for r in records_of(t, group=g, number=n)], at_once=3))
    return folder, made


@contextmanager
def flipped(path, at, change):
    """The file with one byte that differs."""
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[at] ^= change
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(intact)


@settings(deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_content_that_is_damaged_costs_the_tail_of_its_trajectory(written, share, change):
    folder, made = written
    path = folder / "a-000001.data"
    with flipped(path, int(share * path.stat().st_size), change):
        found = read(folder, 0, 1, 2, trajectories=2)
    parts = {key: found.groups[key[0]].trajectories[key[1]] for key in made}
    for key, part in parts.items():
        assert_prefix(part, made[key])
    (cut,) = (key for key, part in parts.items() if not part.closed)
    (note,) = found.notes
    assert (f"group {cut[0]}:" in note, str(path) in note) == (True, True)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_content_of_a_damaged_index_is_refused_or_a_prefix(written, seed):
    folder, made = written
    path = folder / "a.sqlite"
    rng = random.Random(seed)
    used = [at for at, byte in enumerate(path.read_bytes()) if byte]
    with flipped(path, rng.choice(used), rng.randrange(1, 256)):
        try:
            found = read(folder, 0, 1, 2)
        except (JournalFormatError, JournalMismatch) as error:
            assert str(path) in str(error)
            return
    for group in range(3):
        for number, part in enumerate(found.groups[group].trajectories):
            assert_prefix(part, made[group, number])


@pytest.mark.parametrize("change", ["user_version=1", f"user_version={FORMAT + 1}", "application_id=7"])
async def test_content_of_a_foreign_older_or_newer_index_is_refused(tmp_path, change):
    await write(tmp_path, records_of(several()))
    with sqlite3.connect(tmp_path / "a.sqlite") as index:
        index.execute(f"PRAGMA {change}")
    with pytest.raises(JournalFormatError, match=r"a\.sqlite"):
        read(tmp_path, 0)
    with pytest.raises(JournalFormatError, match=r"a\.sqlite"):
        remove_settled(tmp_path, {0}, keep=())


async def test_content_of_another_run_or_model_is_refused(tmp_path):
    await write(tmp_path, records_of(trajectory(segment(3, rows=(0, 4)), routing=SPEC)))
    with pytest.raises(JournalMismatch, match=r"a\.sqlite"):
        read(tmp_path, 0, run="other")
    with pytest.raises(ContractError, match="RoutedExperts"):
        read(tmp_path, 0, routing=WIDE)


async def test_content_with_fsync_is_on_the_disk_before_its_index_row(tmp_path, monkeypatch):
    seen, synced = [], []
    sync, sync_folder = os.fdatasync, os.fsync

    def watched(descriptor):
        seen.append(len(read(tmp_path, 0).groups[0].trajectories[0]))
        sync(descriptor)

    monkeypatch.setattr(content.os, "fdatasync", watched)
    monkeypatch.setattr(content.os, "fsync", lambda descriptor: synced.append(sync_folder(descriptor)))
    writer = await open_writer(tmp_path, fsync=True)
    for record in records_of(several()):
        await writer.append([record])
    ((level,),) = writer._index.execute("PRAGMA synchronous").fetchall()
    await writer.close()
    assert seen == [0, 2, 5, 8, 11, 14]
    assert (len(synced), level) == (1, 2)


async def test_content_files_go_once_their_groups_are_forgotten(tmp_path, monkeypatch):
    def numbers():
        return [int(name[2:8]) for name in files(tmp_path, "*.data")]

    monkeypatch.setattr(content, "FILE_BYTES", 100)
    writer = await open_writer(tmp_path)
    for group in range(6):
        await writer.append(records_of(several(), group=group))  # 104 bytes: a file each
    assert numbers() == [1, 2, 3, 4, 5, 6]
    await writer.forget([0, 2, 5])
    assert numbers() == [2, 4, 5, 6]
    await writer.append(records_of(several(), group=6))
    assert numbers() == [2, 4, 5, 7]
    await writer.close()
    found = read(tmp_path, *range(7))
    assert [len(g.trajectories[0]) for g in found.groups.values()] == [0, 14, 0, 14, 14, 0, 14]
    assert found.notes == []


async def test_content_of_dead_writers_is_removed_with_their_last_live_group(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "FILE_BYTES", 100)
    for name, groups in (("a", (0, 1)), ("b", (2,)), ("a-000001", (3,))):
        await write(tmp_path, [r for g in groups for r in records_of(several(), group=g)], name, at_once=6)
    remove_settled(tmp_path, {1}, keep=("b",))
    assert files(tmp_path) == ["a-000002.data", "a.sqlite", "b-000001.data", "b.sqlite"]
    assert len(read(tmp_path, 1).groups[1].trajectories[0]) == 14
    remove_settled(tmp_path, set(), keep=())
    assert list(tmp_path.iterdir()) == []


async def test_content_that_finds_the_disk_full_can_be_appended_later(tmp_path, monkeypatch):
    big = trajectory(segment(20_000))
    writer, pwritev = await open_writer(tmp_path), os.pwritev

    def full(descriptor, buffers, offset):
        pwritev(descriptor, [b"".join(buffers)[:1000]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    await writer.append(records_of(big, group=0))
    with monkeypatch.context() as patch, pytest.raises(JournalUnwritable, match=r"a-000001\.data"):
        patch.setattr(content.os, "pwritev", full)
        await writer.append(records_of(big, group=1))
    assert len(read(tmp_path, 1).groups[1].trajectories[0]) == 0
    await writer.append(records_of(big, group=1))
    await writer.close()
    found = read(tmp_path, 0, 1)
    assert found.notes == []
    assert [len(g.trajectories[0]) for g in found.groups.values()] == [20_002, 20_002]


async def test_content_writer_refuses_a_directory_that_it_cannot_write(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").touch()
    with pytest.raises(JournalUnwritable, match="file"):
        await open_writer(tmp_path / "file" / "content")
    monkeypatch.setattr(content.os, "open", refuse)  # the superuser may write anywhere
    with pytest.raises(JournalUnwritable, match=str(tmp_path)):
        await open_writer(tmp_path)


async def test_content_writer_refuses_a_name_that_is_taken_and_calls_after_its_end(tmp_path):
    writer = await open_writer(tmp_path)
    await writer.close()
    await writer.close()
    for refused in (writer.append(records_of(several())), writer.forget([0])):
        with pytest.raises(JournalError, match="closed"):
            await refused
    with pytest.raises(JournalBusy, match=r"a\.sqlite"):
        await open_writer(tmp_path)
