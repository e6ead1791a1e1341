"""Restarts under another staleness policy or bound: what may be given up, and what may be trained otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_rl.simulate.acknowledged import Expected
from async_rl.simulate.recycles import is_recycled
from async_rl.simulate.restarts import Reopened
from async_rl.simulate.scenario import Scenario
from message_queue.contract import Admission
from message_queue.staleness import StalenessConfig

Require = Callable[..., None]


class PolicyChanges:
    """The policy and the bound of each start of a driver.

    Args:
        require: called with (invariant, whether it holds, text, values).
    """

    def __init__(self, scenario: Scenario, *, require: Require) -> None:
        self._scenario = scenario
        self._require = require
        self._starts = 0
        self._opened_by = 0
        self._untold: Sequence[Mapping[str, Any]] = ()

    @property
    def now(self) -> StalenessConfig:
        """Of the driver that runs."""
        return self._scenario.staleness_of(max(0, self._starts - 1))

    @property
    def scenario(self) -> Scenario:
        """With the policy and the bound of now."""
        return replace(self._scenario, policy=self.now.policy, max_staleness=self.now.max_staleness)

    def begin(self) -> None:
        """A driver starts."""
        self._starts += 1

    def ended(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the queue knows of groups that ended, and may have told nobody yet."""
        self._untold = records

    def given_up(
        self, found: Reopened, expected: Expected, *, admissions: Mapping[int, Admission], updates: Mapping[int, int]
    ) -> dict[int, int | None]:
        """Groups that the queue gave up as it opened the journal -> the prompt, None where it is recycled.

        Each is too old for the policy of now, but for policy wait, which gives up what it has no room for. Where an
        attempt to open it was cut off, that may have given up more, by the policy of that time.

        Args:
            expected: what was acknowledged. updates: by version, as the trainer counts them.
        """
        before = {self._scenario.staleness_of(start) for start in range(self._opened_by, self._starts)}
        self._opened_by = max(0, self._starts - 1)
        ended: dict[int, int | None] = {}
        for record in self._untold:
            if record["outcome"] != "dropped":
                continue
            admission = admissions[record["group"]]
            age = self._age(found, updates[admission.admitted_version])
            enough = age > self.now.max_staleness or self.now.policy == "wait"
            self._require("failure", enough, "{} is given up at the age of {} under {}", admission, age, self.now)
            ended[admission.group] = None if is_recycled(record) else admission.prompt
        told = not ended or any("given up" in note for note in found.restored.notes)
        self._require("failure", told, "groups {} are given up, and nobody is told", sorted(ended))
        if found.attempts > 1:
            ended |= self._given_up_before(found, expected, by=before, updates=updates)
        return ended

    def _given_up_before(
        self, found: Reopened, expected: Expected, *, by: set[StalenessConfig], updates: Mapping[int, int]
    ) -> dict[int, int | None]:
        ended: dict[int, int | None] = {}
        waiting, steps = set(found.restored.waiting), expected.step_of()
        for group, admission in expected.admitted.items():
            if group in found.live or group in expected.dropped:
                continue
            if steps.get(group, found.state.train_step + 1) <= found.state.train_step:
                continue
            age = self._age(found, updates[admission.admitted_version])
            if any(config.policy == "wait" or age > config.max_staleness for config in by):
                ended[group] = None if admission.prompt in waiting else admission.prompt
        return ended

    def _age(self, found: Reopened, update: int) -> int:
        """Staleness at the last optimizer step of the next batch."""
        return found.end - min(found.end, update) + self._scenario.updates_per_batch - 1

    def forget_what_is_trained_otherwise(self, expected: Expected, found: Reopened) -> None:
        """Take back steps of which other tokens would take gradient now, where a person is told, or was to be."""
        told = any("not trained again in the batches they were in" in note for note in found.restored.notes)
        told = told or found.attempts > 1
        if told and len(self._used) > 1:
            expected.trained = {step: groups for step, groups in expected.trained.items() if step <= found.end}

    def reasons(self, *, damaged: bool) -> set[str]:
        """For which groups may have been dropped by now for their age.

        damaged: what was trained may be ready again, so that groups behind it find no place within the bound.
        """
        policies = {used.policy for used in self._used}
        without_place = "wait" in policies and (damaged or len(self._used) > 1)
        expired = {"expired"} if policies != {"wait"} else set[str]()
        return expired | ({"recycled"} if "recycle" in policies or without_place else set())

    @property
    def _used(self) -> set[StalenessConfig]:
        return {self._scenario.staleness_of(start) for start in range(self._starts)}
