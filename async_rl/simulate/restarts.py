"""Whether a restart has everything that was acknowledged, and nothing that had ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_rl.checkpoints import RunState
from async_rl.rollout.contents import StoredContent
from async_rl.simulate.acknowledged import Acknowledged
from async_rl.simulate.scenario import Scenario
from async_rl.simulate.violations import require
from message_queue.contract import Admission, QueueSnapshot
from message_queue.recovery import Restored
from message_queue.trajectory import Trajectory

TOLD_LOSSES = ("damaged", "left out", "are dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """State of a run at its start.

    state: of the checkpoint. attempts: to open the journal, this one included, since one succeeded.
    updates_per_batch: optimizer steps of each batch that is trained again.
    """

    state: RunState
    restored: Restored
    stored: StoredContent
    snapshot: QueueSnapshot
    attempts: int
    updates_per_batch: int = 1

    @property
    def end(self) -> int:
        """Optimizer updates once everything is trained again that was trained."""
        return self.state.train_step + self.restored.replay * self.updates_per_batch

    @property
    def live(self) -> dict[int, Admission]:
        """Groups that go on."""
        return {admission.group: admission for admission in self.snapshot.unfinished}

    @property
    def open(self) -> dict[int, Sequence[Trajectory]]:
        """Groups whose rollouts continue, and their trajectories."""
        groups = self.stored.groups
        return {a.group: groups[a.group].trajectories if a.group in groups else () for a in self.restored.open}

    @property
    def notes(self) -> tuple[str, ...]:
        """Shown to the user."""
        return (*self.restored.notes, *self.stored.notes)

    @property
    def losses_are_told(self) -> bool:
        """Whether the user sees that something is missing, or may have seen it at an attempt before."""
        return self.attempts > 1 or any(word in note for note in self.notes for word in TOLD_LOSSES)


class RestartJudge:
    """Compares what is there with what the driver was told.

    Args:
        dropped: groups that the queue gave up, whoever was told. updates: by version, as the trainer counts them.
    """

    def __init__(self, reopened: Reopened, *, dropped: Collection[int], updates: dict[int, int]) -> None:
        self._reopened = reopened
        self._dropped = dropped
        self._updates = updates

    def check_nothing_is_lost(self, expected: Acknowledged) -> None:
        """Everything that was acknowledged is there, as it was."""
        state, restored, live = self._reopened.state, self._reopened.restored, self._reopened.live
        steps = expected.step_of()
        for group, admission in expected.admitted.items():
            if group in expected.dropped or steps.get(group, state.train_step + 1) <= state.train_step:
                require("exactly once", group not in live, "group {} ended, and is there again", group)
            elif group not in self._dropped:
                self._check_group(admission, expected)
        again = len(expected.replay(state.train_step))
        require("exactly once", restored.replay >= again, "{} of {} steps again", restored.replay, again)
        version = expected.version
        require("versions", restored.version >= version, "goes on after {}, not {}", restored.version, version)
        cursor = max([state.prompt_cursor, *(a.prompt + 1 for a in expected.admitted.values())])
        require("exactly once", restored.prompt_cursor >= cursor, "prompt {} of {}", restored.prompt_cursor, cursor)

    def check_content(self, expected: Acknowledged, *, damaged: Collection[int]) -> None:
        """A damaged record costs only its group: the others have what was stored of them."""
        steps = expected.step_of()
        for group, held in self._reopened.open.items():
            ended = group in expected.dropped or group in self._dropped or group in steps
            if not ended and group not in damaged:
                check_stored(group, held, expected)

    def check_consistent(self) -> None:
        """Whatever is missing, what is there fits together."""
        snapshot, restored = self._reopened.snapshot, self._reopened.restored
        counts = snapshot.ledger
        require("ledger", counts.error == 0, "ledger/error is {} after a restart: {}", counts.error, counts)
        for version, update in restored.version_updates.items():
            known = min(self._updates.get(version, update), self._reopened.end)
            require("versions", update == known, "version {} holds {} updates, not {}", version, update, known)

    # ---- inside

    def _check_group(self, admission: Admission, expected: Acknowledged) -> None:
        group, end = admission.group, self._reopened.end
        found = self._reopened.live.get(group)
        require("exactly once", found is not None, "group {} was acknowledged and is lost", group)
        as_it_was = replace(admission, admitted_update=min(admission.admitted_update, end))
        require("exactly once", found == as_it_was, "{} goes on as {}", as_it_was, found)
        held = self._reopened.open.get(group)
        if group in expected.ready:
            require("exactly once", held is None, "group {} was ready and is to be generated again", group)
        if held is None:
            return
        check_stored(group, held, expected)


def check_stored(group: int, held: Sequence[Trajectory], expected: Acknowledged) -> None:
    """Everything of a group that was stored is there."""
    have_of = dict(enumerate((len(t), t.closed) for t in held))
    for number, told in expected.stored.get(group, {}).items():
        have = have_of.get(number, (0, False))
        kept = have[0] >= told[0] and have[1] >= told[1]
        require("exactly once", kept, "trajectory {} of group {} is {}, not {}", number, group, have, told)


def note_restart(told: Acknowledged, found: Reopened) -> None:
    """Reduce what was acknowledged to the state at the restart."""
    replay, groups = told.replay(found.state.train_step), found.open
    told.trained = {step: batch for step, batch in replay.items() if step <= found.end}
    told.admitted, told.dropped = dict(found.live), set()
    told.ready = found.live.keys() - groups.keys()
    told.stored = {g: {n: (len(t), t.closed) for n, t in enumerate(held)} for g, held in groups.items()}
    told.version = found.restored.version


class GivenUp:
    """Groups that a restart drops: those that are too old, or with policy wait those without a place in time."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._records: Sequence[Mapping[str, Any]] = ()

    def ended(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Groups that the queue knows to have ended, and may not have reported."""
        self._records = records

    def check(
        self,
        found: Reopened,
        expected: Acknowledged,
        *,
        admissions: Mapping[int, Admission],
        updates: Mapping[int, int],
    ) -> dict[int, int | None]:
        """Groups that were dropped as the journal was opened -> the prompt, None if it is admitted again.

        An attempt to open it that was cut short may have dropped some without a report.

        Args:
            expected: acknowledged facts.
            updates: by version, as the trainer counts them.
        """
        ended: dict[int, int | None] = {}
        for record in self._records:
            if record["outcome"] != "dropped":
                continue
            admission = admissions[record["group"]]
            excused = self._may_end(found, admission, updates)
            require("failure", excused, "{} is dropped by a restart under {}", admission, self._scenario.policy)
            ended[admission.group] = None if is_recycled(record) else admission.prompt
        noted = not ended or any("dropped" in note for note in found.notes)
        require("failure", noted, "groups {} are dropped without a note", sorted(ended))
        if found.attempts > 1:
            waiting, steps = set(found.restored.waiting), expected.step_of()
            for group, admission in expected.admitted.items():
                in_checkpoint = steps.get(group, found.state.train_step + 1) <= found.state.train_step
                if group in found.live or group in expected.dropped or in_checkpoint:
                    continue
                if self._may_end(found, admission, updates):
                    ended[group] = None if admission.prompt in waiting else admission.prompt
        return ended

    def reasons(self, *, damaged: bool) -> set[str]:
        """Reasons for which groups may have been dropped for their age.

        Args:
            damaged: trained groups may be ready again, so that groups behind them have no place within the bound.
        """
        policy = self._scenario.policy
        expired = {"expired"} if policy != "wait" else set[str]()
        return expired | ({"recycled"} if policy == "recycle" or (policy == "wait" and damaged) else set())

    def _may_end(self, found: Reopened, admission: Admission, updates: Mapping[int, int]) -> bool:
        update = updates[admission.admitted_version]
        age = found.end - min(found.end, update) + self._scenario.updates_per_batch - 1
        return age > self._scenario.max_staleness or self._scenario.policy == "wait"


def is_recycled(record: Mapping[str, Any]) -> bool:
    """Whether the prompt of a dropped group is admitted again."""
    return (record["reason"] or "").startswith("recycled")
