"""The journal over all starts of a run: what the disk did to it, who opened it, and what a person does about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.checkpoints import CheckpointConfig, Checkpoints, RunState, read_run_state
from async_rl.rollout.contents import StoredContent
from async_rl.simulate.disk import Disk
from async_rl.simulate.oracle import Oracle
from async_rl.simulate.restarts import Reopened
from async_rl.simulate.scenario import KINDS, Fault, Scenario
from async_rl.simulate.violations import Violation
from message_queue.contract import QueueSnapshot
from message_queue.recovery import JournalPlace, Restored

OPERATOR_S = 20.0  # until a run is started again
REMOVES = ("remove the directory", "which drops its groups in flight")  # in errors of a journal that cannot be used


class JournalWatch:
    """Tells the oracle of every restart of the queue.

    Args:
        directory: of the run.
    """

    def __init__(self, scenario: Scenario, *, oracle: Oracle, disk: Disk, directory: Path) -> None:
        self._scenario = scenario
        self._oracle = oracle
        self._disk = disk
        self._directory = directory
        self._state = RunState()
        self._new_driver = False
        self._refused = self._attempts = 0

    @property
    def is_opening(self) -> bool:
        """Whether a queue has begun to open its journal, and has not said what it goes on from."""
        return self._attempts > 0

    def newest_state(self) -> RunState:
        """Of the newest checkpoint."""
        latest = Checkpoints(self._directory / "checkpoints", config=CheckpointConfig()).latest()
        return RunState() if latest is None else read_run_state(latest)

    def driver_starts(self) -> None:
        """With new replicas."""
        self._new_driver = True
        self._oracle.begin()

    def queue_starts(self, journal: JournalPlace) -> None:
        """It is about to open its journal."""
        self._state = RunState() if journal.checkpoint is None else self.newest_state()
        self._attempts += 1

    def reopened(self, restored: Restored, stored: StoredContent, snapshot: QueueSnapshot) -> None:
        """The journal is open, and the content of its groups was read.

        Raises:
            Violation: the run does not continue as it must.
        """
        if self._disk.damaged_events:
            raise Violation("exactly once", "a damaged journal of events is opened")
        found = Reopened(
            state=self._state,
            restored=restored,
            stored=stored,
            snapshot=snapshot,
            attempts=self._attempts,
            updates_per_batch=self._scenario.updates_per_batch,
        )
        new_driver, self._new_driver = self._new_driver, False
        self._attempts = 0
        self._oracle.reopened(found, damaged_groups=self._disk.damaged_groups, new_driver=new_driver)

    def read_error(self, error: str) -> None:
        """What a person does who reads why the run ended.

        Raises:
            Violation: the journal is refused though the disk kept its promises.
        """
        if "journal" not in error:
            return
        if any(text in error for text in REMOVES):
            if not self._disk.damaged_events:
                raise Violation("exactly once", f"the journal is refused: {error}")
            shutil.rmtree(self._directory / "journal")
            self._disk.damaged_events = False
            self._oracle.journal_is_gone()
        self._refused += 1
        if self._refused % 2 == 0:
            self._disk.repair()


def may_end(error: str, *, fired: Sequence[Fault], scenario: Scenario, lost: int, disk_was_broken: bool) -> bool:
    """Whether a run may end with an error.

    Args:
        fired: faults since it was started. lost: replicas.
    """
    kinds = [KINDS[fault.kind] for fault in fired]
    if any(kind.ends_run and not kind.of_disk for kind in kinds):
        return True
    if lost >= scenario.replicas and any(kind.loses_replica for kind in kinds):
        return True
    if sum(kind.loses_part for kind in kinds) > scenario.max_restarts:
        return True
    if sum(kind.loses_worker for kind in kinds) >= scenario.workers * (scenario.max_restarts + 1):
        return True
    of_disk = disk_was_broken or any(kind.of_disk for kind in kinds)
    return any(text in error for text in REMOVES) or ("journal" in error and of_disk)


def drops_are_excused(fired: Sequence[Fault]) -> Callable[[], bool]:
    """Whether a group may have been dropped for a failed rollout by now; `fired` grows."""
    return lambda: any(KINDS[fault.kind].drops_group for fault in fired)


def most_starts(scenario: Scenario) -> int:
    """How often a run is started at most until it is done."""
    kinds = [KINDS[fault.kind] for fault in scenario.faults]
    stops = sum(fault.kind == "stop is asked for" for fault in scenario.faults)
    return 1 + stops + sum(k.starts for k in kinds if k.ends_run or k.loses_replica or k.loses_part or k.loses_worker)
