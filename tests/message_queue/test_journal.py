"""EventJournal after kills, next to another process, on a full disk and with damage."""

import asyncio
import contextlib
import random
import shutil
import sqlite3
import sys
import threading

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from message_queue.errors import (
    JournalBroken,
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalMismatch,
    JournalUnwritable,
)
from message_queue.journal import FILE, FORMAT, JournalConfig, check_owner
from message_queue.ledger import Drop, DropKind
from message_queue.state import QueueSnapshot
from tests.helpers.groups import head_for
from tests.helpers.queue_runs import CALLS, Drive, copied, opened, reopened


async def admitted(directory, groups):
    queue, journal, _ = await opened(directory, s=999)
    admissions = [await queue.admit(prompt) for prompt in range(groups)]
    return queue, journal, admissions


def edited(directory, statement):
    """Rows that a statement returns or changes in the file of a journal."""
    with contextlib.closing(sqlite3.connect(directory / FILE)) as connection, connection:
        return connection.execute(statement).fetchall()


def rows(directory, table):
    return [row for (row,) in edited(directory, f"SELECT id FROM {table} ORDER BY id")]


# ---- transactions


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.helpers.queue_runs import opened

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
    restored, _ = await reopened(tmp_path, s=10**6, busy_s=30.0)
    assert restored.live >= set(answered) and not restored.notes
    assert restored.next_group - len(answered) in (0, 1), "at most the call that was not answered"


async def test_a_kill_inside_a_transaction_leaves_the_one_before(tmp_path):
    _, journal, _ = await admitted(tmp_path / "a", 2)
    connection = journal._connection
    connection.execute("PRAGMA cache_size=1")  # pages are written before the commit
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO events VALUES (?, ?, 0)", ((at, b"x" * 2000) for at in range(10, 60)))
    left = copied(tmp_path / "a", tmp_path / "b")
    assert (left / f"{FILE}-journal").stat().st_size, "the transaction is under way"
    connection.execute("ROLLBACK")
    await journal.close()
    restored, _ = await reopened(left, s=999)
    assert (restored.live, restored.notes) == ({0, 1}, ())


async def test_events_that_wait_share_a_transaction_off_the_event_loop(tmp_path):
    queue, journal, _ = await opened(tmp_path, s=99)
    statements, threads, write = [], set(), journal._write
    journal._connection.set_trace_callback(statements.append)
    journal._write = lambda items: (threads.add(threading.get_ident()), write(items))
    await asyncio.gather(*(queue.admit(prompt) for prompt in range(100)))
    assert statements.count("COMMIT") < 20
    assert threads and threading.get_ident() not in threads
    await journal.close()


async def test_a_cancelled_call_is_stored_at_the_latest_by_close(tmp_path):
    queue, journal, _ = await opened(tmp_path)
    task = asyncio.ensure_future(queue.admit(0))
    while not queue._state.live:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await journal.close()
    restored, _ = await reopened(tmp_path)
    assert [(a.group, a.prompt) for a in restored.open] == [(0, 0)]


async def test_sync_waits_until_events_are_stored(tmp_path):
    queue, journal, _ = await opened(tmp_path)
    written, write = threading.Event(), journal._write
    journal._write = lambda items: (written.wait(), write(items))
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
    assert rows(tmp_path, "events")
    await queue.checkpointed(1)
    assert rows(tmp_path, "events") == []
    await journal.close()
    restored, _ = await reopened(tmp_path, step=1, checkpoint=saved)
    assert restored.live == {2}


@pytest.mark.parametrize(("fsync", "synchronous"), [(False, 0), (True, 2)])
async def test_fsync_sets_how_sqlite_synchronises(tmp_path, fsync, synchronous):
    _, journal, _ = await opened(tmp_path, config=JournalConfig(fsync=fsync))
    connection = journal._connection
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
    await journal.close()


async def test_a_closed_journal_refuses_and_closes_twice(tmp_path):
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
    waiting = asyncio.ensure_future(reopened(tmp_path, s=999, busy_s=60.0))
    await asyncio.sleep(0.1)  # it finds the file locked
    await journal.close()
    restored, _ = await waiting
    assert restored.live == {0}


async def test_the_journal_of_another_run_is_refused(tmp_path):
    check_owner(tmp_path / "none", run="run")
    _, journal, _ = await admitted(tmp_path, 1)
    check_owner(tmp_path, run="run")
    await journal.close()
    check_owner(tmp_path, run="run")
    with pytest.raises(JournalMismatch, match="other"):
        check_owner(tmp_path, run="other")
    with pytest.raises(JournalMismatch):
        await opened(tmp_path, run="other")
    restored, _ = await reopened(tmp_path)
    assert restored.live == {0}, "a refusal changes nothing"


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (JournalFormatError, f"PRAGMA user_version = {FORMAT + 1}"),
        (JournalFormatError, "PRAGMA application_id = 7"),
        (JournalBroken, "UPDATE state SET checksum = 0"),
    ],
)
async def test_a_journal_of_a_newer_or_damaged_format_is_refused_by_both(tmp_path, error, change):
    _, journal, _ = await admitted(tmp_path, 1)
    await journal.close()
    edited(tmp_path, change)
    for open_it in (lambda: opened(tmp_path), lambda: asyncio.to_thread(check_owner, tmp_path, run="run")):
        with pytest.raises(error, match=FILE):
            await open_it()


