"""Whatever stops a journal, it gives back what was recorded: against a model, on a disk that forgets and runs full."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from message_queue.journal.errors import JournalFull
from message_queue.journal.state import JournalStart
from tests.unit.journal_disk import FakeDisk
from tests.unit.journal_model import WEIGHTS, Model, opened, opened_near, view_of

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class JournalMachine(RuleBasedStateMachine):
    """Records, cleans, and dies in every way.

    at: sequence number -> the model up to the record before it, so that a loss of some last records can be followed.
    """

    def __init__(self):
        super().__init__()
        self.disk, self.model = FakeDisk(), Model()
        self.log, _ = opened(self.disk, fsync="interval")
        self.at = {0: self.model.copy()}
        self.synced = self.log.files.seq

    @rule(seed=st.integers(0, 1 << 16), steps=st.integers(5, 80), cleaning=st.sampled_from([0.0, 0.5]))
    def work(self, seed, steps, cleaning):
        """A stretch of a run, with groups in all states."""
        random = Random(seed)
        for action in random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()), k=steps):
            self._append([self.model.entry(action, random.randrange(30))])
            if random.random() < cleaning:
                self.clean(500)

    def _append(self, entries):
        for entry in entries:
            if entry is None:
                continue
            (error,) = self.log.append([entry])
            if error is None:
                self.model.apply(entry)
                self.at[self.log.files.seq] = self.model.copy()
            else:
                assert isinstance(error, JournalFull)
                assert self.disk.capacity is not None

    @rule(seed=st.integers(0, 1 << 16), steps=st.integers(5, 80))
    def go_on(self, seed, steps):
        self.work(seed, steps, 0.5)

    @rule(budget=st.integers(1, 3000))
    def clean(self, budget):
        try:
            self.log.clean(budget)
        except JournalFull:
            assert self.disk.capacity is not None

    @rule()
    def sync(self):
        self.log.files.sync()
        self.synced = self.log.files.seq

    @rule(room=st.integers(0, 400))
    def fill_disk(self, room):
        self.disk.capacity = sum(len(file.data) for file in self.disk.files.values()) + room

    @rule()
    def make_room(self):
        self.disk.capacity = None

    @rule(step=st.integers(0, 9))
    def kill(self, step):
        self._restart(self.disk.after_kill(), self.log.files.seq, step)

    @rule(step=st.integers(0, 9), kept=st.floats(0, 1), back=st.booleans())
    def lose_power(self, step, kept, back):
        disk = self.disk.after_power_loss(kept=lambda unsynced: int(unsynced * kept), back=back)
        self._restart(disk, self.synced, step)

    @rule(step=st.integers(0, 9), left=st.floats(0, 1))
    def tear(self, step, left):
        """The newest file ends at any byte of what was not synced."""
        disk = self.disk.after_kill()
        file = disk.files[max(name for name in disk.files if name.endswith(".journal"))]
        del file.data[len(file.synced) + int((len(file.data) - len(file.synced)) * left) :]
        self._restart(disk, self.synced, step)

    def _restart(self, disk, least, step):
        self.disk = disk
        step = self.model.settled + step % 3  # most are steps that the journal knows
        log, recovered = opened_near(disk, train_step=step, update=self.model.update, fsync="interval")
        assert recovered.report.intact
        last = log.files.seq - 1
        assert last >= least
        update = self.model.update
        self.at = {seq: model for seq, model in self.at.items() if seq <= last}
        self.model, self.log = self.at[max(self.at)].copy(), log
        self.model.restart(JournalStart(train_step=recovered.train_step, update=update))
        assert view_of(log, recovered) == self.model.view()
        self.at[log.files.seq] = self.model.copy()
        self.synced = log.files.seq

    @invariant()
    def files_are_bounded(self):
        for file in self.log.files.all.values():
            assert file.size - file.head_bytes <= 1024 + 600

    @invariant()
    def bytes_are_accounted_for(self):
        files = self.log.files.all
        live = {
            (group.group, number): span
            for group in self.log.state.live.values()
            for number, span in enumerate(group.spans)
        }
        assert sum(len(f.live) for f in files.values()) == len(live)
        assert sum(f.live_bytes for f in files.values()) == sum(span.size for span in live.values())
        assert all((key in files[span.file].live) for key, span in live.items())


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
