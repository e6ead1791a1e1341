"""The journal as its callers see it: what a restart gives back, and what is refused."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from message_queue.journal import (
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalRunError,
    JournalStart,
    JournalStepError,
    JournalUnwritable,
)
from message_queue.ledger import LedgerCounts
from message_queue.tokens import ContractError, StopReason
from message_queue.trajectory import Trajectory
from message_queue.wire import WireError, encode_segment, encode_trajectory
from tests.unit.groups import SPEC, segment
from tests.unit.journal_calls import admission, finish, open_journal, prompt
from tests.unit.journal_disk import FakeDisk


@pytest.fixture
async def journal(tmp_path):
    journal, _ = await open_journal(tmp_path)
    yield journal
    await journal.close()


# ---- what a restart gives back


async def test_a_restart_continues_groups_in_every_state(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        await journal.published(1, update=1)
        for group in range(5):
            await finish(journal, group)
        await prompt(journal, 5, trajectories=2)
        await journal.sampled(5, segment(4, version=1, stop_reason=StopReason.ABORT), trajectory=1, at=2)
        await journal.dropped(4, reason="expired: too old")
        await journal.taken([1], update=1)
        await journal.taken([0], update=2)
        await journal.trained([1], train_step=2)
    journal, recovered = await open_journal(tmp_path, start=JournalStart(train_step=1, update=1))
    async with journal:
        assert [g.admission.group for g in recovered.ready] == [1, 0, 2, 3]
        assert recovered.trained == {1: 1}
        (partial,) = recovered.open
        assert partial.lengths == (2, 6)
        assert (partial.num_segments, partial.num_tokens, partial.complete) == (1, 4, False)
        assert (recovered.next_group, recovered.prompt_cursor, recovered.version) == (6, 6, 1)
        assert recovered.version_updates == {0: 0, 1: 1}
        assert recovered.is_settled(4)
        assert not recovered.is_settled(5)
        assert not recovered.is_settled(6)
        assert recovered.ledger == LedgerCounts(
            admitted=6, dropped=1, tokens=3, dropped_tokens=3, open=5, reasons={"expired": 1}
        )
        group = await journal.read(5, routing=None)
        assert group.trajectories[1].param_versions().tolist() == [-1, -1, 1, 1, 1, 1]
        assert group.trajectories[1].segments[0].stop_reason is StopReason.ABORT
        assert (await journal.read(3, routing=None)).trajectories[0].reward == 3.0


async def test_groups_of_steps_that_the_checkpoint_holds_are_settled(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        for group in range(2):
            await finish(journal, group)
            await journal.taken([group], update=group)
            await journal.trained([group], train_step=group + 1)
    journal, recovered = await open_journal(tmp_path, start=JournalStart(train_step=1))
    await journal.close()
    assert [g.admission.group for g in recovered.ready] == [1]
    assert recovered.ledger == LedgerCounts(admitted=2, trained=1, tokens=3, trained_tokens=3, open=1)


async def test_a_checkpoint_settles_and_older_ones_are_refused(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        await finish(journal, 0)
        await journal.taken([0], update=0)
        await journal.trained([0], train_step=3)
        await journal.checkpointed(3)
        assert (await journal.stats()).live_groups == 0
    with pytest.raises(JournalStepError, match="settled up to train step 3"):
        await open_journal(tmp_path, start=JournalStart(train_step=2))
    with pytest.raises(JournalStepError, match="ends at step 3"):
        await open_journal(tmp_path, start=JournalStart(train_step=4))
    journal, recovered = await open_journal(tmp_path, start=JournalStart(train_step=3))
    await journal.close()
    assert recovered.ready == ()


@pytest.mark.parametrize("resume_routing", ["append", "force", "replace", "split"])
@pytest.mark.parametrize("encoded", [False, True])
async def test_a_partial_trajectory_comes_back_with_its_rows(journal, resume_routing, encoded):
    made = Trajectory(routing=SPEC, resume_routing=resume_routing)
    await journal.admitted(admission(0), trajectories=1, resume_routing=resume_routing)
    made.observe(np.arange(3, dtype=np.int32))
    await journal.observed(0, np.arange(3, dtype=np.int32), trajectory=0, at=0)
    for version, rows in ((0, (0, 5)), (1, (2, 8)), (2, (8, 11))):
        part = segment(3, version=version, rows=rows, stop_reason=StopReason.ABORT)
        await journal.sampled(
            0,
            encode_segment(part) if encoded else part,
            trajectory=0,
            at=len(made),
            rows_held=made.num_rows if resume_routing in ("append", "force") else 0,
        )
        made.extend(part)
    (found,) = (await journal.read(0, routing=SPEC)).trajectories
    assert found.resume_routing == resume_routing
    assert np.array_equal(found.routed_experts(), made.routed_experts())
    assert np.array_equal(found.row_versions(), made.row_versions())
    assert encode_trajectory(found) == encode_trajectory(made)


async def test_rows_that_are_held_are_not_written_again(journal):
    await prompt(journal, 0, tokens=100)
    before = (await journal.stats()).live_bytes
    await journal.sampled(0, segment(2, rows=(0, 101)), trajectory=0, at=100, rows_held=99)
    assert (await journal.stats()).live_bytes - before < 200


async def test_a_call_that_was_begun_is_given_back_until_its_result_is_recorded(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        await prompt(journal, 0, trajectories=2)
        for i in range(2):
            await journal.called(0, f"search #{i}", trajectory=i, at=2)
        await journal.observed(0, np.array([7], np.int32), trajectory=0, at=2, durable=True)
    journal, recovered = await open_journal(tmp_path)
    await journal.close()
    assert recovered.open[0].calls == {1: "search #1"}


async def test_a_new_journal_starts_where_the_checkpoint_stands(tmp_path):
    counts = LedgerCounts(admitted=9, trained=9)
    start = JournalStart(train_step=5, next_group=9, prompt_cursor=11, version=5, update=5, ledger=counts)
    journal, recovered = await open_journal(tmp_path, start=start)
    async with journal:
        assert (recovered.next_group, recovered.prompt_cursor, recovered.version) == (9, 11, 5)
        assert recovered.ledger == counts
        await journal.published(6, update=6)


async def test_a_checkpoint_can_know_a_newer_version_than_the_journal(tmp_path):
    await (await open_journal(tmp_path))[0].close()
    journal, recovered = await open_journal(tmp_path, start=JournalStart(version=3, update=0))
    await journal.close()
    assert recovered.version == 3


async def test_versions_go_on_after_a_restart_though_updates_go_back(tmp_path):
    async with (await open_journal(tmp_path))[0] as journal:
        await finish(journal, 0)
        await journal.published(1, update=1)
        await journal.published(2, update=2)
    async with (await open_journal(tmp_path, start=JournalStart(version=1, update=1)))[0] as journal:
        with pytest.raises(JournalError, match="version 2 with 2 updates after version 2 with 1"):
            await journal.published(2, update=2)
        await journal.published(3, update=2)


# ---- what is refused


async def test_records_that_do_not_follow_are_refused_and_change_nothing(journal):
    await prompt(journal, 0, trajectories=2)
    token = np.array([1], np.int32)
    for call, message in (
        (journal.admitted(admission(0), trajectories=1), "group 0 was admitted before"),
        (journal.admitted(admission(1), trajectories=0), "0 trajectories"),
        (journal.observed(9, token, trajectory=0, at=0), "group 9 is not live"),
        (journal.observed(0, token, trajectory=4, at=0), "trajectories 0..3 at most; 4 is none"),
        (journal.sampled(0, segment(), trajectory=0, at=1), "has 2 tokens in the journal"),
        (journal.ready(0), r"trajectories \[0, 1\] are open"),
        (journal.taken([0], update=0), "only one that is ready"),
        (journal.trained([0], train_step=1), "only one that is taken"),
        (journal.dropped(0, reason=""), "without a reason"),
        (journal.published(0, update=0), "versions go up"),
        (journal.checkpointed(1), "the last one that trained a group is 0"),
        (
            journal.closed(0, trajectory=0, at=2, stop_reason=StopReason.STOP, reward=float("nan")),
            "rewards are finite",
        ),
        (
            journal.closed(0, trajectory=0, at=2, stop_reason=StopReason.STOP, reward=1.0, info={"a": object()}),
            "cannot be recorded",
        ),
        (journal.read(9, routing=None), "group 9 is not live"),
    ):
        with pytest.raises(JournalError, match=message):
            await call
    with pytest.raises(ContractError, match="need int32"):
        await journal.observed(0, np.array([1]), trajectory=0, at=2)
    with pytest.raises(WireError, match="cut"):
        await journal.sampled(0, b"abc", trajectory=0, at=2)
    await journal.sampled(0, segment(), trajectory=0, at=2)


async def test_the_first_record_of_a_trajectory_is_its_prompt(journal):
    await journal.admitted(admission(0), trajectories=1)
    with pytest.raises(JournalError, match="record its prompt first"):
        await journal.sampled(0, segment(), trajectory=0, at=0)


async def test_a_segment_that_arrives_twice_is_recorded_once(journal):
    await prompt(journal, 0)
    results = await asyncio.gather(
        *(journal.sampled(0, segment(), trajectory=0, at=2) for _ in range(2)), return_exceptions=True
    )
    assert results[0] is None
    assert isinstance(results[1], JournalError)


async def test_the_journal_of_another_run_is_refused(tmp_path):
    await (await open_journal(tmp_path))[0].close()
    with pytest.raises(JournalRunError, match=r"000000000001.journal is of run 'run-1', this run is 'run-2'"):
        await open_journal(tmp_path, run="run-2")
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        await open_journal(tmp_path, run="")


async def test_a_journal_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("message_queue.journal.format.FORMAT", 99)
    await (await open_journal(tmp_path))[0].close()
    monkeypatch.undo()
    with pytest.raises(JournalFormatError, match="format 99, this program reads 2"):
        await open_journal(tmp_path)


async def test_a_journal_that_is_open_is_refused_until_it_is_closed(tmp_path):
    journal, _ = await open_journal(tmp_path)
    with pytest.raises(JournalBusy, match="another process"):
        await open_journal(tmp_path)
    await journal.close()
    await (await open_journal(tmp_path))[0].close()


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    disk = FakeDisk()
    disk.errors["create"] = OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(JournalUnwritable, match=r"/run/journal/0+1\.journal .Read-only file system."):
        await open_journal(tmp_path, disk=disk)
    assert not disk.locked
    (tmp_path / "file").touch()
    with pytest.raises(JournalUnwritable, match="make the directory writable"):
        await open_journal(tmp_path / "file" / "journal")


@pytest.mark.parametrize("max_file_bytes", [1 << 20, 1024], ids=["one file", "compacted"])
async def test_prompts_that_wait_masked_tokens_and_grown_groups_survive_a_restart(tmp_path, max_file_bytes):
    async with (await open_journal(tmp_path, max_file_bytes=max_file_bytes))[0] as journal:
        for group in range(3):
            await journal.admitted(admission(group, prompt=100 + group), trajectories=1)
            await journal.dropped(group, reason="recycled: too old", again=True)
        await journal.admitted(admission(3, prompt=101), trajectories=1)
        await finish(journal, 4)
        await journal.taken([4], update=0)
        await journal.trained([4], train_step=1, masked=[2])
        await prompt(journal, 5)
        await journal.sampled(5, segment(2), trajectory=0, at=2)
        await journal.closed(5, trajectory=0, at=4, stop_reason=StopReason.ERROR, reward=0.0)
        await journal.observed(5, np.arange(2, dtype=np.int32), trajectory=1, at=0)
        await journal.sampled(5, segment(3), trajectory=1, at=2)
        for group in range(6, 30):  # files are cleaned meanwhile
            await finish(journal, group)
            await journal.dropped(group, reason="expired: too old")
    start = JournalStart(train_step=1, update=1)
    journal, recovered = await open_journal(tmp_path, start=start, max_file_bytes=max_file_bytes)
    async with journal:
        assert (recovered.waiting, recovered.recycles) == ((100, 102), {100: 1, 101: 1, 102: 1})
        ledger = recovered.ledger
        assert (ledger.trained_tokens, ledger.masked_tokens, ledger.token_error) == (1, 2, 0)
        grown = next(g for g in recovered.open if g.admission.group == 5)
        assert (grown.lengths, grown.num_tokens) == ((4, 5), 5)
        assert [len(t) for t in (await journal.read(5, routing=None)).trajectories] == [4, 5]
        await journal.admitted(admission(30, prompt=100), trajectories=1)
        await journal.dropped(3, reason="expired: too often")
    journal, recovered = await open_journal(tmp_path, start=start, max_file_bytes=max_file_bytes)
    await journal.close()
    assert (recovered.waiting, recovered.recycles) == ((102,), {100: 1, 102: 1})
