"""EventJournal: what a kill, another process, a full disk and damage leave of it."""

import asyncio
import random
import sqlite3
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from message_queue.disk_errors import (
    JournalBroken,
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalFull,
    JournalRunError,
    JournalUnwritable,
)
from message_queue.journal import FILE, FORMAT, JournalConfig, check_owner, open_store
from tests.unit.groups import head_for
from tests.unit.queue_runs import CALLS, Drive, copied, opened, run


async def admitted(directory, groups):
    queue, journal, _ = await opened(directory, s=999)
    admissions = [await queue.admit(prompt) for prompt in range(groups)]
    return queue, journal, admissions


def edited(directory, *statements):
    """Change the file of a closed journal."""
    connection = sqlite3.connect(directory / FILE)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def rows(directory, table):
    connection = sqlite3.connect(directory / FILE)
    try:
        return [row for (row,) in connection.execute(f"SELECT id FROM {table} ORDER BY id")]
    finally:
        connection.close()


# ---- transactions


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.unit.queue_runs import opened

async def main():
    queue, _, _ = await opened(Path(sys.argv[1]), s=10**6)
    for prompt in range(10**6):
        print((await queue.admit(prompt)).group, flush=True)

asyncio.run(main())
"""


async def test_a_killed_process_loses_no_answered_call(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    answered = [int(await process.stdout.readline()) for _ in range(50)]
    process.kill()
    answered += [int(line) for line in (await process.communicate())[0].splitlines() if line]
    _, journal, restored = await opened(tmp_path, s=10**6, busy_s=30.0)
    assert restored.live >= set(answered) and not restored.notes
    assert restored.next_group - len(answered) in (0, 1), "at most the call that was not answered"
    await journal.close()


async def test_a_kill_inside_a_transaction_leaves_the_one_before(tmp_path):
    _, journal, _ = await admitted(tmp_path / "a", 2)
    connection = journal._store._connection
    connection.execute("PRAGMA cache_size=1")  # pages are written before the commit
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO events VALUES (?, ?, 0)", ((at, b"x" * 2000) for at in range(10, 60)))
    left = copied(tmp_path / "a", tmp_path / "b")
    assert (left / f"{FILE}-journal").stat().st_size, "the transaction is under way"
    connection.execute("ROLLBACK")
    await journal.close()
    _, journal, restored = await opened(left, s=999)
    assert (restored.live, restored.notes) == ({0, 1}, ())
    await journal.close()


async def test_events_that_wait_share_a_transaction_off_the_event_loop(tmp_path):
    queue, journal, _ = await opened(tmp_path, s=99)
    statements, threads, write = [], set(), journal._store.write
    journal._store._connection.set_trace_callback(statements.append)
    journal._store.write = lambda items: (threads.add(threading.get_ident()), write(items))
    await asyncio.gather(*(queue.admit(prompt) for prompt in range(100)))
    assert statements.count("COMMIT") < 20
    assert threads and threading.get_ident() not in threads
    await journal.close()


async def test_a_cancelled_call_is_stored(tmp_path):
    queue, journal, _ = await opened(tmp_path)
    task = asyncio.ensure_future(queue.admit(0))
    async with queue._changed:
        await asyncio.sleep(0)  # the call waits for the condition
    await asyncio.sleep(0)
    assert queue.live == [0]
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    await queue.sync()
    await journal.close()
    _, journal, restored = await opened(tmp_path)
    assert [(a.group, a.prompt) for a in restored.open] == [(0, 0)]
    await journal.close()


async def test_sync_waits_until_events_are_stored(tmp_path):
    queue, journal, _ = await opened(tmp_path)
    written, write = threading.Event(), journal._store.write
    journal._store.write = lambda items: (written.wait(), write(items))
    admitting = asyncio.ensure_future(queue.admit(0))
    syncing = asyncio.ensure_future(queue.sync())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not (admitting.done() or syncing.done())
    written.set()
    await asyncio.gather(admitting, syncing)
    assert rows(tmp_path, "events") == [0]
    await journal.close()


async def test_a_checkpoint_deletes_the_events_before_it(tmp_path):
    queue, journal, admissions = await admitted(tmp_path, 3)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    await queue.take()
    await queue.trained([0, 1], train_step=1)
    saved = await queue.snapshot()
    assert rows(tmp_path, "events") and not rows(tmp_path, "groups")
    await queue.checkpointed(1)
    assert (rows(tmp_path, "events"), rows(tmp_path, "groups")) == ([], [2])
    await journal.close()
    _, journal, restored = await opened(tmp_path, step=1, checkpoint=saved)
    assert restored.live == {2}
    await journal.close()


@pytest.mark.parametrize(("fsync", "synchronous"), [(False, 0), (True, 2)])
async def test_fsync_sets_how_sqlite_synchronises(tmp_path, fsync, synchronous):
    _, journal, _ = await opened(tmp_path, config=JournalConfig(fsync=fsync))
    connection = journal._store._connection
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    await journal.close()


async def test_a_closed_journal_refuses_and_closes_again(tmp_path):
    queue, journal, _ = await admitted(tmp_path, 1)
    await journal.close()
    await journal.close()
    with pytest.raises(JournalError):
        await queue.admit(1)


# ---- refusals


async def test_an_open_journal_is_busy_until_it_is_closed(tmp_path):
    _, journal, _ = await admitted(tmp_path, 1)
    with pytest.raises(JournalBusy):
        await opened(tmp_path)
    waiting = asyncio.ensure_future(opened(tmp_path, s=999, busy_s=60.0))
    await asyncio.sleep(0)
    await journal.close()
    _, journal, restored = await waiting
    assert restored.live == {0}
    await journal.close()


async def test_the_journal_of_another_run_is_refused(tmp_path):
    check_owner(tmp_path / "none", run="run")
    _, journal, _ = await admitted(tmp_path, 1)
    check_owner(tmp_path, run="run")
    await journal.close()
    check_owner(tmp_path, run="run")
    with pytest.raises(JournalRunError, match=r"'run'.*'other'"):
        check_owner(tmp_path, run="other")
    with pytest.raises(JournalRunError):
        await opened(tmp_path, run="other")
    _, journal, restored = await opened(tmp_path)
    assert restored.live == {0}, "a refusal changes nothing"
    await journal.close()


@pytest.mark.parametrize("change", [f"PRAGMA user_version = {FORMAT + 1}", "PRAGMA application_id = 7"])
async def test_a_newer_or_foreign_format_is_refused(tmp_path, change):
    _, journal, _ = await admitted(tmp_path, 1)
    await journal.close()
    edited(tmp_path, change)
    for open_it in (lambda: opened(tmp_path), lambda: asyncio.to_thread(check_owner, tmp_path, run="run")):
        with pytest.raises(JournalFormatError, match="output_dir"):
            await open_it()


async def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"something else" * 400)
    with pytest.raises(JournalFormatError):
        await opened(tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"something else" * 400


async def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalUnwritable, match="output_dir"):
        await opened(tmp_path / "file" / "journal")


async def test_a_read_only_file_is_refused(tmp_path, monkeypatch):
    _, journal, _ = await admitted(tmp_path, 1)
    await journal.close()
    connect = sqlite3.connect
    read_only = lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)  # noqa: E731
    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(JournalUnwritable, match=FILE):
        await opened(tmp_path, s=999)


async def test_a_full_disk_loses_no_answered_call(tmp_path):
    queue, journal, _ = await admitted(tmp_path, 3)
    connection = journal._store._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    answered = 3
    with pytest.raises(JournalFull, match="make room"):
        while True:
            await queue.admit(answered)
            answered += 1
    connection.execute("PRAGMA max_page_count = 100000")
    for call in (queue.admit(9), queue.sync()):
        with pytest.raises(JournalFull):  # the state is ahead of the file now
            await call
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=999)
    assert (restored.next_group, restored.notes) == (answered, ())
    assert (await queue.admit(answered)).group == answered
    await journal.close()


async def test_a_writer_that_fails_ends_every_call_that_waits(tmp_path, monkeypatch):
    queue, journal, _ = await opened(tmp_path, s=99)

    def fail(items):
        raise MemoryError

    monkeypatch.setattr(journal._store, "write", fail)
    calls = [asyncio.ensure_future(queue.admit(prompt)) for prompt in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, JournalBroken) for result in results)
    with pytest.raises(MemoryError):
        await journal._flushing
    await journal.close()


# ---- damage


async def driven(directory, *, seed, calls, policy="recycle"):
    queue, journal, _ = await opened(directory, s=3, policy=policy)
    drive = Drive(queue, rng=random.Random(seed))
    for _ in range(calls):
        await drive.call(*CALLS)
    await journal.close()
    return drive


async def reopened(directory, drive):
    options = {"s": 3, "policy": "recycle", "step": drive.saved, "checkpoint": drive.checkpoint}
    queue, journal, restored = await opened(directory, **options)
    counts = (await queue.snapshot()).ledger
    assert (counts.error, counts.token_error) == (0, 0)
    assert restored.next_group >= len(drive.groups), "ids are never reused"
    prompts = [admission.prompt for admission in (await queue.snapshot()).unfinished]
    assert len(set(prompts)) == len(prompts)
    await journal.close()
    return queue, restored


def states(queue):
    """Group -> its life and head."""
    lives = (queue._state.open, queue._state.ready)
    return {g: (entry.life, entry.head and entry.tokens) for groups in lives for g, entry in groups.items()}


def groups_of(event):
    match type(event).__name__:
        case "Ready":
            return {event.head.group}
        case "Taken" | "Trained":
            return set(event.groups)
        case "Admitted" | "Dropped":
            return {event.group}
        case _:
            return set()


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), calls=st.integers(5, 90), data=st.data())
def test_damage_of_any_row_costs_only_the_groups_it_touches(seed, calls, data):
    async def check(directory):
        drive = await driven(directory / "a", seed=seed, calls=calls)
        places = [(t, row) for t in ("events", "groups", "head", "head_copy") for row in rows(directory / "a", t)]
        table, row = data.draw(st.sampled_from(places))
        left = copied(directory / "a", directory / "b")
        store = await open_store(left, run="run", config=JournalConfig(), busy_s=0)
        events = dict(zip(rows(left, "events"), store.read().events, strict=True))
        store.close()
        edited(left, f"UPDATE {table} SET data = x'00' || data WHERE id = {row}")
        intact, before = await reopened(directory / "a", drive)
        damaged, restored = await reopened(left, drive)
        assert any(f"row {row} of table {table}" in note for note in restored.notes)
        touched = {"events": groups_of(events.get(row)), "groups": {row}}.get(table, set())
        if table == "events" and type(events[row]).__name__ in ("Taken", "Trained", "Published"):
            touched |= before.live | restored.live  # which batches are trained again may change: see the counts only
        untouched = (before.live | restored.live) - touched - before.given_up - restored.given_up
        assert {g: states(damaged).get(g) for g in untouched} == {g: states(intact).get(g) for g in untouched}
        assert (left / "events.damaged-1.sqlite").exists()
        _, again = await reopened(left, drive)
        assert not [note for note in again.notes if FILE in note], "the damage was reported once"
        assert again.live == restored.live

    with TemporaryDirectory() as directory:
        run(check(Path(directory)))


@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_damaged_page_is_reported_or_refused(seed, place, flip):
    async def check(made):
        drive = await driven(made / "a", seed=seed, calls=200)
        directory = copied(made / "a", made / "b")
        _, intact = await reopened(made / "a", drive)
        data = bytearray((directory / FILE).read_bytes())
        at = 4096 + int(place * (len(data) - 4096))
        page = at // 4096 * 4096
        data[page : page + 4096] = bytes(byte ^ flip for byte in data[page : page + 4096])
        (directory / FILE).write_bytes(data)
        try:
            _, restored = await reopened(directory, drive)
        except JournalBroken as error:
            assert "remove the directory" in str(error)
            assert (directory / FILE).read_bytes() == data, "a refusal changes nothing"
        else:
            assert restored.notes or restored == intact, "a page that is free holds nothing"

    with TemporaryDirectory() as directory:
        run(check(Path(directory)))


async def test_newest_events_that_are_missing_are_reported(tmp_path):
    _, journal, _ = await admitted(tmp_path, 4)
    await journal.close()
    edited(tmp_path, "DELETE FROM events WHERE id >= 2")
    queue, journal, restored = await opened(tmp_path, s=999)
    assert restored.live == {0, 1} and any("2 events cannot be read" in note for note in restored.notes)
    assert (await queue.admit(9)).group == 4, "ids of groups that may have existed are not used again"
    await journal.close()


async def test_a_group_whose_admission_is_damaged_comes_from_its_head(tmp_path):
    queue, journal, admissions = await admitted(tmp_path, 3)
    await queue.put(head_for(admissions[1]))
    await journal.close()
    edited(tmp_path, "UPDATE events SET checksum = 0 WHERE id IN (0, 1)")
    _, journal, restored = await opened(tmp_path, s=999)
    assert ([a.group for a in restored.open], [a.group for a in restored.ready]) == ([2], [1])
    assert any("group 0 is dropped" in note for note in restored.notes)
    await journal.close()


async def test_one_copy_of_the_head_is_enough(tmp_path):
    _, journal, _ = await admitted(tmp_path, 2)
    await journal.close()
    edited(tmp_path, "UPDATE head SET checksum = 0")
    _, journal, restored = await opened(tmp_path, s=999)
    assert restored.live == {0, 1}
    await journal.close()
    edited(tmp_path, "UPDATE head SET checksum = 0", "UPDATE head_copy SET checksum = 0")
    with pytest.raises(JournalBroken, match="both copies"):
        await opened(tmp_path, s=999)


async def test_a_damaged_header_is_replaced_by_the_checkpoint(tmp_path):
    queue, journal, admissions = await admitted(tmp_path, 4)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    await queue.take()
    await queue.trained([0, 1], train_step=1)
    saved = await queue.snapshot()
    await queue.checkpointed(1)
    await queue.admit(4)
    await journal.close()
    change = "SET checksum = 0 WHERE id = 1"
    edited(tmp_path, f"UPDATE head {change}", f"UPDATE head_copy {change}")
    queue, journal, restored = await opened(tmp_path, s=999, step=1, checkpoint=saved)
    assert (restored.live, restored.next_group) == ({2, 3, 4}, 5)
    counts = (await queue.snapshot()).ledger
    assert (counts.admitted, counts.trained, counts.error, counts.token_error) == (5, 2, 0, 0)
    await journal.close()


async def test_a_start_that_is_killed_keeps_the_damaged_journal(tmp_path, monkeypatch):
    _, journal, _ = await admitted(tmp_path, 3)
    await journal.close()
    edited(tmp_path, "UPDATE events SET checksum = 0 WHERE id = 1")

    def killed(self, target):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(JournalBroken):
            await opened(tmp_path, s=999)
    _, journal, restored = await opened(tmp_path, s=999)
    assert restored.live == {0, 2} and restored.notes
    await journal.close()
