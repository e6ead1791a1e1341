"""The journal under way: disks that fail, what is durable, what is shared, what waits, what does not block."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from message_queue.journal import (
    JournalBroken,
    JournalClosed,
    JournalConfig,
    JournalFull,
    JournalStart,
)
from message_queue.journal.disk import FLUSH_BYTES, OsDisk
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion
from tests.unit.groups import segment
from tests.unit.journal_calls import admission, finish, open_journal, prompt
from tests.unit.journal_disk import FakeDisk


@pytest.fixture
async def journal(tmp_path):
    journal, _ = await open_journal(tmp_path)
    yield journal
    await journal.close()


# ---- disks that fail


async def test_a_full_disk_refuses_records_whole_and_takes_them_once_there_is_room(tmp_path):
    disk = FakeDisk()
    async with (await open_journal(tmp_path, disk=disk))[0] as journal:
        await prompt(journal, 0)
        size = sum(len(file.data) for file in disk.files.values())
        disk.capacity = size + 100
        with pytest.raises(JournalFull, match=r"write \d+ of \d+ bytes to /run/journal/000000000001.journal"):
            await journal.sampled(0, segment(300), trajectory=0, at=2)
        assert sum(len(file.data) for file in disk.files.values()) == size
        disk.capacity = None
        await journal.sampled(0, segment(300), trajectory=0, at=2)
    journal, recovered = await open_journal(tmp_path, disk=disk.after_kill())
    await journal.close()
    assert recovered.report.intact
    assert recovered.open[0].lengths == (302,)


async def test_a_disk_that_does_not_take_what_was_synced_breaks_the_journal(tmp_path):
    disk = FakeDisk()
    journal, _ = await open_journal(tmp_path, disk=disk)
    disk.errors["sync"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(JournalBroken, match="could not sync"):
        await journal.admitted(admission(0), trajectories=1, durable=True)
    with pytest.raises(JournalBroken):
        await journal.admitted(admission(1), trajectories=1)
    with pytest.raises(JournalBroken):
        await journal.close()


async def test_a_thread_that_dies_tells_everyone_who_waits(tmp_path, monkeypatch):
    journal, _ = await open_journal(tmp_path)
    monkeypatch.setattr("message_queue.journal.log.JournalLog.append", lambda log, entries: 1 / 0)
    with pytest.raises(JournalBroken, match="ZeroDivisionError"):
        await journal.admitted(admission(0), trajectories=1)
    with pytest.raises(JournalBroken, match="ZeroDivisionError"):
        await journal.admitted(admission(1), trajectories=1)


# ---- durability


@pytest.mark.parametrize(("fsync", "durable"), [("always", False), ("interval", True)])
async def test_what_is_durable_survives_a_loss_of_power(tmp_path, fsync, durable):
    disk = FakeDisk()
    journal, _ = await open_journal(tmp_path, disk=disk, fsync=fsync, interval_s=1e3)
    for group in range(20):
        await journal.admitted(admission(group), trajectories=1, durable=durable)
        _, recovered = await open_journal(tmp_path, disk=disk.after_power_loss())
        assert recovered.next_group == group + 1
    await journal.close()


async def test_an_interval_syncs_without_being_asked(tmp_path):
    disk = FakeDisk()
    synced = threading.Event()
    journal, _ = await open_journal(tmp_path, disk=disk, fsync="interval", interval_s=0.01)
    await journal.admitted(admission(0), trajectories=1)
    file = next(iter(disk.files.values()))
    file.sync = lambda sync=file.sync: (sync(), synced.set())
    assert await asyncio.to_thread(synced.wait, 10)
    assert file.synced == bytes(file.data)
    await journal.close()


async def test_never_leaves_it_to_the_operating_system(tmp_path):
    disk = FakeDisk()
    async with (await open_journal(tmp_path, disk=disk, fsync="never", max_file_bytes=1024))[0] as journal:
        for group in range(20):
            await journal.admitted(admission(group), trajectories=1, durable=True)
        await journal.sync()
    assert not {"sync", "sync directory"} & set(disk.operations)


async def test_records_that_arrive_together_share_a_sync(tmp_path):
    disk = FakeDisk()
    async with (await open_journal(tmp_path, disk=disk, fsync="always"))[0] as journal:
        for group in range(50):
            await prompt(journal, group)
        before = (await journal.stats()).syncs
        await asyncio.gather(*(journal.sampled(g, segment(), trajectory=0, at=2) for g in range(50)))
        assert (await journal.stats()).syncs - before <= 3


# ---- many at once


async def test_concurrent_rollouts_are_recorded_whole_while_it_cleans(tmp_path):
    async def roll(group):
        await journal.admitted(admission(group), trajectories=4)
        async with asyncio.TaskGroup() as tasks:
            for i in range(4):
                tasks.create_task(trajectory_of(group, i))
        await journal.ready(group)

    async def trajectory_of(group, i):
        await journal.observed(group, np.array([group, i], np.int32), trajectory=i, at=0)
        for part in range(5):
            await journal.sampled(group, segment(20), trajectory=i, at=2 + 20 * part)
        await journal.closed(group, trajectory=i, at=102, stop_reason=StopReason.STOP, reward=float(i))

    journal, _ = await open_journal(tmp_path, max_file_bytes=8192)
    async with journal:
        for start in range(0, 60, 6):
            await asyncio.gather(*(roll(group) for group in range(start, start + 6)))
            gone = [g for g in range(start, start + 6) if g % 6]
            await journal.taken(gone, update=start)
            await journal.trained(gone, train_step=start + 1)
            await journal.checkpointed(start + 1)
        stats = await journal.stats()
        assert stats.cleaned_bytes > 0
        assert stats.disk_bytes < 2 * stats.live_bytes + 6 * 8192
    journal, recovered = await open_journal(tmp_path, start=JournalStart(train_step=55), max_file_bytes=8192)
    async with journal:
        assert [g.admission.group for g in recovered.ready] == list(range(0, 60, 6))
        for group in range(0, 60, 6):
            found = await journal.read(group, routing=None)
            assert [t.turns[0].observation.tolist() for t in found.trajectories] == [[group, i] for i in range(4)]
            assert found.num_tokens == 400


async def test_a_group_can_be_read_while_its_records_move(tmp_path):
    journal, _ = await open_journal(tmp_path, max_file_bytes=4096)
    async with journal:
        await prompt(journal, 0)
        for part in range(4):
            await journal.sampled(0, segment(20), trajectory=0, at=2 + 20 * part)
        for group in range(1, 300):
            await finish(journal, group)
            await journal.dropped(group, reason="done")
            if group % 20 == 0:
                found = await journal.read(0, routing=None)
                assert len(found.trajectories[0]) == 82
        assert (await journal.stats()).cleaned_bytes > 0


async def test_callers_wait_while_the_buffer_is_full(tmp_path):
    disk, gate = FakeDisk(), threading.Event()
    journal, _ = await open_journal(tmp_path, disk=disk, buffer_bytes=1000)
    await prompt(journal, 0, trajectories=8)
    file = next(iter(disk.files.values()))
    file.write = lambda parts, at, write=file.write: (gate.wait(10), write(parts, at))[1]
    calls = [asyncio.create_task(journal.sampled(0, segment(50), trajectory=i, at=2)) for i in range(8)]
    await asyncio.sleep(0.05)
    assert 0 < journal._buffer.held <= 1000
    calls[6].cancel()
    gate.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in done if result is not None] == [asyncio.CancelledError]
    assert journal._buffer.held == 0
    await journal.close()


async def test_the_event_loop_goes_on_while_the_disk_is_slow(tmp_path):
    disk, gate = FakeDisk(), threading.Event()
    journal, _ = await open_journal(tmp_path, disk=disk, fsync="always")
    file = next(iter(disk.files.values()))
    file.sync = lambda sync=file.sync: (gate.wait(10), sync())
    call = asyncio.create_task(journal.admitted(admission(0), trajectories=1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not call.done()
    gate.set()
    await call
    await journal.close()


async def test_large_rows_are_written_from_where_they_are(tmp_path):
    rows = np.tile(np.arange(8, dtype=np.uint8), (1 << 16, 48, 1))
    large = TokenOutput(
        token_ids=np.zeros(1 << 16, np.int32),
        logprobs=np.zeros(1 << 16, np.float32),
        routed_experts=RoutedExperts.trusted(first_position=1, experts=rows),
        weights=WeightVersion(0, ""),
        stop_reason=StopReason.STOP,
        replica="replica-0",
    )
    async with (await open_journal(tmp_path, fsync="never"))[0] as journal:
        await prompt(journal, 0)
        tracemalloc.start()
        await journal.sampled(0, large, trajectory=0, at=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < rows.nbytes / 10


async def test_a_cancelled_call_leaves_a_journal_that_can_be_asked(journal):
    await prompt(journal, 0)
    call = asyncio.create_task(journal.sampled(0, segment(), trajectory=0, at=2))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    length = len((await journal.read(0, routing=None)).trajectories[0])
    assert length in (2, 5)
    await journal.sampled(0, segment(), trajectory=0, at=length)


async def test_a_closed_journal_refuses_and_closes_again(tmp_path):
    journal, _ = await open_journal(tmp_path)
    await journal.close()
    await journal.close()
    with pytest.raises(JournalClosed):
        await journal.admitted(admission(0), trajectories=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("fsync", "sometimes"), ("interval_s", 0.0), ("max_file_bytes", 10), ("buffer_bytes", 0)],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=rf"journal\.{field} is .*{value}"):
        replace(JournalConfig(), **{field: value})


async def test_damage_on_a_real_disk_is_reported_and_kept(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        for group in range(3):
            await finish(journal, group)
    path = tmp_path / "000000000001.journal"
    data = bytearray(path.read_bytes())
    at = data.index(np.arange(3, dtype=np.int32).tobytes())
    data[at] ^= 1
    path.write_bytes(data + b"torn")
    journal, recovered = await open_journal(tmp_path)
    async with journal:
        report = recovered.report
        assert not report.intact
        assert [d.what for d in report.damage] == ["Sampled of group 0"]
        assert [(g.group, g.kept, g.known) for g in report.lost_content] == [(0, 1, 3)]
        assert [cut.size for cut in report.cut] == [4]
        assert report.set_aside == (f"{path}.damaged",)
        assert [g.lengths for g in recovered.open] == [(2,)]
        assert [g.admission.group for g in recovered.ready] == [1, 2]
        assert any("group 0 lost its records 1 to 2" in line for line in report.lines())
    journal, recovered = await open_journal(tmp_path)
    await journal.close()
    assert recovered.report.intact


def test_an_os_disk_writes_in_parts_and_reads_back(tmp_path):
    disk = OsDisk(tmp_path)
    file = disk.create("a")
    assert file.write([b"abc", memoryview(b"defg")], 0) == 7
    file.truncate(5)
    assert bytes(file.read(1, 100)) == b"bcde"
    disk.rename("a", "b")
    again = disk.open("b").duplicate()
    disk.remove("b")
    disk.sync()
    assert bytes(again.read(0, 5)) == b"abcde"
    assert disk.names() == []


def test_the_disk_works_early_and_no_memory_is_kept_but_a_refusal_does_no_harm(tmp_path, monkeypatch):
    advised = []

    def refuse(_, offset, size, advice):
        advised.append((offset, size, advice))
        raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    file, piece = OsDisk(tmp_path).create("file"), bytes(FLUSH_BYTES // 2)
    for number in range(3):
        assert file.write([piece], number * len(piece)) == len(piece)
    file.truncate(len(piece))
    assert file.write([piece, piece], len(piece)) == FLUSH_BYTES
    file.sync()
    forget = os.POSIX_FADV_DONTNEED
    assert advised == [(0, FLUSH_BYTES, forget), (len(piece), FLUSH_BYTES, forget), (0, 0, forget)]
    assert file.read(0, 2 * FLUSH_BYTES) == bytes(3 * len(piece))
    file.close()
