"""What is lost with which bytes of a journal, and what is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from message_queue.journal.errors import JournalFull
from message_queue.journal.format import FILE_BYTES, NO_GROUP, RECORD_BYTES, Entry, observation_entry
from message_queue.journal.records import Admitted, Dropped, Marked, Taken, Trained
from message_queue.journal.state import JournalStart, JournalState
from message_queue.ledger import LedgerCounts
from tests.unit.journal_disk import FakeDisk
from tests.unit.journal_model import opened


def observed(log, group, at, tokens):
    """Append `tokens` observed tokens to the one trajectory of a group."""
    return log.append([observation_entry(group, 0, np.full(tokens, at + 7, np.int32), at=at)])


def test_content_that_was_lost_never_comes_back_under_newer_content():
    disk = FakeDisk()
    log, _ = opened(disk)
    log.append([Entry(Admitted(0, 0, 0, 1, "append"), group=0)])
    for number in range(6):  # each ends its file
        assert observed(log, 0, 300 * number, 300) == [None]
    disk = disk.after_kill()
    for lost, kept in ((3, 3), (4, 4)):
        content = np.full(300, 300 * lost + 7, np.int32).tobytes()
        newest = max(name for name, file in disk.files.items() if content in file.data)
        disk.files[newest].data[600] ^= 1
        log, recovered = opened(disk)
        assert [(g.kept, g.group) for g in recovered.report.lost_content] == [(kept, 0)]
        assert recovered.open[0].lengths == (300 * kept,)
        for number in range(kept, 6):
            assert observed(log, 0, 300 * number, 300) == [None]
        disk = disk.after_kill()


def test_the_last_record_of_a_group_is_missed_where_others_follow():
    disk = FakeDisk()
    log, _ = opened(disk)
    for group in range(2):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
        observed(log, group, 0, 5)
    disk = disk.after_kill()
    data = disk.files[min(disk.files)].data
    data[data.index(np.full(5, 7, np.int32).tobytes())] ^= 1
    _, recovered = opened(disk)
    assert [(g.group, g.kept, g.known) for g in recovered.report.lost_content] == [(0, 0, 1)]
    assert [g.lengths for g in recovered.open] == [(0,), (5,)]


def test_a_second_summary_is_kept_when_all_else_is_cleaned():
    disk = FakeDisk()
    log, _ = opened(disk)
    log.append([Entry(Admitted(0, 0, 0, 1, "append"), group=0)])
    for group in range(1, 100):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
        observed(log, group, 0, 50)
        log.append([Entry(Dropped("done"), group=group)])
        log.clean(1000)
    ended = disk.after_kill()
    assert len(ended.files) == 2
    for name in ended.files:
        disk = ended.after_kill()
        disk.files[name].data[FILE_BYTES + RECORD_BYTES + 3] ^= 1
        _, recovered = opened(disk)
        assert [g.lengths for g in recovered.open] == [(0,)]
        assert recovered.next_group == 100
        assert [(damage.what, damage.lost_records) for damage in recovered.report.damage] == [("Summary", 1)]


def test_a_group_whose_admission_is_lost_is_counted_and_its_id_not_used_again():
    disk = FakeDisk()
    log, _ = opened(disk)
    for group in range(3):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
        start = min(log.files.all.values(), key=lambda file: file.number).size
    log.append([Entry(Dropped("done"), group=2)])
    data = disk.files[min(disk.files)].data
    data[start - 10] ^= 1
    disk = disk.after_kill()
    log, recovered = opened(disk, fsync="interval")
    assert recovered.report.lost_groups == (2,)
    assert [damage.what for damage in recovered.report.damage] == ["Admitted of group 2"]
    assert recovered.next_group == 3
    assert recovered.ledger == LedgerCounts(admitted=3, dropped=1, open=2, reasons={"lost": 1})
    _, again = opened(disk.after_power_loss())
    assert again.report.intact


def test_an_unfinished_write_is_cut_off_and_an_unfinished_file_set_aside():
    disk = FakeDisk()
    log, _ = opened(disk)
    log.append([Entry(Admitted(0, 0, 0, 1, "append"), group=0)])
    size = log.files.current.size
    disk = disk.after_kill()
    disk.files["000000000001.journal"].data += b"unfinished"
    disk.files["000000000002.journal"] = disk.files["000000000001.journal"].copy(disk)
    del disk.files["000000000002.journal"].data[FILE_BYTES + 20 :]
    _, recovered = opened(disk)
    assert sorted(disk.files) == ["000000000001.journal", "000000000002.journal.damaged", "000000000003.journal"]
    assert len(disk.files["000000000001.journal"].data) == size
    assert sorted(cut.size for cut in recovered.report.cut) == [10, 20]
    assert recovered.report.intact


def test_the_records_of_a_write_that_fit_stay_when_the_disk_is_full():
    disk = FakeDisk()
    log, _ = opened(disk)
    for group in range(2):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
    disk.capacity = len(disk.files[min(disk.files)].data) + 250
    tokens = np.zeros(20, np.int32)
    first, second = log.append([observation_entry(group, 0, tokens, at=0) for group in range(2)])
    assert first is None
    assert isinstance(second, JournalFull)
    _, recovered = opened(disk.after_kill())
    assert [g.lengths for g in recovered.open] == [(20,), (0,)]


def test_cleaning_keeps_files_within_their_bound():
    disk = FakeDisk()
    log, _ = opened(disk)
    for group in range(100):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
        observed(log, group, 0, 20)
        if group % 3:
            log.append([Entry(Dropped("done"), group=group)])
    while log.clean(1 << 20):
        pass
    assert log.cleaned_bytes > 3000
    assert all(file.size - file.head_bytes < 1024 + 200 for file in log.files.all.values())


def test_a_group_whose_prompt_was_admitted_again_has_ended_though_the_record_of_that_is_lost():
    state = JournalState(JournalStart())
    assert state.apply(Admitted(7, 0, 0, 1, "append"), group=0) == []
    ended = state.apply(Admitted(7, 0, 0, 1, "append"), group=1)
    assert [live.group for live in ended] == [0] and list(state.live) == [1]
    assert (state.waiting, state.recycles) == ([], {7: 1})
    assert (state.ledger().error, state.ledger().reasons) == (0, {"lost": 1})


def test_a_group_that_the_checkpoint_has_ended_is_not_there_again_where_the_record_of_its_end_is_lost():
    disk = FakeDisk()
    log, _ = opened(disk, max_file_bytes=1 << 20)
    for group in range(4):
        log.append([Entry(Admitted(group, 0, 0, 1, "append"), group=group)])
    for group in (0, 3):
        log.append([Entry(Marked(9, 1, 3), group=group)])
        log.append([Entry(Taken((group,), group), group=NO_GROUP)])
    ends = []
    for body, group in (
        (Trained((0,), 1, (), (1,)), NO_GROUP),
        (Dropped("done"), 1),
        (Trained((3,), 2, (), (0,)), NO_GROUP),
    ):
        assert log.append([Entry(body, group=group)]) == [None]
        ends.append(log.files.current.size)
    data = disk.files[min(disk.files)].data
    for end in ends[:2]:
        data[end - 10] ^= 1
    counts = LedgerCounts(trained=1, trained_tokens=2, masked_tokens=1)
    known = JournalStart(train_step=1, next_group=4, waiting=(1,), unfinished=frozenset({2, 3}), ledger=counts)
    log, recovered = opened(disk.after_kill(), start=known)
    assert [g.admission.group for g in (*recovered.open, *recovered.ready)] == [2, 3]
    assert recovered.waiting == (1,)
    total = replace(counts, admitted=4, dropped=1, open=2, tokens=3, reasons={"lost": 1})
    assert recovered.ledger == total
    disk = disk.after_kill()
    log, recovered = opened(disk, start=replace(known, unfinished=None))
    assert {g.admission.group for g in (*recovered.open, *recovered.ready)} == {0, 1, 2, 3}, "nobody knew"


def test_a_group_that_the_checkpoint_has_trained_is_not_counted_as_lost_with_its_admission():
    disk = FakeDisk()
    log, _ = opened(disk, max_file_bytes=1 << 20)
    ends = []
    for body, group in (
        (Admitted(0, 0, 0, 1, "append"), 0),
        (Marked(9, 1, 3), 0),
        (Taken((0,), 0), NO_GROUP),
        (Trained((0,), 1, (), (1,)), NO_GROUP),
    ):
        assert log.append([Entry(body, group=group)]) == [None]
        ends.append(log.files.current.size)
    disk.files[min(disk.files)].data[ends[0] - 10] ^= 1
    counts = LedgerCounts(trained=1, trained_tokens=2, masked_tokens=1)
    known = JournalStart(train_step=1, next_group=1, unfinished=frozenset(), ledger=counts)
    _, recovered = opened(disk.after_kill(), start=known)
    assert recovered.report.lost_groups == (0,), "it is told"
    assert recovered.ledger == replace(counts, admitted=1, tokens=3)
