"""A journal with damage anywhere, or that dies in any disk operation: what is lost is reported, the rest recovered."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from message_queue.journal.errors import JournalStepError
from message_queue.journal.format import FILE_BYTES, RECORD_BYTES
from message_queue.journal.state import JournalStart
from tests.unit.journal_disk import Crash, FakeDisk
from tests.unit.journal_model import WEIGHTS, Model, content_of, opened, opened_near, view_of

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
seeds, lengths, places = st.integers(0, 1 << 16), st.integers(5, 120), st.floats(0, 1, exclude_max=True)


def work(log, model, history, *, seed, steps, clean=True):
    """A stretch of a run. Adds to `history`: sequence number -> the model as of the records before it."""
    random = Random(seed)
    for action in random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()), k=steps):
        entry = model.entry(action, random.randrange(20))
        if entry is not None:
            assert log.append([entry]) == [None]
            model.apply(entry)
            history[log.files.seq] = model.copy()
            if clean:
                log.clean(600)


def begin(seed, steps, **options):
    """(disk that a killed process left, what is in it, history)"""
    disk, model, history = FakeDisk(), Model(), {0: Model()}
    log, _ = opened(disk)
    work(log, model, history, seed=seed, steps=steps, **options)
    return disk.after_kill(), model, history


def reopen(disk, model):
    return opened(disk, train_step=model.train_step, update=model.update)


def as_of(history, log, *, train_step):
    """The model restarted at `train_step`, as of the records that a log goes on after."""
    model = history[max(seq for seq in history if seq < log.files.seq)].copy()
    model.restart(JournalStart(train_step=train_step))
    return model.view()


def require_starts(view, history):
    """No group holds anything but the start of what was recorded for it."""
    seen = {g: content_of(group["content"]) for _, m in sorted(history.items()) for g, group in m.groups.items()}
    for group, content in [*view["open"].items(), *view["ready"]]:
        assert len(content) == len(seen[group])
        assert all(whole[: len(found)] == found for found, whole in zip(content, seen[group], strict=True))


@QUICK
@given(seeds, lengths, places, st.integers(0, 7))
def test_a_bit_that_flips_anywhere_costs_only_what_is_reported(seed, steps, place, bit):
    disk, model, history = begin(seed, steps)
    data = bytearray().join(disk.files[name].data for name in sorted(disk.files))
    at = int(place * len(data))
    for name in sorted(disk.files):
        if 0 <= at < len(disk.files[name].data):
            disk.files[name].data[at] ^= 1 << bit
        at -= len(disk.files[name].data)
    try:
        log, recovered = reopen(disk, model)
    except JournalStepError:  # the record of the last train step is gone
        return
    report, view = recovered.report, view_of(log, recovered)
    require_starts(view, history)
    if report.intact and not report.cut:  # zeros between records, or what a later file says again
        model.restart(JournalStart(train_step=model.train_step, update=model.update))
        assert view == model.view()


@QUICK
@given(seeds, lengths, places)
def test_what_was_recovered_from_damage_is_whole_at_the_next_restart(seed, steps, place):
    disk, model, _ = begin(seed, steps)
    name = sorted(disk.files)[int(place * len(disk.files))]
    disk.files[name].data[int(place * 997) % len(disk.files[name].data)] ^= 255
    try:
        log, recovered = reopen(disk, model)
    except JournalStepError:
        return
    after = Model()
    after.next_group, after.prompt_cursor, after.version, after.update = 10**6, 10**6, 10**6, model.update
    after.train_step = after.settled = recovered.train_step
    work(log, after, {}, seed=seed, steps=10, clean=False)
    before = view_of(log, recovered)
    log, again = reopen(disk.after_kill(), after)
    assert again.report.intact, again.report.lines()
    view = view_of(log, again)
    assert before["open"].items() <= view["open"].items()
    assert [g for g in view["ready"] if g[0] < 10**6] == before["ready"]


@QUICK
@given(seeds, lengths, places)
def test_a_newest_file_that_ends_anywhere_gives_back_all_before(seed, steps, place):
    disk, _, history = begin(seed, steps, clean=False)
    file = disk.files[max(disk.files)]
    size = int(place * len(file.data))
    del file.data[size:]
    log, recovered = opened_near(disk, train_step=0)
    assert view_of(log, recovered) == as_of(history, log, train_step=recovered.train_step)
    assert recovered.report.intact
    assert all(cut.offset + cut.size == size for cut in recovered.report.cut)


def run_until_crash(crash_at):
    """(log, disk, history, sequence number up to which all is synced) of a run that dies in this disk operation."""
    disk, model, history, synced = FakeDisk(), Model(), {0: Model()}, 0
    log, _ = opened(disk, fsync="interval")
    disk.operations.clear()
    disk.crash_at = crash_at
    with suppress(Crash):
        for stretch in range(12):
            work(log, model, history, seed=160 + stretch, steps=14)
            log.files.sync()
            synced = log.files.seq
    return log, disk, history, synced


def test_a_process_that_dies_in_any_disk_operation_loses_nothing_it_confirmed():
    log, disk, _, _ = run_until_crash(None)
    operations = disk.operations
    assert log.cleaned_bytes > 1000
    assert set(operations) == {"create", "write", "sync", "sync directory", "remove"}
    for crash_at, operation in enumerate(operations):
        if operation == "write" and crash_at % 3:
            continue
        _, disk, history, synced = run_until_crash(crash_at)
        assert disk.dies
        for left in (disk.after_kill(), disk.after_power_loss(), disk.after_power_loss(back=False)):
            step = max(model.settled for model in history.values())
            log, recovered = opened_near(left, train_step=step, fsync="interval")
            assert recovered.report.intact
            assert log.files.seq > synced
            assert view_of(log, recovered) == as_of(history, log, train_step=recovered.train_step)


def test_damage_to_the_summary_of_any_one_file_costs_no_group():
    ended, model, history = begin(3, 150)
    assert len(ended.files) > 3
    for name in sorted(ended.files):
        disk = ended.after_kill()
        disk.files[name].data[FILE_BYTES + RECORD_BYTES + 3] ^= 1
        log, recovered = reopen(disk, model)
        expected = history[max(history)].copy()
        expected.restart(JournalStart(train_step=model.train_step, update=model.update))
        assert view_of(log, recovered) == expected.view()
        assert [damage.what for damage in recovered.report.damage] == ["Summary"]


def test_records_of_another_file_are_no_records_of_this_one():
    disk, model, _ = begin(3, 150)
    names = sorted(disk.files)
    older, newest = disk.files[names[-2]], disk.files[names[-1]]
    newest.data += older.data[FILE_BYTES:]
    _, recovered = reopen(disk, model)
    assert recovered.report.intact
    assert [cut.size for cut in recovered.report.cut] == [len(older.data) - FILE_BYTES]


def test_a_start_that_dies_in_any_disk_operation_can_be_repeated():
    ended, model, _ = begin(3, 120)
    newest = ended.files[max(ended.files)]
    newest.data += b"torn"
    ended.files[min(ended.files)].data[200] ^= 255
    crash_at = 0
    views = []
    while True:
        disk = ended.after_kill()
        disk.crash_at = crash_at
        try:
            log, recovered = opened(disk, train_step=model.train_step, fsync="interval")
        except Crash:
            log, recovered = opened(disk.after_kill(), train_step=model.train_step, fsync="interval")
            views.append(view_of(log, recovered))
            crash_at += 1
        else:
            break
    assert len(views) > 8
    assert all(view == view_of(log, recovered) for view in views)