async def test_a_journal_file_that_is_no_database_is_refused_and_kept(tmp_path):
    (tmp_path / FILE).write_bytes(b"something else" * 400)
    with pytest.raises(JournalBroken, match=FILE):
        await opened(tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"something else" * 400


async def test_a_journal_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(JournalUnwritable, match="output_dir"):
        await opened(tmp_path / "file" / "journal")
    await reopened(tmp_path)
    connect = sqlite3.connect
    read_only = lambda path, **options: connect(path.replace("=rwc", "=ro"), **options)  # noqa: E731
    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(JournalUnwritable, match=FILE):
        await opened(tmp_path)


async def test_a_full_disk_loses_no_answered_call(tmp_path):
    queue, journal, _ = await admitted(tmp_path, 3)
    connection = journal._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    answered = 3
    with pytest.raises(JournalUnwritable, match=FILE):
        while True:
            await queue.admit(answered)
            answered += 1
    connection.execute("PRAGMA max_page_count = 100000")
    for call in (queue.admit(9), queue.sync()):
        with pytest.raises(JournalUnwritable):  # the state is ahead of the file now
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

    monkeypatch.setattr(journal, "_write", fail)
    calls = [asyncio.ensure_future(queue.admit(prompt)) for prompt in range(3)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert all(isinstance(result, JournalBroken) and isinstance(result.__cause__, MemoryError) for result in results)
    await journal.close()


# ---- damage


async def driven(directory, *, seed, calls):
    """Random calls to a queue whose journal is in `directory`."""
    queue, journal, _ = await opened(directory, s=3, policy="recycle")
    drive = Drive(queue, rng=random.Random(seed), s=3)
    for _ in range(calls):
        await drive.call(*CALLS)
    await journal.close()
    return drive


async def start_again(directory, drive, **options):
    restored, snapshot = await reopened(
        directory, s=3, policy="recycle", step=drive.saved, checkpoint=drive.checkpoint, **options
    )
    assert (snapshot.ledger.error, snapshot.ledger.token_error) == (0, 0)
    return restored, snapshot


async def refused(directory, drive):
    """The start names the file and the directory, changes nothing, and succeeds once the directory is removed."""
    before = (directory / FILE).read_bytes()
    with pytest.raises(JournalBroken, match=f"{FILE}.* {directory}"):
        await start_again(directory, drive)
    assert (directory / FILE).read_bytes() == before
    shutil.rmtree(directory)
    checkpoint = drive.checkpoint or QueueSnapshot()
    restored, snapshot = await start_again(directory, drive, waiting=checkpoint.prompts, prompt_cursor=7)
    assert (restored.began, restored.live, snapshot.unfinished) == (True, frozenset(), ())
    assert (restored.waiting, restored.prompt_cursor) == (checkpoint.prompts, 7)
    assert snapshot.ledger.dropped == checkpoint.ledger.dropped + len(checkpoint.unfinished)


def damage(data, directory):
    """A statement that changes or deletes some rows of the journal."""
    stored = [(table, row) for table in ("events", "state") for row in rows(directory, table)]
    table, row = data.draw(st.sampled_from(stored))
    values = ("data = x'00' || data", "checksum = x'00' || checksum", "checksum = NULL", "data = NULL")
    last = data.draw(st.sampled_from([other for name, other in stored if name == table and other >= row]))
    return data.draw(
        st.sampled_from(
            [
                *(f"UPDATE {table} SET {value} WHERE id = {row}" for value in values),
                f"DELETE FROM {table} WHERE id BETWEEN {row} AND {last}",
            ]
        )
    )


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), calls=st.integers(5, 90), data=st.data())
async def test_a_journal_with_damaged_or_missing_rows_is_refused(tmp_path_factory, seed, calls, data):
    directory = tmp_path_factory.mktemp("journal")
    drive = await driven(directory, seed=seed, calls=calls)
    edited(directory, damage(data, directory))
    await refused(directory, drive)


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE events",
        "DROP TABLE state",
        "INSERT INTO events VALUES (99, x'', 0)",
        "DELETE FROM sqlite_sequence",
        "UPDATE sqlite_sequence SET seq = seq + 1",
    ],
)
async def test_a_journal_with_missing_or_surplus_parts_is_refused(tmp_path, change):
    drive = await driven(tmp_path / "journal", seed=0, calls=30)
    edited(tmp_path / "journal", change)
    await refused(tmp_path / "journal", drive)


@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
async def test_a_journal_with_a_damaged_page_is_refused(tmp_path_factory, seed, place, flip):
    made = tmp_path_factory.mktemp("damaged")
    directory = made / "journal"
    drive = await driven(directory, seed=seed, calls=200)
    intact = copied(directory, made / "intact")
    data = bytearray((directory / FILE).read_bytes())
    page = int(place * len(data)) // 4096 * 4096
    data[page : page + 4096] = bytes(byte ^ flip for byte in data[page : page + 4096])
    (directory / FILE).write_bytes(data)
    try:
        left = await start_again(directory, drive)
    except JournalBroken:
        await refused(directory, drive)
    else:
        assert left == await start_again(intact, drive), "a page that is free holds nothing"


async def test_a_journal_with_a_damaged_list_of_free_pages_is_refused(tmp_path):
    queue, journal, _ = await admitted(tmp_path, 300)
    for group in queue._state.live:
        await queue.drop(group, reason=Drop(DropKind.ROLLOUT_FAILED, "why"))
    await queue.checkpointed(0)
    await journal.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    page = int.from_bytes(data[32:36], "big")  # the first that is free
    assert page, "the rows that the checkpoint deleted leave free pages"
    data[4096 * (page - 1) + 4 : 4096 * (page - 1) + 8] = b"\xff\xff\xff\xff"  # number of free pages that it names
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(JournalBroken, match=FILE):
        await opened(tmp_path, s=999)
