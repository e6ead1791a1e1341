"""The journal over all starts of a run: what the disk did to it, who opened it, and what a person does about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.checkpoints import CheckpointConfig, Checkpoints, RunState, read_run_state
from async_rl.simulate import model
from async_rl.simulate.disk import Disks
from async_rl.simulate.oracle import Oracle, Violation
from async_rl.simulate.restarts import Reopened
from async_rl.simulate.scenario import KINDS, Fault, Scenario
from message_queue.contract import QueueSnapshot
from message_queue.restart import JournalPlace, Restored, decode_restored

OPERATOR_S = 20.0  # until somebody starts a run again


class JournalWatch:
    """Tells the oracle of every restart of the queue.

    Args:
        directory: of the run.
        fired: faults that happened; grows.
    """

    def __init__(
        self, scenario: Scenario, *, oracle: Oracle, disk: Disks, directory: Path, fired: Sequence[Fault]
    ) -> None:
        self._scenario = scenario
        self._oracle = oracle
        self._disk = disk
        self._directory = directory
        self._fired = fired
        self._state = RunState()
        self._power_lost = self._new_driver = False
        self._refused = self._attempts = 0

    @property
    def _damaged(self) -> bool:
        return any(fault.kind == "bits flip" for fault in self._fired)

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

    def reopened(self, restored: Restored[bytes], snapshot: QueueSnapshot) -> None:
        """It did.

        Raises:
            Violation: it does not go on as it has to.
        """
        found = Reopened(
            state=self._state,
            restored=decode_restored(restored, routing=model.ROUTING),
            snapshot=snapshot,
            attempts=self._attempts,
            updates_per_batch=self._scenario.updates_per_batch,
        )
        new_driver, self._new_driver = self._new_driver, False
        self._attempts, self._power_lost = 0, False
        self._oracle.reopened(found, damaged=self._damaged, new_driver=new_driver)

    def lose_power(self) -> None:
        """The machine died."""
        self._disk.lose_power()
        self._oracle.told.power_lost()
        self._power_lost = True

    def read_error(self, error: str) -> None:
        """What a person does who reads why the run ended.

        Raises:
            Violation: the journal is refused though the disk kept its promises.
        """
        if "journal" not in error:
            return
        if "move the journal away" in error:
            excused = self._damaged or (self._scenario.fsync == "never" and self._power_lost)
            if not excused:
                raise Violation("exactly once", f"the journal is refused: {error}")
            self._disk.clear()
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
    of_disk = disk_was_broken or any(kind.of_disk for kind in kinds)
    return "move the journal away" in error or ("journal" in error and of_disk)


def drops_are_excused(fired: Sequence[Fault]) -> Callable[[], bool]:
    """Whether a group may have been dropped for a failed rollout by now; `fired` grows."""
    return lambda: any(KINDS[fault.kind].drops_group for fault in fired)


def most_starts(scenario: Scenario) -> int:
    """How often a run is started at most until it is done."""
    kinds = [KINDS[fault.kind] for fault in scenario.faults]
    stops = sum(fault.kind == "stop is asked for" for fault in scenario.faults)
    return 1 + stops + sum(k.starts for k in kinds if k.ends_run or k.loses_replica or k.loses_part)
